"""`LLMEngine`: requests are added, and steps bring what is new of them, in the names of vLLM's class."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import heapq
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Self

import msgspec

from aioengine.blocking.facade import Facade
from aioengine.config import NEUTRAL_CONFIG, EngineConfig
from aioengine.engine import Engine, Stream
from aioengine.errors import AioEngineError, ConfigError, EngineClosed, EngineDead, EngineOverloaded, InvalidRequest
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.validation import check_known_fields, shorten


class LLMEngine(Facade):
    """An engine for loops of one's own, for scripts written against vLLM's class of this name.

    ```python
    engine = LLMEngine(model="...")
    engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=64))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text, output.finished)
    ```

    The engine computes while `step` (or another method) waits, and rests between.
    """

    def _open(self, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        super()._open(start)
        self._live: dict[str, Stream] = {}
        self._outside = _Outside()
        self._inbox = _Inbox()
        # What is known and not told yet: Ctrl-C in a step must lose nothing.
        self._outputs: dict[str, RequestOutput] = {}
        self._errors: dict[str, AioEngineError] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any = None, **config: Any) -> Self:
        """Make an engine of an `EngineConfig`, a dict, a dataclass or any object with such attributes, or of keywords.

        Attributes that are None count as absent; keywords win.

        Raises:
            ConfigError: there are attributes that the engine does not know; names them.
        """
        given = {**_attributes(engine_args), **config}
        given = {name: value for name, value in given.items() if value is not None}
        known = {*EngineConfig.__struct_fields__, *inspect.signature(Engine).parameters} - {"config"}
        unknown = [name for name in given if name not in known and name not in NEUTRAL_CONFIG]
        if len(unknown) == 1:
            check_known_fields(EngineConfig, unknown, lambda _, message: ConfigError(message))
        if unknown:
            names = ", ".join(map(shorten, sorted(unknown)))
            raise ConfigError(f"unknown parameters {names}; known: {', '.join(sorted(known))}")
        return cls(**given)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request. There is no bound: what finds no place in the engine waits here, by priority, then age.

        Args:
            request_id: names it in `step`'s outputs; no unfinished request may have it.
            prompt: text, token ids, chat messages, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: how to sample; absent: as the model's generation config says.
            priority, cache_salt: as in `Engine.generate`.
        Returns:
            the request's id.
        Raises:
            InvalidRequest: a value is bad. Where the request waits here, a text whose length in tokens is too much
                raises later, in `step`.
            EngineDead: see there.
        """
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id={shorten(request_id)}: a str is needed", param="request_id")
        if self._knows(request_id):
            raise InvalidRequest(
                f"request_id={shorten(request_id)} is that of an unfinished request; choose another, or abort that one",
                param="request_id",
            )

        async def add(engine: Engine) -> None:
            stream = engine.stream(
                prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, on_full="raise"
            )
            if not self._outside:
                try:
                    return await self._enter(request_id, stream)
                except EngineOverloaded:
                    pass
            self._outside.add(request_id, stream, priority)
            return None

        self._host.run(add)
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Forget these requests; no `step` brings anything of them any more. Unknown ids are fine."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)

        async def abort(_: Engine) -> None:
            for request_id in ids:
                await self._drop(request_id)

        self._host.run(abort)

    def has_unfinished_requests(self) -> bool:
        """Whether a `step` has anything to bring."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output, or error, no `step` has brought yet."""
        num_ended = sum(output.finished for output in self._outputs.values())
        return len(self._live) + len(self._outside) + len(self._errors) + num_ended

    # What they bring

    def step(self) -> list[RequestOutput]:
        """Wait until there is something new of at least one request, and return what is new.

        An output has all of its request so far, all choices included; ``finished`` ones are the last of theirs. Ctrl-C
        loses nothing: the requests stay, and the next step goes on.

        Returns:
            at most one output for each request; empty only if nothing is unfinished.
        Raises:
            AioEngineError: a request has failed (`StepFailed`, or `InvalidRequest` of one that had waited here). It is
                gone; its id is in the error's notes. The others go on with the next step. What else was new has been
                returned before.
            EngineDead: the engine broke; raised once, and all requests are gone.
            RuntimeError: the engine sleeps, and there is nothing to return.
        """
        self._host.check_usable()
        if self.has_unfinished_requests() and not self._errors:
            self._host.run(self._advance)
        outputs, self._outputs = list(self._outputs.values()), {}
        if not outputs and self._errors:
            raise self._errors.pop(next(iter(self._errors)))
        return outputs

    def close(self) -> None:
        """Stop, and free everything; unfinished requests are gone. Idempotent."""
        super().close()
        self._forget_all()

    async def _advance(self, engine: Engine) -> None:
        await self._let_in(engine)
        if not (self._inbox or self._has_report):
            await self._check_awake(engine)
            await self._inbox.wait()
        while (request_id := self._inbox.first()) is not None:
            await self._read(request_id)

    @property
    def _has_report(self) -> bool:
        return bool(self._outputs or self._errors)

    async def _let_in(self, engine: Engine) -> None:
        """Let in those who wait outside, in order, as far as the engine takes them."""
        while (head := self._outside.first()) is not None:
            request_id, stream = head
            # With nothing to wait for but a place, others than this object's requests have them all.
            must_wait = not (self._live or self._inbox or self._has_report)
            if must_wait:
                await self._check_awake(engine)
            try:
                await self._enter(request_id, stream.again("wait" if must_wait else "raise"))
                self._outside.remove(request_id)
            except EngineOverloaded:
                return
            except AioEngineError as error:
                await self._fail(request_id, error)

    async def _enter(self, request_id: str, stream: Stream) -> None:
        await stream.__aenter__()
        self._live[request_id] = stream
        # What the engine holds must not hold this object, or dropping it would close nothing.
        stream.watch(functools.partial(self._inbox.put, request_id))

    async def _read(self, request_id: str) -> None:
        """Take what is new of a request from its stream; nothing is awaited before it is safe."""
        try:
            output = self._live[request_id].poll()
        except AioEngineError as error:
            await self._fail(request_id, error)
            return
        self._outputs[request_id] = output
        self._inbox.remove(request_id)
        if output.finished:
            await self._leave(request_id)

    async def _fail(self, request_id: str, error: AioEngineError) -> None:
        if isinstance(error, EngineDead | EngineClosed):  # theirs all the same, and heard once
            live = list(self._live.values())
            self._forget_all()
            self._errors = {request_id: error}
            for stream in live:
                await stream.__aexit__(None, None, None)
            return
        error.add_note(f"request_id={request_id!r}")
        self._errors[request_id] = error
        self._outputs.pop(request_id, None)
        self._outside.remove(request_id)
        await self._leave(request_id)

    async def _drop(self, request_id: str) -> None:
        self._outputs.pop(request_id, None)
        self._errors.pop(request_id, None)
        self._outside.remove(request_id)
        await self._leave(request_id)

    async def _leave(self, request_id: str) -> None:
        stream = self._live.pop(request_id, None)
        if stream is not None:
            await stream.__aexit__(None, None, None)
        self._inbox.remove(request_id)  # aborting is news, too

    def _knows(self, request_id: str) -> bool:
        return any(request_id in place for place in (self._live, self._outside, self._errors, self._outputs))

    def _forget_all(self) -> None:
        for place in (self._live, self._outside, self._inbox, self._outputs, self._errors):
            place.clear()


