"""`LLMEngine`: requests are added, and steps return their new outputs, under the names of vLLM's class."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, Unpack

import msgspec

from aioengine.blocking.facade import Facade
from aioengine.compat.stat_loggers import StatLoggerFactory, StatLoggers
from aioengine.engine import Engine, EngineKeywords, Stream
from aioengine.errors import AioEngineError, ConfigError, EngineClosed, EngineDead, EngineOverloaded, InvalidRequest
from aioengine.frontend.call_options import CallKeywords, lists_keywords
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.validation import invalid, shorten


class LLMEngine(Facade):
    """An engine that a script steps in a loop of its own, as with vLLM's class of this name.

    ```python
    engine = LLMEngine(model="...")
    engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=64))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text, output.finished)
    ```

    The engine computes all the time, also between steps. Each output and each error comes in one step; of several
    threads in `step`, one gets it.
    """

    @lists_keywords(EngineKeywords)
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        stat_loggers: Iterable[StatLoggerFactory] | None = None,
        log_stats: bool | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        """Start an engine, with the arguments of `Facade` and two more.

        Args:
            stat_loggers: called with the engine's config and 0, each returns a logger with the methods of vLLM's
                `StatLoggerBase`; see `aioengine.compat.stat_loggers`.
            log_stats: False writes no log lines about the load (``log_stats_interval_s=0``).
        """
        if log_stats is False:
            options.setdefault("log_stats_interval_s", 0.0)
        super().__init__(model, **options)
        self.log_stats = log_stats is not False
        try:
            loggers = self._stat_loggers = StatLoggers(stat_loggers or (), self.engine_config)
            if loggers.loggers:
                self._host.ask(lambda engine: engine.add_observer(loggers))
                loggers.call("log_engine_initialized")
        except BaseException:
            self.close()
            raise

    def _open(self, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        super()._open(start)
        self._requests = _Requests(self._host.start_soon)
        self._stat_loggers = StatLoggers((), self.engine_config)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any = None,
        usage_context: Any = None,
        stat_loggers: Iterable[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
        **config: Any,
    ) -> Self:
        """Make an engine from an `EngineConfig`, a dict, a dataclass or an object with such attributes, or keywords.

        Attributes that are None count as absent; keywords win.

        Args:
            usage_context: ignored.
            stat_loggers: as of `LLMEngine`.
            enable_multiprocessing: True is ``process=True``.

        Raises:
            ConfigError: the engine does not know an attribute, which the error names.
        """
        given = {**_attributes(engine_args), **config, "stat_loggers": stat_loggers}
        if enable_multiprocessing:
            given.setdefault("process", True)
        return cls(**{name: value for name, value in given.items() if value is not None})

    tokenizer = property(Facade.get_tokenizer)

    def do_log_stats(self) -> None:
        """Call ``log`` of each of the ``stat_loggers``."""
        self._stat_loggers.call("log")

    # Requests

    @lists_keywords(CallKeywords)
    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        **options: Unpack[CallKeywords],
    ) -> str:
        """Queue a request, without a bound: requests beyond the engine's capacity wait, by priority, then age.

        Args:
            request_id: the request's name in `step`'s outputs; no unfinished request may have the same.
            prompt: text, token ids, chat messages, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: how to sample; absent: by the model's generation config.
            arrival_time: the start of the request's latencies, in Unix seconds; absent: now.
            priority, options: as in `Engine.generate`, whose fields of ``params`` it takes as keywords, too.
        Returns:
            the request's id.
        Raises:
            InvalidRequest: a value is bad. If the request waits for capacity, a text of too many tokens raises later,
                in `step`.
            EngineDead: see there.
        """
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id={shorten(request_id)}: a str is needed", param="request_id")
        is_number = isinstance(arrival_time, int | float) and not isinstance(arrival_time, bool)
        if arrival_time is not None and not (is_number and math.isfinite(arrival_time)):
            message = f"arrival_time={shorten(arrival_time)}: a number of Unix seconds is needed"
            raise InvalidRequest(message, param="arrival_time")

        async def add(engine: Engine) -> None:
            self._requests.check_new(request_id)
            stream = engine.stream(prompt, params, request_id, priority=priority, **options)
            stream.arrival_time = arrival_time
            await self._requests.add(stream)

        self._host.run(add)
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort these requests; no later `step` returns anything of them. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)

        async def abort(_: Engine) -> None:
            for request_id in ids:
                await self._requests.forget(request_id)

        self._host.run(abort)

    def has_unfinished_requests(self) -> bool:
        """Whether there is a request whose last output, or error, no `step` has returned yet."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Number of requests whose last output, or error, no `step` has returned yet."""
        return self._requests.num_unfinished

    # Results

    def step(self) -> list[RequestOutput]:
        """Wait until at least one request has new output, and return the new outputs.

        An output has all of its request so far, all choices included; a ``finished`` output is its request's last.
        Ctrl-C loses nothing: the requests stay, and the next step goes on.

        Returns:
            at most one output for each request; empty only if nothing is unfinished.
        Raises:
            AioEngineError: a request has failed (`StepFailed`, or `InvalidRequest` of a request that had waited). Its
                id is in the error's notes, and the request is gone. Other new outputs have been returned before; the
                other requests go on with the next step.
            EngineDead: the engine broke; raised once, and all requests are gone.
            RuntimeError: the engine sleeps, and there is nothing to return.
        """
        requests = self._requests

        async def wait(engine: Engine) -> None:
            while True:
                changed = requests.changed
                await requests.read()
                if requests.has_unreturned or not requests.num_unfinished:
                    return
                await self._check_awake(engine)
                await changed.wait()

        self._host.run(wait)
        return requests.take()

    def close(self) -> None:
        """Stop, and free everything; unfinished requests are aborted. Idempotent."""
        super().close()
        self._requests = _Requests(self._host.start_soon)


