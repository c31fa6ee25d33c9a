"""`Engine`: an inference engine in the caller's event loop; its start and end, and its requests."""

from __future__ import annotations

import contextlib
import math
import os
import random
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType, UnionType
from typing import TYPE_CHECKING, Any, Never, Self, Unpack

import anyio

from aioengine.config import ConfigKeywords, EngineConfig, ProcessOptions, ReplicaOptions, make_config
from aioengine.core.executor_protocol import Executor
from aioengine.core.protocol import Backend, CoreHooks
from aioengine.errors import ConfigError, EngineClosed, InvalidRequest
from aioengine.executor.in_process import InProcess
from aioengine.frontend.call import Call, make_id
from aioengine.frontend.call_options import CallKeywords, CallOptions, lists_keywords
from aioengine.frontend.clients import CLIENT_MAKERS
from aioengine.frontend.engine_control import EngineControl
from aioengine.frontend.output_type import OutputType, retold
from aioengine.frontend.prompt import ChatMessage, Prompt, PromptDict
from aioengine.frontend.runtime import Runtime
from aioengine.frontend.stream import Stream, await_only
from aioengine.outputs import RequestOutput, T, TypeForm
from aioengine.processes.turns import running_loop
from aioengine.sampling_params import NO_SEED, SamplingParams, one_params
from aioengine.validation import shorten

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["ChatMessage", "Engine", "Prompt", "Stream"]

CLUSTER_PREFIX = "cluster+"


class EngineKeywords(ConfigKeywords, total=False):
    """The keywords of `Engine`."""

    executor: Executor | None
    process: bool | ProcessOptions
    replicas: int | list[str] | tuple[str, ...] | ReplicaOptions
    seed: int | None


