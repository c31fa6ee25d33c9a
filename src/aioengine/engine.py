"""`Engine`: an inference engine that lives in the caller's event loop; its life and its requests."""

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
import msgspec

from aioengine.config import ConfigKeywords, EngineConfig, ProcessOptions, ReplicaOptions, make_config
from aioengine.core.executor_protocol import Executor
from aioengine.core.protocol import Backend, CoreHooks
from aioengine.errors import ConfigError, EngineClosed, InvalidRequest
from aioengine.executor.in_process import InProcess
from aioengine.frontend.answer_format import AnswerOptions, template_variables
from aioengine.frontend.engine_control import EngineControl
from aioengine.frontend.output_type import OutputType, retold
from aioengine.frontend.prompt import (
    CALL_NAMES,
    Call,
    CallKeywords,
    ChatMessage,
    Checked,
    Prompt,
    PromptDict,
    check_request,
    keep_prompt,
    lists_keywords,
    make_id,
    open_prompt,
)
from aioengine.frontend.runtime import Runtime
from aioengine.outputs import RequestOutput, T, TypeForm
from aioengine.sampling_params import NO_SEED, SamplingParams, make_params
from aioengine.stream import Stream, await_only
from aioengine.turns import running_loop
from aioengine.validation import shorten

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["ChatMessage", "Engine", "Prompt", "Stream"]

CLUSTER_PREFIX = "cluster+"


class EngineKeywords(ConfigKeywords, total=False):
    """The keywords of `Engine`."""

    executor: Executor | None
    process: bool | ProcessOptions
    replicas: int | ReplicaOptions
    seed: int | None