class _Requests:
    """The requests of an `LLMEngine`, and their outputs and errors that no step has returned or raised yet.

    For the loop's thread alone, except `num_unfinished` and `take`. Holds no reference to the `LLMEngine`: tasks of the
    loop would keep it alive, and an engine that is dropped is to close itself.

    Attributes:
        changed: an event that the next change sets and replaces, so that each waiting step is woken once.
    """

    def __init__(self, start_soon: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
        self.changed = asyncio.Event()
        self._start_soon = start_soon
        self._streams: dict[str, Stream] = {}
        """The streams of requests whose end has not been read, including requests that wait to be admitted."""
        self._updated: dict[str, None] = {}
        """Ids of the streams with something to read, in the order in which it came."""
        self._unreturned: dict[str, RequestOutput | AioEngineError] = {}
        """By request id; a newer output replaces an older one."""

    @property
    def has_unreturned(self) -> bool:
        return bool(self._unreturned)

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose end no step has returned or raised yet; for any thread."""
        ends = [item for item in list(self._unreturned.values()) if isinstance(item, AioEngineError) or item.finished]
        return len(self._streams) + len(ends)

    def take(self) -> list[RequestOutput]:
        """Take all unreturned outputs; for any thread. An interrupted step takes nothing, and loses nothing.

        Raises:
            AioEngineError: there are no outputs; the first unreturned error.
        """
        outputs: list[RequestOutput] = []
        errors: dict[str, AioEngineError] = {}
        for request_id in list(self._unreturned):
            match self._unreturned.pop(request_id, None):
                case RequestOutput() as output:
                    outputs.append(output)
                case AioEngineError() as error:
                    errors[request_id] = error
        raised = errors.pop(next(iter(errors))) if errors and not outputs else None
        for request_id, error in errors.items():
            self._unreturned.setdefault(request_id, error)
        if raised is not None:
            raise raised
        return outputs

    def check_new(self, request_id: str) -> None:
        if request_id in self._streams or request_id in self._unreturned:
            message = (
                f"request_id={shorten(request_id)} is that of an unfinished request; choose another, or abort that one"
            )
            raise invalid("request_id", message)

    async def add(self, stream: Stream) -> None:
        """Begin a request. If it is not admitted at once, it waits in a task, and a step raises its errors."""

        async def begin_in_turn() -> None:
            try:
                await self._begin(stream)
            except AioEngineError as error:
                await self._fail(stream, error)

        self._streams[stream.request_id] = stream
        try:
            try:
                stream.check_accepting()
            except EngineOverloaded:
                self._start_soon(begin_in_turn)
            else:
                await self._begin(stream)
        except BaseException:
            if self._is_wanted(stream):
                await self.forget(stream.request_id)
            raise

    async def _begin(self, stream: Stream) -> None:
        await stream.__aenter__()
        if self._is_wanted(stream):

            def note_update() -> None:
                self._updated[stream.request_id] = None
                self._change()

            stream.watch(note_update)

    def _change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def read(self) -> None:
        """Read the streams that have something new."""
        while self._updated:
            request_id = next(iter(self._updated))
            del self._updated[request_id]
            if (stream := self._streams.get(request_id)) is None:
                continue
            try:
                output = stream.poll()
            except AioEngineError as error:
                await self._fail(stream, error)
                continue
            self._unreturned[request_id] = output
            if output.finished:
                await self._leave(request_id)

    async def _fail(self, stream: Stream, error: AioEngineError) -> None:
        if not self._is_wanted(stream):
            return
        if isinstance(error, EngineDead | EngineClosed):  # ends all requests, and is raised once
            for request_id in [*self._streams, *self._unreturned]:
                await self.forget(request_id)
        else:
            error.add_note(f"request_id={stream.request_id!r}")
        self._unreturned[stream.request_id] = error
        await self._leave(stream.request_id)

    def _is_wanted(self, stream: Stream) -> bool:
        """Whether the stream was not forgotten; another request may have its id by now."""
        return self._streams.get(stream.request_id) is stream

    async def forget(self, request_id: str) -> None:
        """Abort a request if it has not ended, and drop its outputs and errors. Idempotent."""
        self._unreturned.pop(request_id, None)
        await self._leave(request_id)

    async def _leave(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            await stream.__aexit__(None, None, None)
        self._updated.pop(request_id, None)  # an abort adds the id, too
        self._change()


def _attributes(engine_args: Any) -> dict[str, Any]:
    """The attributes of an object of arguments, by name."""
    if engine_args is None:
        return {}
    if isinstance(engine_args, Mapping):
        return dict(engine_args)
    if isinstance(engine_args, msgspec.Struct):
        return msgspec.structs.asdict(engine_args)
    if dataclasses.is_dataclass(engine_args) and not isinstance(engine_args, type):  # which may have slots
        return {field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)}
    if hasattr(engine_args, "__dict__") and not isinstance(engine_args, type):
        return dict(vars(engine_args))
    raise ConfigError(
        f"engine_args={shorten(engine_args)}: give an EngineConfig, a dict, a dataclass or an object with such fields"
    )