class _Inbox:
    """Which requests have news, in the order in which it came; for one who waits."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._waiter: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._ids)

    def put(self, request_id: str) -> None:
        self._ids[request_id] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def first(self) -> str | None:
        return next(iter(self._ids), None)

    def remove(self, request_id: str) -> None:
        self._ids.pop(request_id, None)

    def clear(self) -> None:
        self._ids.clear()

    async def wait(self) -> None:
        """Until there is any. Cancelling takes nothing away."""
        while not self._ids:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class _Outside:
    """Requests that found no place in the engine yet, by priority, then age."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        """As they were refused."""
        self._queue: list[tuple[int, int, str]] = []
        """(priority, arrival, id) as a heap; those who have left stay in it until they come up."""
        self._numbers: dict[str, int] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def add(self, request_id: str, stream: Stream, priority: int) -> None:
        self._streams[request_id] = stream
        self._numbers[request_id] = self._num_arrivals
        heapq.heappush(self._queue, (priority, self._num_arrivals, request_id))
        self._num_arrivals += 1

    def first(self) -> tuple[str, Stream] | None:
        while self._queue:
            _, number, request_id = self._queue[0]
            if self._numbers.get(request_id) == number:  # else it has left, and its name may be another's now
                return request_id, self._streams[request_id]
            heapq.heappop(self._queue)
        return None

    def remove(self, request_id: str) -> None:
        """Idempotent."""
        self._streams.pop(request_id, None)
        self._numbers.pop(request_id, None)

    def clear(self) -> None:
        self._streams.clear()
        self._numbers.clear()
        self._queue.clear()


def _attributes(engine_args: Any) -> dict[str, Any]:
    """What an object of arguments says, by name."""
    if engine_args is None:
        return {}
    if isinstance(engine_args, Mapping):
        return dict(engine_args)
    if isinstance(engine_args, msgspec.Struct):
        return {name: getattr(engine_args, name) for name in engine_args.__struct_fields__}
    if dataclasses.is_dataclass(engine_args) and not isinstance(engine_args, type):
        return {field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)}
    if hasattr(engine_args, "__dict__") and not isinstance(engine_args, type):
        return dict(vars(engine_args))
    raise ConfigError(
        f"engine_args={shorten(engine_args)}: give an EngineConfig, a dict, a dataclass or an object with such fields"
    )
