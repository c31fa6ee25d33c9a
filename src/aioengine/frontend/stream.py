"""A request being read: the object that `Engine.stream` returns for ``async with``."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator
from types import CoroutineType, TracebackType
from typing import Any, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar

from aioengine.core.listener import UNLIMITED
from aioengine.frontend.call import Call
from aioengine.frontend.request_state import RequestState
from aioengine.frontend.runtime import Runtime
from aioengine.outputs import CompletionDelta, RequestOutput
from aioengine.sampling_params import SamplingParams


class NotCopied:
    """`copy` and `pickle` raise TypeError: the first copy that is collected would close the parts of both."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: share this one, or make another one")


class Stream(NotCopied):
    """A request being read. Made by `Engine.stream`; the request begins with the ``async with`` block.

    One task reads it. Unread tokens are merged into the next delta, so that a slow reader delays no other. With several
    choices each delta is of one choice (``delta.index``), in the order in which they come.

    Attributes:
        request_id: the request's.
        arrival_time: the start of its latencies, in Unix seconds; set it before entering. None: the time of entering.
    """

    def __init__(self, engine: object, runtime: Runtime, call: Call) -> None:
        """A ``call`` that is not checked yet is checked on entering, once the engine has started."""
        self.request_id = call.options.request_id
        self._engine = engine  # keeps the engine alive while its stream is read
        self._runtime = runtime
        self._call = call
        self._state = RequestState(self.request_id)
        self.arrival_time: float | None = None
        self._is_entered = False
        self._is_exhausted = False

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters: those of the call, with the model's defaults."""
        if not self._call.is_checked:
            raise RuntimeError("the engine was still starting: enter the stream first, which waits for it")
        return self._call.params

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("a stream is entered once; call engine.stream again")
        self._runtime.check_loop()
        self._is_entered = True
        self._runtime.admission.enter(self._state)
        try:
            await self._begin()
        except BaseException as error:
            self._state.end_span(error)
            self._runtime.admission.leave(self._state)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
        self._runtime.admission.leave(self._state)

    async def _begin(self) -> None:
        """Acquire capacity, prepare the prompt, hand it to the core. Nothing is awaited once the core has it."""
        runtime, call, state = self._runtime, self._call, self._state
        options = call.options
        if not call.is_checked:
            await runtime.wait_started(options.on_full)
            await runtime.turns.take()
            runtime.core.check_accepting()  # an engine that has ended would leave it in the queue for ever
            call.check(runtime)
        state.arrive(runtime.core, self.arrival_time)
        state.stream_interval = options.stream_interval or runtime.config.stream_interval
        state.max_unread = options.max_unread_tokens or UNLIMITED
        trace = state.begin_span(call.operation, call.params, options.trace_headers)
        num_acquired = await runtime.admission.acquire(state, options.on_full, call.incoming)
        try:
            if num_acquired:
                runtime.core.check_accepting()
                size = call.num_chars
                prepared = await runtime.worker_for(size).run(call.prepare, size, runtime, trace)
                state.begin(*prepared, runtime.tokenizer)
            else:
                await runtime.turns.take()
                state.end_unbegun(*call.unprepared())
        finally:
            runtime.admission.release(state, num_acquired)

    def abort(self) -> None:
        """End the request with the output that it has. Synchronous and idempotent."""
        self._runtime.abort(self._state)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompletionDelta:
        """The next delta, with all new output of one choice; after the last delta, StopAsyncIteration.

        Raises:
            StepFailed, EngineDead, EngineClosed: after all earlier output was read.
        """
        while (delta := self.take()) is None:
            if self._is_exhausted:
                raise StopAsyncIteration
            await self._entered().wait(for_end=False)
        return delta

    async def begun(self) -> None:
        """Wait until the request runs, or has ended: its grammar is compiled then, if it has one.

        Raises:
            InvalidRequest: the grammar cannot be enforced.
            EngineOverloaded, StepFailed, EngineDead, EngineClosed: the request has ended with this error.
        """
        state = self._entered()
        await state.started.wait()
        if state.is_ended and state.error is not None:
            self._is_exhausted = True
            raise state.error.anew()

    async def finish(self) -> RequestOutput:
        """Wait for the end without reading; return the whole output. Lifts ``max_unread_tokens``."""
        state = self._entered()
        await state.wait(for_end=True)
        if state.error is not None:
            raise state.error.anew()
        return self.result

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change``, on the loop, when there is something new to read or the request ends; at once if so now.

        With `take` or `poll`, for one reader of many streams instead of a task for each. It is called once for all
        unread output of a choice, and again only after that was read: read until `take` returns None.

        ``on_change`` must only wake a reader, and not read: it runs inside the engine's own work on this request. Its
        errors are logged. It must not hold the engine, since an engine that is dropped is to close itself.
        """
        self._entered().watch(on_change)

    def take(self) -> CompletionDelta | None:
        """The next delta, as by ``async for``, without waiting; None if there is none now, or at the end.

        `watch` notifies of the next delta; `is_ended` is True after the last one.

        Raises:
            StepFailed, EngineDead, EngineClosed: once, after all earlier output was read.
        """
        state = self._entered()
        if self._is_exhausted:
            return None
        delta = state.take()
        if delta is None and state.is_ended:
            self._is_exhausted = True
            if state.error is not None:
                raise state.error.anew()
        return delta

    @property
    def is_ended(self) -> bool:
        """Whether the request has ended and all of it was read, its error included: `take` returns nothing more."""
        state = self._entered()
        return self._is_exhausted or (state.is_ended and state.error is None and not state.has_output)

    def poll(self) -> RequestOutput:
        """Read all output so far and return it, without waiting.

        Raises:
            StepFailed, EngineDead, EngineClosed: the request has ended with this error.
        """
        state = self._entered()
        while state.take() is not None:
            pass
        if state.is_ended and state.error is not None:
            raise state.error.anew()
        return self.result

    def check_accepting(self, num_sequences: int | None = None) -> None:
        """Check as `Engine.check_accepting`, for the tenant of this request.

        Args:
            num_sequences: of this request and others that are made with it; absent: of this request alone.
        """
        params = self.params
        asked = params.num_sequences if num_sequences is None else num_sequences
        self._runtime.admission.check(asked, self._call.incoming)
        self._runtime.core.check_accepting()

    @property
    def result(self) -> RequestOutput:
        """The output so far."""
        return self._entered().output()

    def _entered(self) -> RequestState:
        if not self._state.is_begun:
            raise RuntimeError("enter the stream first: `async with engine.stream(...) as stream:`")
        return self._state


P = ParamSpec("P")
T = TypeVar("T")


class AwaitOnly:
    """A coroutine (for ``await``, tasks, ``gather``, frameworks) whose error in ``async for`` names `Engine.stream`."""

    __slots__ = ("__weakref__", "_coroutine", "close", "send", "throw")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.send, self.throw, self.close = coroutine.send, coroutine.throw, coroutine.close

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __aiter__(self) -> NoReturn:
        self.close()  # else Python would also warn that it was never awaited
        raise TypeError(
            "generate gives one output: `await engine.generate(...)`. To read it as it comes: "
            "`async with engine.stream(...) as stream:`, and in it `async for delta in stream:`"
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # read by `inspect.iscoroutine` and asyncio
        return CoroutineType

    def __getattr__(self, name: str) -> Any:  # cr_frame and so on, and its names
        return getattr(self._coroutine, name)

    def __repr__(self) -> str:
        return repr(self._coroutine)


def await_only(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a coroutine function return an `AwaitOnly`. Costs half a microsecond a call."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return AwaitOnly(function(*args, **kwargs))

    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(call)
    call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # what asyncio looks for there
    return call
