"""The public face: an engine that lives in the caller's event loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import anyio

from aioengine.config import EngineConfig
from aioengine.engine_core import PauseMode
from aioengine.errors import ConfigError, EngineClosed, InvalidRequest
from aioengine.executor.protocol import Executor, ExecutorInfo
from aioengine.intake import OnFull
from aioengine.metrics import EngineMetrics, EngineStats, Observer
from aioengine.outputs import RequestOutput
from aioengine.prompt import ChatMessage, Prompt, check_call, check_params, make_id, take_prompt
from aioengine.runtime import Runtime
from aioengine.sampling_params import SamplingParams, make_params
from aioengine.stream import Call, Profile, Stream
from aioengine.validation import check_known_fields, shorten

__all__ = ["ChatMessage", "Engine", "Prompt", "Stream"]


class Engine:
    """An inference engine, whole, inside this process and this event loop.

    Made in a moment; the model is loaded by ``async with`` or by `start`. All methods belong to the loop that it was
    started on. Requests run side by side: start as many as you like with ``asyncio.gather`` or a task group.

    Args:
        model: a hub id, a folder, or None for the bundled demo model.
        executor: a device side of your own, such as `aioengine.testing.FakeExecutor`; the model then serves for its
            tokenizer and its generation config alone. It is closed with the engine, also when that cannot start.
        config: the fields of `EngineConfig`.
    Raises:
        ConfigError: a field is unknown, or its value is bad.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, executor: Executor | None = None, **config: Any
    ) -> None:
        check_known_fields(EngineConfig, config, lambda _, message: ConfigError(message))
        self.config = EngineConfig(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **config)
        self._given_executor = executor
        self._runtime: Runtime | None = None

    @classmethod
    async def start(
        cls, model: str | os.PathLike[str] | None = None, *, executor: Executor | None = None, **config: Any
    ) -> Self:
        """Make an engine and start it, for notebooks and apps where no ``async with`` fits; close it with `aclose`.

        Cancelling stops the loading and leaves nothing behind.

        Raises:
            ConfigError, ModelLoadError: it cannot be started; nothing is left behind.
        """
        engine = cls(model, executor=executor, **config)
        await engine._start()
        return engine

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # closing has a deadline of its own
            await self.aclose()

    async def aclose(self, *, drain: bool = False) -> None:
        """Stop, and free everything: tasks, threads, files, memory. Idempotent; from any task of the engine's loop.

        Cancelling stops the wait, not the closing.

        Args:
            drain: first let all requests end that were made before, those included that wait for a place, and what is
                paused. A reader that has stalled at its ``max_unread_tokens`` is waited for: bound that with a timeout
                of your own, and `abort_all`. Without ``drain`` all requests hear `EngineClosed`.
        """
        if self._runtime is not None:
            await self._runtime.aclose(drain=drain)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_full: OnFull = "wait",
        **sampling: Any,
    ) -> RequestOutput:
        """Complete a prompt.

        Cancelling aborts the request: it is in no later step, and its memory is free for the next one.

        Args:
            prompt: text, token ids, or chat messages.
            params: how to sample; or give its fields as keywords. The model's generation config has the defaults of
                keywords that are not given.
            request_id: your name for it; it may repeat. One is made up when absent.
            priority: smaller goes first, and takes the place of larger ones that run; equal ones go by age.
            cache_salt: share cached prefixes only with requests of the same salt.
            on_full: with ``max_waiting`` requests waiting already, "wait" for a place or "raise" `EngineOverloaded`.
        Raises:
            InvalidRequest: a value is bad; raised before anything is queued.
            EngineOverloaded, StepFailed, EngineDead, EngineClosed: see there.
        """
        async with self.stream(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            on_full=on_full,
            **sampling,
        ) as stream:
            return await stream.finish()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_full: OnFull = "wait",
        max_unread_tokens: int | None = None,
        stream_interval: int | None = None,
        **sampling: Any,
    ) -> Stream:
        """Complete a prompt and read it as it comes.

        ``async with engine.stream(...) as stream: async for delta in stream: ...``. Arguments and errors are those of
        `generate`, and two more. Leaving the block, for any reason, aborts the request.

        Args:
            max_unread_tokens: with so many of a choice unread it is not computed any further until they are read; it
                then holds no running place and is the first to lose its memory. What is being computed at that moment
                still comes: at most a token for each step in flight. Absent: what is unread is merged.
            stream_interval: tokens of a choice between two deltas, the first and the last delta aside; absent: the
                engine's.
        """
        runtime = self._running()
        runtime.check_loop()
        checked = make_params(params, runtime.sampling_defaults, sampling)
        check_params(checked, runtime)
        priority, max_unread_tokens, stream_interval = check_call(
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            on_full=on_full,
            max_unread_tokens=max_unread_tokens,
            stream_interval=stream_interval,
        )
        call = Call(
            params=checked,
            request_id=make_id() if request_id is None else request_id,
            priority=priority,
            cache_salt=cache_salt or "",
            on_full=on_full,
            max_unread_tokens=max_unread_tokens,
            stream_interval=runtime.config.stream_interval if stream_interval is None else stream_interval,
        )
        return Stream(self, runtime, take_prompt(prompt, runtime), call)

    def abort(self, request_id: str) -> None:
        """End all requests of this id with what they have: ``finish_reason`` is "abort". Synchronous and idempotent."""
        if self._runtime is not None:
            self._runtime.abort(request_id)

    def abort_all(self) -> None:
        """End all requests, those that wait for a place included, with what they have. Synchronous and idempotent."""
        if self._runtime is not None:
            self._runtime.abort_all()

    async def drain(self) -> None:
        """Take no new requests, and wait until all that were made before have ended; `resume` takes new ones again.

        Those that wait for a place are served, too, and what was paused goes on. A reader that has stalled at its
        ``max_unread_tokens`` is waited for: bound that with a timeout of your own, and `abort_all`. A `pause` meanwhile
        holds it up. Returns early when it is resumed. Idempotent. Cancelling stops the wait alone.

        Raises:
            EngineDead, EngineClosed: it came to an end before they did.
        """
        runtime = self._running()
        runtime.check_loop()
        await runtime.drain()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Wait until the device is idle, and keep it so until `resume`: requests are accepted, and wait.

        Idempotent, and safe beside anything; a second pause adds to the first. Cancelling stops the wait: the engine
        pauses all the same. Returns early when it is resumed meanwhile.

        Args:
            mode: what becomes of accepted requests: "keep" stops them where they are, to go on from there; "wait" lets
                them end first, slow readers' with ``max_unread_tokens`` included; "abort" ends them with what they
                have.
        Raises:
            InvalidRequest: there is no such mode.
        """
        if not isinstance(mode, str) or mode not in get_args(PauseMode):
            modes = ", ".join(map(repr, get_args(PauseMode)))
            raise InvalidRequest(f"mode={shorten(mode)}: choose one of {modes}", param="mode")
        runtime = self._running()
        runtime.check_loop()
        await runtime.pause(mode)

    async def resume(self) -> None:
        """Go on after `pause`, and take requests again after `drain`. Idempotent."""
        runtime = self._running()
        runtime.check_loop()
        runtime.resume()

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes: no later request sees KV from before. Idempotent; running requests go on.

        Returns:
            how many KV blocks had been kept for a prefix.
        """
        runtime = self._running()
        runtime.check_loop()
        return runtime.core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """The engine's numbers now, and since its start.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().engine_stats()

    @property
    def metrics(self) -> EngineMetrics:
        """The metric objects behind `stats`, for an exporter: ``for metric in engine.metrics.collect(): ...``.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().current_metrics()

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """From now on tell ``observer`` of each step and each request's end; what is returned stops that, once.

        It is called on the loop, between steps. What it raises is logged.
        """
        core = self._running().core
        # Never changed in place: whoever comes or goes may do so while all of them are being told.
        core.observers = [*core.observers, observer]
        is_told = True

        def stop() -> None:
            nonlocal is_told
            if is_told:
                is_told = False
                place = next(place for place, other in enumerate(core.observers) if other is observer)
                core.observers = core.observers[:place] + core.observers[place + 1 :]

        return stop

    def profile(self, path: str | os.PathLike[str], *, max_steps: int = 100) -> Profile:
        """Record what the device does: ``async with engine.profile("trace.json"): ...``.

        What comes out is torch's own trace, for https://ui.perfetto.dev or chrome://tracing: an event a step of the
        device, named ``step N (R rows, T tokens)``, and in it each operation with those inside it. Steps of all
        requests are in it. The file is there when the block is left, also by an error; a block that is cancelled may
        leave none.

        The price: while it records, a step takes a fifth longer. Then torch holds the GIL, and with it the event loop,
        for 2 to 5 µs an operation after the last step, and for 1 to 3 µs at the end of the block. ``max_steps`` bounds
        that: 100 steps of the demo model have 100,000 operations, hold the loop for 0.2 to 0.5 s and again for 0.1 to
        0.3 s, and make a file of 25 MB.

        Args:
            max_steps: record so many steps of the device, and no more.
        Raises:
            InvalidRequest: a value is bad; or, on entering the block, torch's profiler is in use: it has one a process.
            OSError: on leaving the block: the file cannot be written. The recording is then lost.
            EngineClosed: the engine is not running, or was closed in the block.
        """
        if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
            raise InvalidRequest(f"max_steps={shorten(max_steps)}: an int of at least 1 is needed", param="max_steps")
        if not (isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str) and Path(path).name):
            raise InvalidRequest(f"path={shorten(path)}: the name of a file is needed", param="path")
        runtime = self._running()
        runtime.check_loop()
        return Profile(runtime.executor, Path(path), max_steps)

    @property
    def info(self) -> ExecutorInfo:
        """What the device offers: KV blocks, lengths, sizes.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().executor.info

    def describe(self) -> str:
        """One line about the model, its weights and its KV cache, for a person.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().describe()

    async def _start(self) -> None:
        if self._runtime is not None:
            raise EngineClosed("an engine starts once; make a new one")
        self._runtime = runtime = Runtime(self.config, self._given_executor)
        await runtime.start()

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise EngineClosed(
                "the engine has not been started: use `async with Engine(...)` or `await Engine.start(...)`"
            )
        self._runtime.check_running()
        return self._runtime

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is not None and runtime.is_open:
            runtime.abandon()
            message = f"{self!r} was never closed: use `async with`, or await aclose()"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "new" if self._runtime is None else "open" if self._runtime.is_open else "closed"
        return f"<Engine {self.config.model or 'demo'!r} {state}>"