class Engine(EngineControl):
    """A complete inference engine inside this process and this event loop.

    The constructor is quick; ``async with`` or `start` loads the model. Call all methods on the loop of the start.
    Requests run concurrently: start as many as you like with ``asyncio.gather`` or a task group.

    Args:
        model: a hub id, a folder, a GGUF file, or None for the bundled demo model.
        executor: a device side of your own, such as `aioengine.testing.FakeExecutor`; of the model only the tokenizer
            and the generation config are then used. It is closed with the engine, also if the start fails.
        process: run the engine core, with its model and device, in a process of its own, which ends with this one.
        replicas: run so many engines of the model, each in a process of its own, as one. A request goes to the replica
            that suits it best, and goes on at another one if that replica dies. Or a list of the addresses of engines
            that serve already (``aioengine engine``), on this machine or others; their config is theirs.
        seed: source of the seeds of requests without one, in the order of the calls; absent or -1: random seeds.
        config: the fields of `EngineConfig`, and vLLM's engine arguments at values without effect.
    Raises:
        ConfigError: a field is unknown, or its value is bad.
    """

    options_type: type[CallOptions] = CallOptions
    """The class of the options of a call; one with more fields makes requests with more attributes."""

    @lists_keywords(ConfigKeywords)
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        executor: Executor | None = None,
        process: bool | ProcessOptions = False,
        replicas: int | list[str] | tuple[str, ...] | ReplicaOptions = 1,
        seed: int | None = None,
        **config: Unpack[ConfigKeywords],
    ) -> None:
        self.config = make_config(os.fspath(model) if isinstance(model, os.PathLike) else model, config)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed={shorten(seed)}: an int is needed")
        self._seeds = None if seed in (None, NO_SEED) else random.Random(seed)
        self._make_backend = _backend_of(self.config, executor, process, replicas)
        self._is_to_be_entered = False
        """Whether `start` or `connect` started the engine, and an ``async with`` may still follow."""
        vars(self).update(start=_refuse_another, connect=_refuse_another)  # hides the class methods from this object

    @classmethod
    @lists_keywords(EngineKeywords)
    async def start(cls, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineKeywords]) -> Self:
        """Make an engine and start it, for notebooks and apps where no ``async with`` fits; close it with `aclose`.

        Arguments are those of `Engine`. Cancelling stops the loading and leaves nothing behind.

        Raises:
            ConfigError, ModelLoadError: the engine cannot be started; nothing is left behind.
        """
        engine = cls(model, **options)
        await engine._start()
        engine._is_to_be_entered = True
        return engine

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        model: str | os.PathLike[str] | None = None,
        keys: str | os.PathLike[str] | None = None,
        client: str | None = None,
        timeout_s: float = 30.0,
        **config: Never,
    ) -> Self:
        """Use an engine that serves in another process (``aioengine engine``, `EngineServer`), with the same methods.

        The config is that engine's. `aclose` ends this connection and its requests; the engine serves on. When the
        engine or the connection breaks, each request raises `EngineDead`; then connect again.

        Args:
            address: ``ipc:///path`` or ``tcp://host:port``; or ``cluster+ipc:///path``, with the ``cluster_address`` of
                an engine with replicas, to become a further front end of it.
            model: where to find the tokenizer here, if its path differs from that on the engine's machine.
            keys: the folder that ``aioengine keys`` made; for addresses of other machines. A further front end takes
                none: it gets the keys of replicas from their owner.
            client: the client whose keys to use; may be left out if the folder has the keys of one client.
            timeout_s: for the engine to answer; fails at once if nothing listens at the address.
        Raises:
            ConfigError: the address is not allowed, lacks keys or takes none; or fields of `EngineConfig` were given.
            EngineDead: no answer came, or the answer is not that of an engine of this version.
        """
        if config:
            raise ConfigError(f"{', '.join(config)}: the config is that engine's: give it where that is started")
        if not isinstance(address, str):
            raise ConfigError(f"address={shorten(address)}: a str is needed, such as ipc:///path or tcp://host:port")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s={shorten(timeout_s)}: a number of seconds above 0 is needed")
        engine = cls(model)
        tokenizer, folder = engine.config.model, None if keys is None else os.fspath(keys)

        options: dict[str, Any] = {"model": tokenizer, "keys": folder, "client": client, "timeout_s": float(timeout_s)}
        engine._make_backend = _connected(address, options)
        await engine._start()
        engine._is_to_be_entered = True
        return engine

    async def __aenter__(self) -> Self:
        if self._is_to_be_entered:  # as in `async with await Engine.connect(...)`
            with contextlib.suppress(EngineClosed):
                self._running()
                self._is_to_be_entered = False
                return self
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
            drain: first let all earlier requests end, including requests that wait for admission, are paused or asleep.
                This waits for readers that have stalled at ``max_unread_tokens``: bound the wait by a timeout of your
                own, and `abort_all`. Without ``drain`` all requests raise `EngineClosed`.
        Raises:
            ModelLoadError, ConfigError: a sleeping engine could not be woken up for the drain; it is closed anyway.
        """
        if self._runtime is not None:
            await self._runtime.aclose(drain=drain)

    @lists_keywords(CallKeywords)
    @await_only
    async def generate(
        self,
        prompt: Prompt | PromptDict,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_type: TypeForm[T] | UnionType | None = None,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        **options: Unpack[CallKeywords],
    ) -> RequestOutput[T]:
        """Complete a prompt.

        Cancelling aborts the request: it is in no later step, and its memory is free for the next step.

        While another task starts the engine, the request waits for the start, and is checked then. If the start fails,
        this raises the same error.

        Args:
            prompt: text, token ids, chat messages, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: how to sample; or give its fields as keywords. Keywords that are not given default to the model's
                generation config.
            sampling_params: vLLM's name for ``params``.
            request_id: your name for the request; need not be unique. Absent: a random one.
            priority: smaller goes first, and preempts larger ones that run; equal ones go by age. Absent: 0.
            cache_salt: share cached prefixes only with requests of the same salt.
            tenant: the request's account under ``scheduler="fair"``: tenants get equal shares, however much each asks.
            session: any name of up to 256 characters. Requests of one session, such as the turns of a chat, go to the
                same replica while it serves: their prefixes are in its cache.
            trace_headers: ``traceparent`` and ``tracestate`` of the parent of the request's OpenTelemetry span; absent:
                the current span. There is no span if the program has not set OpenTelemetry up.
            on_full: with ``max_waiting`` sequences waiting already, "wait" for admission (the default), or "raise"
                `EngineOverloaded`. With ``scheduler="fair"`` a tenant has a share of ``max_waiting``.
            chat_template_kwargs: variables for the model's chat template, such as ``enable_thinking``; plain data.
                ``add_generation_prompt``: end the prompt with the beginning of an answer; True unless a message is
                continued. ``continue_final_message``: leave the last message open, and let the answer continue it.
            tools: functions that a chat's answer may ask for: Python functions, `Tool`, or dicts as OpenAI's or
                Anthropic's clients give them. The calls are in ``tool_calls``; the caller runs them.
            tool_choice: "auto", "none", "required" (a call of some tool, by a grammar), or a tool's name; in OpenAI's
                and Anthropic's spellings, too. The arguments of a ``strict`` tool always match its schema.
            parallel_tool_calls: whether one answer may ask for several calls; absent: it may.
            reasoning_effort: for models that support it; "none" asks for answers without reasoning.
            chat_template: the name of one of the model's templates, or a Jinja text in place of them, with the same
                bounds. Absent: "tool_use" if there are tools and the model has this template, else "default".
            add_special_tokens: whether the tokenizer adds its own special tokens, such as a BOS; absent: to a text, but
                not to a chat, whose template writes them.
            output_type: a type, such as a pydantic model: the answer is JSON of its schema, and ``parsed`` a value.
        Raises:
            InvalidRequest: a value is bad; raised before anything is queued, except if a grammar cannot be enforced.
            OutputNotParsed: the answer is no value of ``output_type``, such as one that was cut.
            EngineOverloaded, StepFailed, EngineDead, EngineClosed: see their docstrings.
        """
        check_asyncio()
        params = one_params(params, sampling_params)
        wanted = OutputType(output_type) if output_type is not None else None
        if wanted is not None:
            params, options = wanted.constrain(params, options)
        given = {**options, "request_id": make_id() if request_id is None else request_id, "priority": priority}
        stream = self._make_stream(prompt, params, given, may_wait=True)
        try:
            async with stream:
                output = await stream.finish()
        except InvalidRequest as error:
            raise error if wanted is None else retold(error) from None
        if wanted is None:
            return output
        num_chars = sum(len(choice.text) for choice in output.outputs)
        return await self._here().worker_for(num_chars).run(wanted.parse, num_chars, output)

    @lists_keywords(CallKeywords)
    def stream(
        self,
        prompt: Prompt | PromptDict,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        max_unread_tokens: int | None = None,
        stream_interval: int | None = None,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        **options: Unpack[CallKeywords],
    ) -> Stream:
        """Complete a prompt and read it as it comes.

        ``async with engine.stream(...) as stream: async for delta in stream: ...``. Arguments and errors are those of
        `generate`, and two more arguments. Leaving the block, for any reason, aborts the request. While another task
        starts the engine, entering the block waits for the start, and raises the errors that the call raises otherwise.

        Args:
            max_unread_tokens: a choice with so many unread tokens is paused until they are read; meanwhile it holds no
                row, and is the first to lose its memory. Tokens in flight at that moment still come: at most one for
                each step in flight. Absent: unread deltas are merged.
            stream_interval: tokens of a choice between two deltas, the first and the last delta aside; absent: the
                engine's.
        """
        given = {
            **options,
            "request_id": make_id() if request_id is None else request_id,
            "priority": priority,
            "max_unread_tokens": max_unread_tokens,
            "stream_interval": stream_interval,
        }
        return self._make_stream(prompt, one_params(params, sampling_params), given)

    def _make_stream(
        self, prompt: Any, params: SamplingParams | None, given: Mapping[str, Any], *, may_wait: bool = False
    ) -> Stream:
        """See `stream`. With ``may_wait`` the check is done on entering if this turn of the loop has no time left."""
        runtime = self._here_or_starting()
        call = Call(self.options_type, prompt, params, given, self._seeds)
        if runtime.is_starting or (may_wait and runtime.turns.is_busy):
            call.keep_arguments()
        else:
            call.check(runtime)
        return Stream(self, runtime, call)

    async def wait_started(self) -> None:
        """Wait while another task starts the engine; return at once if it runs. Cancelling stops only the wait.

        `generate`, and entering a `stream`, do so by themselves.

        Raises:
            ConfigError, ModelLoadError: the engine cannot be started; the other task gets the same error.
            EngineClosed: no task has begun to start the engine, or it was closed.
        """
        await self._here_or_starting().wait_started()

    def check_accepting(self, num_sequences: int = 1) -> None:
        """Raise the error of a request with ``on_full="raise"`` made now, for programs that refuse before other work.

        Acquires nothing, so that a later request may get another outcome. Synchronous.

        Args:
            num_sequences: of the request (`SamplingParams.num_sequences`). With ``scheduler="fair"`` the check is for a
                tenant with nothing waiting; use `Stream.check_accepting` for other tenants.
        Raises:
            EngineOverloaded: there is no capacity for so many; the error has the time to wait before another try.
            EngineClosed: the engine has not been started, drains, or is closed.
            EngineDead: the engine broke.
            InvalidRequest: so many sequences exceed any capacity.
        """
        runtime = self._here()
        runtime.admission.check(num_sequences)
        runtime.core.check_accepting()

    def openai_client(self, **options: Any) -> AsyncOpenAI:
        """OpenAI's own client of this engine's API, in this process and on this loop: no port, no bytes on a socket.

        For programs and libraries that take an ``openai.AsyncOpenAI``. Cancelling the task of a request or closing its
        stream aborts it; closing the client aborts its requests; closing the engine ends them with an error. The client
        need not be closed. ``model`` may be left out.

        Args:
            options: of ``AsyncOpenAI`` (``timeout``, ``max_retries``, …), and ``config``: a
                `aioengine.server.ServerConfig`, whose hosts, keys and ``write_timeout_s`` have no effect here.
        Raises:
            ConfigError: the package openai is not installed; or an option names another server.
        """
        client: AsyncOpenAI = CLIENT_MAKERS["openai"](self, **options)
        return client

    def abort(self, request_id: str) -> None:
        """End all requests of this id with the output that they have, with the ``finish_reason`` "abort". Synchronous
        and idempotent."""
        if self._runtime is not None:
            self._runtime.abort_named(request_id)

    def abort_all(self) -> None:
        """End all requests with the output that they have, including those that wait for admission.

        They are in no later step. With hundreds of requests, some readers wake in later turns of the loop. Synchronous
        and idempotent.
        """
        if self._runtime is not None:
            self._runtime.abort_all()

    async def drain(self) -> None:
        """Refuse new requests, and wait until all earlier ones have ended; `resume` accepts new ones again.

        Requests that wait for admission are served, too, and a paused or sleeping engine goes on. This waits for
        readers that have stalled at ``max_unread_tokens``: bound the wait with a timeout of your own, and `abort_all`.
        A later `pause` delays the drain; `resume` ends it early. Idempotent. Cancelling stops only the wait.

        Raises:
            EngineDead, EngineClosed: the engine ended before the requests.
        """
        await self._here().drain()

    async def _start(self) -> None:
        check_asyncio()
        if self._runtime is not None:
            raise EngineClosed("an engine starts once; make a new one")
        self._runtime = runtime = Runtime(self.config, self._make_backend)
        await runtime.start()
        self.config = runtime.config

    def _here_or_starting(self) -> Runtime:
        """The runtime as of `_here`, also of an engine that is being started."""
        if self._runtime is None or not self._runtime.is_starting:
            return self._here()
        self._runtime.check_loop()
        return self._runtime

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is not None and runtime.is_open and not runtime.is_closing:
            runtime.abandon()
            message = f"{self!r} was never closed: use `async with`, or await aclose()"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "new" if self._runtime is None else self._runtime.state
        return f"<Engine {self.config.model or 'demo'!r} {state}>"


def check_asyncio() -> None:
    """Raise RuntimeError if the current coroutine is not run by asyncio."""
    if running_loop() is None:
        raise RuntimeError(
            "aioengine needs asyncio's event loop, and none runs here (trio does not have one): start the program with "
            "asyncio.run, or anyio.run with its asyncio backend, and serve with an asyncio worker "
            "(hypercorn --worker-class asyncio)"
        )


def _backend_of(
    config: EngineConfig,
    executor: Executor | None,
    process: bool | ProcessOptions,
    replicas: int | list[str] | tuple[str, ...] | ReplicaOptions,
) -> Callable[[CoreHooks], Backend]:
    """A function that makes the backend: where the core is to run."""
    if isinstance(replicas, int) and not isinstance(replicas, bool):
        is_one, replicas = replicas == 1, ReplicaOptions(replicas=replicas)
    elif isinstance(replicas, ReplicaOptions):
        is_one = False
    elif isinstance(replicas, list | tuple):
        is_one, replicas = False, ReplicaOptions(replicas=tuple(replicas))
    else:
        raise ConfigError(f"replicas={shorten(replicas)}: a number, a list of addresses or a ReplicaOptions is needed")
    if process is not True and process is not False and not isinstance(process, ProcessOptions):
        raise ConfigError(f"process={shorten(process)}: True, False or a ProcessOptions is needed")
    if is_one and process is False:
        return lambda hooks: InProcess(config, executor, hooks)
    if executor is not None:
        raise ConfigError("an executor is an object of this process: give either executor, or process and replicas")
    options = process if isinstance(process, ProcessOptions) else ProcessOptions()
    if is_one:
        from aioengine.transport.backends import InChild

        return lambda hooks: InChild(config, options, hooks)
    from aioengine.cluster.backend import Replicated, launcher_of

    launcher = launcher_of(config, options, replicas)
    return lambda hooks: Replicated(config, replicas, launcher, hooks)


def _connected(address: str, options: dict[str, Any]) -> Callable[[CoreHooks], Backend]:
    """A function that makes the backend of a core in another process."""
    if not address.startswith(CLUSTER_PREFIX):
        from aioengine.transport.backends import Connected

        return lambda hooks: Connected(address, hooks, **options)
    owner = address.removeprefix(CLUSTER_PREFIX)
    if not owner.startswith("ipc://"):
        raise ConfigError(
            f"{shorten(address)}: further front ends are of the owner's machine and user: give cluster+ipc:///path, "
            "with the path of its cluster_address"
        )
    if given := [name for name in ("keys", "client") if options[name] is not None]:
        raise ConfigError(
            f"{given[0]}: a further front end ({CLUSTER_PREFIX}) gets the keys of replicas from their owner: leave "
            f"{' and '.join(given)} out"
        )
    from aioengine.cluster.connected import ConnectedCluster

    return lambda hooks: ConnectedCluster(owner, hooks, model=options["model"], timeout_s=options["timeout_s"])


def _refuse_another(*_args: object, **_kwargs: object) -> Never:
    raise RuntimeError(
        "this would make another engine, of other settings: `engine = await Engine.start(...)` makes one and starts "
        "it; to start one that is made write `async with engine:`"
    )