class Engine(EngineControl):
    """An inference engine, whole, inside this process and this event loop.

    Made in a moment; the model is loaded by ``async with`` or by `start`. All methods belong to the loop that it was
    started on. Requests run side by side: start as many as you like with ``asyncio.gather`` or a task group.

    Args:
        model: a hub id, a folder, a GGUF file, or None for the bundled demo model.
        executor: a device side of your own, such as `aioengine.testing.FakeExecutor`; the model then serves for its
            tokenizer and its generation config alone. It is closed with the engine, also when that cannot start.
        process: run the engine core, with its model and device, in a process of its own, which ends with this one.
        replicas: run so many engines of the model, each in a process of its own, as one. A request goes to the one
            that suits it best, and goes on at another one if that dies.
        seed: requests that have no seed get theirs from this one, in the order of the calls; absent or -1: at random.
        config: the fields of `EngineConfig`; and engine arguments of vLLM's, where they ask for nothing.
    Raises:
        ConfigError: a field is unknown, or its value is bad.
    """

    @lists_keywords(ConfigKeywords)
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        executor: Executor | None = None,
        process: bool | ProcessOptions = False,
        replicas: int | ReplicaOptions = 1,
        seed: int | None = None,
        **config: Unpack[ConfigKeywords],
    ) -> None:
        self.config = make_config(os.fspath(model) if isinstance(model, os.PathLike) else model, config)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed={shorten(seed)}: an int is needed")
        self._seeds = None if seed in (None, NO_SEED) else random.Random(seed)
        self._make_backend = _backend_of(self.config, executor, process, replicas)
        self._is_to_be_entered = False
        """It was started by `start` or `connect`, and an ``async with`` may still follow."""
        vars(self).update(start=_refuse_another, connect=_refuse_another)  # of the class; hides them from this object

    @classmethod
    @lists_keywords(EngineKeywords)
    async def start(cls, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineKeywords]) -> Self:
        """Make an engine and start it, for notebooks and apps where no ``async with`` fits; close it with `aclose`.

        Arguments are those of `Engine`. Cancelling stops the loading and leaves nothing behind.

        Raises:
            ConfigError, ModelLoadError: it cannot be started; nothing is left behind.
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
        """Use an engine that serves in another process (``aioengine engine``, `EngineServer`); the same object.

        Its config is that engine's. `aclose` ends this connection and its requests; the engine serves on. When the
        engine or the connection breaks, each request hears `EngineDead` once; connect anew then.

        Args:
            address: ``ipc:///path`` or ``tcp://host:port``; or ``cluster+ipc:///path``, with the ``cluster_address`` of
                an engine with replicas, of which this is a further front end then.
            model: where to find the tokenizer here, if that is elsewhere than on the engine's machine.
            keys: the folder that ``aioengine keys`` made; for addresses that are not this machine's own. A further
                front end takes none: it gets the keys of replicas from their owner.
            client: whose keys of the folder to use; may be left out where there are one client's.
            timeout_s: for the engine to answer; where nothing listens at the address, that is known at once.
        Raises:
            ConfigError: the address is not allowed, lacks keys or takes none; or fields of `EngineConfig` were given.
            EngineDead: no answer came, or what answered is no engine of this version.
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
            drain: first let all requests end that were made before, those included that wait for admission, are paused
                or asleep. A reader that has stalled at its ``max_unread_tokens`` is waited for: bound that by a
                timeout of your own, and `abort_all`. Without ``drain`` all requests hear `EngineClosed`.
        Raises:
            ModelLoadError, ConfigError: what slept could not be woken up to be drained; it is closed all the same.
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
        **options: Unpack[CallKeywords],
    ) -> RequestOutput[T]:
        """Complete a prompt.

        Cancelling aborts the request: it is in no later step, and its memory is free for the next one.

        While another task starts the engine the request waits for it, and is checked then. Where the start fails, it
        hears the error that the start raises.

        Args:
            prompt: text, token ids, chat messages, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: how to sample; or give its fields as keywords. The model's generation config has the defaults of
                keywords that are not given.
            sampling_params: vLLM's name for ``params``.
            request_id: your name for it; it may repeat. One is made up when absent.
            priority: smaller goes first, and preempts larger ones that run; equal ones go by age. Absent: 0.
            cache_salt: share cached prefixes only with requests of the same salt.
            tenant: its account, where ``scheduler="fair"``: tenants share the engine alike, however much each asks.
            session: requests of the same one, such as the turns of a chat, go to the same of several replicas, which
                has their prefixes in its cache, while it serves; any name of up to 256 characters.
            trace_headers: ``traceparent`` and ``tracestate`` of the OpenTelemetry span that its own is to be inside of;
                absent: the current one. It has none where the program has not set OpenTelemetry up.
            on_full: with ``max_waiting`` sequences waiting already, "wait" for admission (as when it is absent), or
                "raise" `EngineOverloaded`. With ``scheduler="fair"`` a tenant has a share of ``max_waiting``.
            chat_template_kwargs: variables for the model's chat template, such as ``enable_thinking``; plain data.
                Among them ``add_generation_prompt``: end the prompt with what begins an answer, True where no message
                is continued; ``continue_final_message``: leave the last message open, so that the answer goes on with
                it.
            tools: functions that a chat's answer may ask for: Python functions, `Tool`, or dicts as OpenAI's or
                Anthropic's clients give them. What it asks for is in ``tool_calls``; to call it is the caller's.
            tool_choice: "auto", "none", "required" (a call of some tool, by a grammar), or a tool's name; in OpenAI's
                and Anthropic's spellings, too. A tool that is ``strict`` gets arguments that its schema admits alone.
            parallel_tool_calls: whether one answer may ask for several calls; absent: it may.
            reasoning_effort: for models that can be told: "none" lets them answer without reasoning.
            chat_template: the name of one of the model's templates, or a Jinja text to use in place of them, with the
                same bounds. Absent: "tool_use" for tools where the model has it, else "default".
            add_special_tokens: to a text or a chat those that the tokenizer adds by itself, such as a BOS; absent: to a
                text, and not to a chat, whose template writes them.
            output_type: a type, such as a pydantic model: the answer is JSON of its schema, and ``parsed`` a value.
        Raises:
            InvalidRequest: a value is bad; raised before anything is queued, but for a grammar that cannot be enforced.
            OutputNotParsed: the answer is no value of ``output_type``, such as one that was cut.
            EngineOverloaded, StepFailed, EngineDead, EngineClosed: see their docstrings.
        """
        check_asyncio()
        wanted = OutputType(output_type) if output_type is not None else None
        if wanted is not None:
            params = options.pop("sampling_params", None) if params is None else params
            params, options = wanted.constrain(params, options)
        stream = self._make_stream(prompt, params, request_id, options, may_wait=True)
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
        **options: Unpack[CallKeywords],
    ) -> Stream:
        """Complete a prompt and read it as it comes.

        ``async with engine.stream(...) as stream: async for delta in stream: ...``. Arguments and errors are those of
        `generate`, and two more. Leaving the block, for any reason, aborts the request. While another task starts the
        engine, entering the block waits for it, and raises what the call raises otherwise.

        Args:
            max_unread_tokens: with so many of a choice unread it is not computed any further until they are read; it
                then holds no row and is the first to lose its memory. Tokens in flight at that moment still come: at
                most one a step in flight. Absent: unread deltas are merged.
            stream_interval: tokens of a choice between two deltas, the first and the last delta aside; absent: the
                engine's.
        """
        more: dict[str, Any] = {"max_unread_tokens": max_unread_tokens, "stream_interval": stream_interval}
        return self._make_stream(prompt, params, request_id, options, **more)

    def _make_stream(
        self,
        prompt: Any,
        params: SamplingParams | None,
        request_id: str | None,
        given: CallKeywords,
        *,
        may_wait: bool = False,
        **more: Any,
    ) -> Stream:
        """As `stream`. With ``may_wait`` it is checked on entering if this turn of the loop has no time left.

        Args:
            given: the keywords.
            more: further fields of `Call`.
        """
        call: dict[str, Any] = {name: value for name, value in given.items() if name in CALL_NAMES}
        sampling = {name: value for name, value in given.items() if name not in CALL_NAMES}
        tools, tool_choice = call.pop("tools", None), call.pop("tool_choice", None)
        options = AnswerOptions.of(tools, tool_choice, call.pop("parallel_tool_calls", True))
        effort, template = call.pop("reasoning_effort", None), call.pop("chat_template_kwargs", None)
        alias = call.pop("sampling_params", None)
        runtime = self._here_or_starting()
        prompt, call["cache_salt"] = open_prompt(prompt, call.get("cache_salt"))
        template_variables(effort)  # refused at the call
        name = make_id() if request_id is None else request_id
        if isinstance(headers := call.get("trace_headers"), Mapping):
            call["trace_headers"] = {key.lower(): value for key, value in headers.items() if isinstance(key, str)}
        checked_call = Call(request_id=name, **call, **more)
        seed = None
        seeds = *(getattr(each, "seed", None) for each in (params, alias)), sampling.get("seed")
        if self._seeds is not None and all(each in (None, NO_SEED) for each in seeds):
            seed = self._seeds.getrandbits(56)

        def check() -> Checked:
            checked = make_params(params, runtime.sampling_defaults, sampling, alias=alias)
            if seed is not None:
                checked = msgspec.structs.replace(checked, seed=seed)
            variables = template
            if effort is not None and isinstance(template, Mapping | None):
                text = checked_call.chat_template or (runtime.tokenizer and runtime.tokenizer.chat_template) or ""
                variables = {**template_variables(effort, text), **(template or {})}
            return check_request(runtime, checked_call, prompt, checked, variables, options)

        is_later = runtime.is_starting or (may_wait and runtime.turns.is_busy)
        if is_later:  # the caller may go on with what it gave
            prompt = keep_prompt(prompt)
            template = dict(template) if isinstance(template, dict) else template
        return Stream(self, runtime, checked_call, check, is_later=is_later)

    async def wait_started(self) -> None:
        """Wait while another task starts the engine; returns at once where it runs. Cancelling stops the wait alone.

        `generate`, and entering a `stream`, do so by themselves.

        Raises:
            ConfigError, ModelLoadError: it cannot be started, as that other task hears, too.
            EngineClosed: no task has begun to start it, or it was closed.
        """
        await self._here_or_starting().wait_started()

    def check_accepting(self, num_sequences: int = 1) -> None:
        """Raise what a request with ``on_full="raise"`` would hear now, for programs that refuse before other work.

        Acquires nothing, so that a request which follows may hear otherwise. Synchronous.

        Args:
            num_sequences: that the request will be (`SamplingParams.num_sequences`). With ``scheduler="fair"`` this is
                for a tenant with nothing waiting; for another's ask `Stream.check_accepting`.
        Raises:
            EngineOverloaded: there is no capacity for so many; says when to try again.
            EngineClosed: the engine has not been started, drains, or is closed.
            EngineDead: it broke.
            InvalidRequest: so many never find room.
        """
        runtime = self._here()
        runtime.admission.check(num_sequences)
        runtime.core.check_accepting()

    def openai_client(self, **options: Any) -> AsyncOpenAI:
        """OpenAI's own client of this engine's API, in this process and on this loop: no port, no bytes on a socket.

        For programs and libraries that speak to an ``openai.AsyncOpenAI``. Leaving a request (its task is cancelled,
        its stream is closed) aborts it; closing the client aborts its requests; closing the engine ends them with an
        error. The client needs no closing of its own. ``model`` may be left out.

        Args:
            options: of ``AsyncOpenAI`` (``timeout``, ``max_retries``, …), and ``config``: a
                `aioengine.server.ServerConfig`, of which hosts, keys and ``write_timeout_s`` mean nothing here.
        Raises:
            ConfigError: the package openai is not installed; or an option would lead elsewhere.
        """
        from aioengine.integrations.openai_client import async_client

        return async_client(self, **options)

    def abort(self, request_id: str) -> None:
        """End all requests of this id with what they have: ``finish_reason`` is "abort". Synchronous and idempotent."""
        if self._runtime is not None:
            self._runtime.abort_named(request_id)

    def abort_all(self) -> None:
        """End all requests, those that wait for admission included, with what they have. Synchronous and idempotent.

        They are in no later step. With hundreds of requests, some readers hear of it in later turns of the loop.
        """
        if self._runtime is not None:
            self._runtime.abort_all()

    async def drain(self) -> None:
        """Take no new requests, and wait until all that were made before have ended; `resume` takes new ones again.

        Requests that wait for admission are served, too, and a paused or sleeping engine goes on. A reader that has
        stalled at its ``max_unread_tokens`` is waited for: bound that with a timeout of your own, and `abort_all`. A
        `pause` meanwhile holds it up. Returns early when it is resumed. Idempotent. Cancelling stops the wait alone.

        Raises:
            EngineDead, EngineClosed: it came to an end before they did.
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
        """As `_here`, and that of an engine that is being started."""
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
    """Raise RuntimeError where a coroutine is not run by asyncio."""
    if running_loop() is None:
        raise RuntimeError(
            "aioengine needs asyncio's event loop, and none runs here (trio does not have one): start the program with "
            "asyncio.run, or anyio.run with its asyncio backend, and serve with an asyncio worker "
            "(hypercorn --worker-class asyncio)"
        )


def _backend_of(
    config: EngineConfig, executor: Executor | None, process: bool | ProcessOptions, replicas: int | ReplicaOptions
) -> Callable[[CoreHooks], Backend]:
    """Where the core is to run."""
    if isinstance(replicas, int) and not isinstance(replicas, bool):
        is_one, replicas = replicas == 1, ReplicaOptions(replicas=replicas)
    elif isinstance(replicas, ReplicaOptions):
        is_one = False
    else:
        raise ConfigError(f"replicas={shorten(replicas)}: a number or a ReplicaOptions is needed")
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
    """Where a core is reached that another process has."""
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
