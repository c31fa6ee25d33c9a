"""`Engine`, the public API: start and end, requests, control calls, weights, replicas, text and numbers.

A control call is a message that checks its arguments (`aioengine.core.control`), sent to the engine core.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType, UnionType
from typing import TYPE_CHECKING, Any, Never, Self, Unpack

import anyio
import numpy as np

from aioengine.config import ConfigKeywords, EngineConfig, ProcessOptions, ReplicaOptions, make_config
from aioengine.core import control as c
from aioengine.core.control import AnyControl, PauseMode, SleepLevel, WakeTag, WeightDtype
from aioengine.core.executor_protocol import Executor, ExecutorInfo
from aioengine.core.health import Health
from aioengine.core.in_process import InProcess
from aioengine.core.protocol import Backend, Cluster, CoreHooks, ReplicaStatus
from aioengine.errors import ConfigError, EngineClosed, InvalidRequest
from aioengine.frontend.call import Call, ChatMessage, Prompt, PromptDict, make_id
from aioengine.frontend.call_options import CallKeywords, CallOptions, lists_keywords
from aioengine.frontend.clients import CLIENT_MAKERS
from aioengine.frontend.output_type import OutputType, rename_param
from aioengine.frontend.runtime import Runtime
from aioengine.frontend.stream import NotCopied, Stream, await_only
from aioengine.outputs import RequestOutput, T, TypeForm
from aioengine.outputs.metrics import EngineMetrics, EngineStats, Observer
from aioengine.processes.turns import running_loop
from aioengine.sampling_params import NO_SEED, SamplingParams, one_params
from aioengine.text import calls
from aioengine.text.chat_input import copy_messages, open_messages, take_template_kwargs
from aioengine.text.tokenizer import Tokenizer
from aioengine.tool_calls.calls import read_tools, told_tools
from aioengine.validation import shorten, typed
from aioengine.vllm_names import NotYet, not_yet

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["ChatMessage", "Engine", "Prompt", "Stream"]

CLUSTER_PREFIX = "cluster+"

PIECE_BYTES = 2**20
"""Bytes of a tensor in one message; a message is copied a few times on its way, in less than a millisecond."""

_NUMPY_DTYPES: dict[str, WeightDtype] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class EngineKeywords(ConfigKeywords, total=False):
    """The keywords of `Engine`."""

    executor: Executor | None
    process: bool | ProcessOptions
    replicas: int | list[str] | tuple[str, ...] | ReplicaOptions
    seed: int | None


class Engine(NotCopied, NotYet):
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

    chat = not_yet("chat", "give the list of messages to generate or stream")

    options_type: type[CallOptions] = CallOptions
    """The class of the options of a call; one with more fields makes requests with more attributes."""
    _runtime: Runtime | None = None
    """Set when the start begins."""

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
            raise error if wanted is None else rename_param(error) from None
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
        need not be closed. ``model=""`` is the model that the engine has.

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

    # Control calls

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Wait until the device is idle, and keep it idle until `resume`; meanwhile requests are accepted, and wait.

        Idempotent, and safe during any other call; a second pause adds to the first. Cancelling stops only the wait:
        the engine still pauses. Returns early at a `resume`.

        Args:
            mode: what happens to accepted requests: "keep" stops them, to go on after `resume`; "wait" lets them end
                first, including those of slow readers with ``max_unread_tokens``; "abort" ends them with the output
                that they have.
        Raises:
            InvalidRequest: there is no such mode.
        """
        await self._call(c.Pause(mode))

    async def resume(self) -> None:
        """Go on after `pause`, and take requests again after `drain`. Idempotent."""
        runtime = self._here()
        runtime.admission.refusal = None
        runtime.core.resume()

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> int:
        """Forget all cached prefixes: no later request sees KV from before. Idempotent; running requests go on.

        Args:
            reset_running: let running requests compute their KV again, too.
        Returns:
            number of KV blocks that were cached for a prefix.
        """
        num_blocks: int = await self._call(c.ResetPrefixCache(bool(reset_running)))
        return num_blocks

    async def sleep(self, level: SleepLevel = 1, *, mode: PauseMode = "abort") -> None:
        """Free the device's memory until `wake_up`; meanwhile requests are accepted, and wait.

        The prefix cache is cleared. After waking, equal requests give equal outputs.

        Args:
            level: 0 only pauses; 1 drops the KV cache and keeps the weights in the host's memory (on a CPU they are
                there already); 2 drops both, and waking reads the weights again from their source.
            mode: what happens to accepted requests, as in `pause`; requests that "keep" stopped go on after waking.
        Raises:
            InvalidRequest: a value is bad; or level is 2, and the weights came as tensors, so that they could not be
                read again; or level is 1 on a GPU, and the host has no memory for the weights. Nothing is asleep then.
        """
        await self._call(c.Sleep(level, mode))

    async def wake_up(self, tags: Iterable[WakeTag] | None = None) -> None:
        """Restore the parts that `sleep` freed, and go on. Idempotent.

        Args:
            tags: "weights", "kv_cache", or "scheduling" after a `sleep` at level 0; absent: all. Requests go on once
                weights and KV cache are both restored.
        Raises:
            InvalidRequest: there is no such tag.
            ModelLoadError: the weights cannot be read any more, or a GPU has no memory for them now; they stay asleep.
            ConfigError: a GPU has no memory for the KV cache now; it stays asleep. Both may be tried again.
        """
        await self._call(c.WakeUp(tags))

    async def is_sleeping(self) -> bool:
        """Whether a part that `sleep` freed is not restored yet."""
        is_sleeping: bool = await self._call(c.IsSleeping())
        return is_sleeping

    async def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that this engine can do with its model, such as "generate"."""
        return tuple(await self._call(c.SupportedTasks()))

    # Weights and workers

    async def save_sharded_state(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int | str = 5 * 2**30
    ) -> list[str]:
        """Write the weights as they are now, with config and tokenizer, as a checkpoint that `Engine` loads again.

        Args:
            folder: on the engine's machine; made if it is missing.
            max_shard_bytes: most bytes of one file, also as 5GB or 2GiB; a larger tensor has a file of its own.
        Returns:
            the names of the weight files.
        Raises:
            OSError: the checkpoint cannot be written.
        """
        return list(await self._call(c.SaveShardedState(folder, max_shard_bytes)))

    async def update_weights(
        self, folder: str | os.PathLike[str] | None = None, *, tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the weights by others of the same shapes, all or nothing, between two steps.

        The prefix cache is cleared, and running requests compute their KV again. The new weights need host memory of
        their own for a moment.

        Args:
            folder: a checkpoint on the engine's machine.
            tensors: new values of the weights that change, by their names in checkpoints: torch tensors on the CPU, or
                numpy arrays; float32, float16, or torch's bfloat16.
        Raises:
            InvalidRequest: neither or both were given, or a tensor does not fit the model.
            ModelLoadError: the checkpoint does not fit, or cannot be read.
        """
        runtime = self._here()
        if (folder is None) == (tensors is None):
            raise InvalidRequest("give either a folder or tensors", param="folder")
        if folder is not None:
            await runtime.call(c.UpdateWeights(folder))
        elif tensors is not None:
            async with runtime.weights_turn:  # one at a time: the engine holds the staged tensors of each
                await _send_weights(runtime, tensors)

    async def collective_rpc(
        self, name: str, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a function that the engine's process has registered (`worker_function`), between two steps.

        Args:
            args, kwargs: follow the `Worker` that the function gets first; plain data if the engine is another process.
        Returns:
            the function's result on each rank.
        Raises:
            InvalidRequest: no function has this name; in another process: an argument or a result is no plain data.
            Exception: the function's error; from another process Python's own types only, else RuntimeError.
        """
        return list(await self._call(c.CollectiveRpc(name, args, kwargs)))

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        """Call ``function`` with the model of each rank, in the device thread between two steps; in process only.

        Raises:
            InvalidRequest: the engine is another process: register a function there, and use `collective_rpc`.
        """
        return await self._here().backend.apply_model(function)

    async def execute_dummy_batch(self) -> None:
        """Compute one token that belongs to no request: for ranks that must take part in the steps of others.

        Raises:
            InvalidRequest: the engine sleeps.
        """
        await self._call(c.ExecuteDummyBatch())

    # Replicas

    @property
    def num_engines(self) -> int:
        """Number of engines that requests may go to: replicas that serve or soon will; 1 without replicas."""
        if self._runtime is None:
            return 1
        return max(1, self._runtime.admission.capacity // self.config.max_waiting)

    def replicas(self) -> list[ReplicaStatus]:
        """The status of each replica, by rank; empty unless the engine was made with ``replicas``.

        Also for an engine that has died, with the reason of each replica's death.
        """
        runtime = self._begun()
        if runtime.state != "dead":
            runtime.check_running()
        cluster = runtime.backend.cluster
        return [] if cluster is None else cluster.statuses()

    async def scale(self, replicas: int) -> None:
        """Change the number of replicas of an engine that was made with ``replicas``.

        Further replicas, and those that were given up, are started, and take requests once they serve. Surplus
        replicas, of the highest ranks, take no new requests; their requests have ``drain_timeout_s`` to end, then go on
        at others. Returns when this is done.

        Raises:
            InvalidRequest: the engine has no replicas; or ``replicas`` is no number from 1 to 1024.
            ModelLoadError, ConfigError, EngineDead: a replica could not be started; other new ones that did not serve
                by then are ended, too.
        """
        await self._cluster().scale(replicas)

    async def restart_replicas(self) -> None:
        """Restart all replicas, one after the other, while the others take the requests: no request is lost.

        Raises:
            InvalidRequest: the engine has no replicas.
            EngineDead: a replica did not come back; the replicas after it are not restarted.
        """
        await self._cluster().restart()

    def _cluster(self) -> Cluster:
        cluster = self._here().backend.cluster
        if cluster is None:
            raise InvalidRequest("this engine has no replicas: make it with replicas=...", param="replicas")
        return cluster

    # Text

    @property
    def has_tools(self) -> bool:
        """Whether the format of the model's tool calls is known, so that ``tools`` may be given."""
        return self._here().answer_formats.has_tools

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
    ) -> list[int]:
        """The token ids of a text or a chat, also of one that is longer than the model takes.

        Long texts are tokenized in a thread; cancelling stops the wait, and the result is lost.

        Args:
            add_special_tokens: whether the tokenizer adds its own special tokens, such as a BOS. Absent: as `generate`,
                to a text, but not to a chat, whose template writes them.
            chat_template_kwargs, chat_template, tools: as in `generate`.
        Raises:
            InvalidRequest: a value is bad, or the model has no tokenizer.
        """
        runtime = self._here()
        prompt = open_messages(prompt)
        is_chat = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)
        if not isinstance(prompt, str) and not is_chat:
            raise InvalidRequest(
                f"prompt={shorten(prompt)}: a text or a list of chat messages is needed, with one message at least",
                param="prompt",
            )
        add = True if add_special_tokens is None else add_special_tokens
        calls.check_flag("add_special_tokens", add)
        tokenizer = runtime.require_tokenizer()
        kwargs = take_template_kwargs(chat_template_kwargs, is_chat=is_chat)
        if described := told_tools(tools, read_tools(tools)):
            kwargs["tools"] = list(described)
        if chat_template is not None:
            kwargs["chat_template"] = chat_template
        if isinstance(prompt, str):
            text, encode = prompt, partial(tokenizer.encode, add_special_tokens=add)
        else:  # rendered and encoded apart: a long chat is encoded by the worker for its size
            messages = copy_messages(prompt)
            text = await runtime.open_worker_for(None).run(tokenizer.render_chat, None, messages, **kwargs)
            encode = partial(tokenizer.encode_chat, add_special_tokens=add_special_tokens)
        return await runtime.open_worker_for(len(text)).run(encode, len(text), text)

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, however many, as the tokenizer's own decode gives it.

        Long lists are decoded in a thread; cancelling stops the wait, and the result is lost.

        Raises:
            InvalidRequest: an id is not in the model's vocabulary, or the model has no tokenizer.
        """
        runtime = self._here()
        calls.check_flag("skip_special_tokens", skip_special_tokens)
        tokenizer, ids = runtime.require_tokenizer("token_ids"), calls.listed_ids(token_ids)
        given = (tokenizer, ids, runtime.info.vocab_size, skip_special_tokens)
        return await runtime.open_worker_for(len(ids)).run(calls.detokenize, len(ids), *given)

    def token_bytes(
        self, token_ids: list[int], *, is_start: bool = True, skip_special_tokens: bool = True
    ) -> list[bytes]:
        """Each token's bytes of the UTF-8 of their text: joined, they are the text, if it has whole characters.

        Bytes of half a character, which a text shows as U+FFFD, are returned unchanged. If a tokenizer's decoder is
        only known as a function (`WindowTable`), each token is decoded alone, and half a character is U+FFFD.
        Synchronous, by a table: about half a microsecond a token, with the checks.

        Args:
            is_start: whether the text begins with these tokens, as an output does: some tokenizers then drop the space
                before the first word. False: other tokens came before.
            skip_special_tokens: True: special tokens have no bytes; False: they have the bytes of their contents.
        Raises:
            InvalidRequest: an id is not in the model's vocabulary, or the model has no tokenizer.
        """
        runtime = self._here()
        flags = {"is_start": is_start, "skip_special_tokens": skip_special_tokens}
        for name, value in flags.items():
            calls.check_flag(name, value)
        return calls.token_bytes(runtime.require_tokenizer("token_ids"), token_ids, runtime.info.vocab_size, **flags)

    # Numbers

    def health(self) -> Health:
        """Whether the engine is alive, stalled or dead, and why. Never raises once the engine has been started.

        STARTING: the engine is being loaded. ALIVE: loop and device make progress. STALLED: the device has been at one
        step for longer than ``stall_after_s``; or the engine's process sends no beats, as when it is stopped; or
        sequences could run and no step is launched (a bug, whose state is in the log). DEAD: the engine reported its
        death, its process is gone, the connection to it was cut, or beats are missing from another machine.

        Raises:
            EngineClosed: the engine has not been started.
        """
        return self._begun().health()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with the names and defaults of transformers'; it may be awaited, too, as in vLLM.

        Raises:
            InvalidRequest: the model has no tokenizer.
        """
        return self._running().require_tokenizer()

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's class, its named tokens, the size of its vocabulary and the chat template.

        Raises:
            InvalidRequest: the model has no tokenizer.
            EngineClosed: not started, or closed.
        """
        return self._running().require_tokenizer().info()

    def stats(self) -> EngineStats:
        """The engine's numbers now, and since its start.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().current_metrics().snapshot()

    @property
    def metrics(self) -> EngineMetrics:
        """The metric objects behind `stats`, for an exporter: ``for metric in engine.metrics.collect(): ...``.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().current_metrics()

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Notify ``observer`` of each later step and each request's end; return a function that removes it.

        The observer is called on the loop, between steps. Its errors are logged.
        """
        return self._running().core.observers.add(observer)

    def profile(self, path: str | os.PathLike[str], *, max_steps: int = 100) -> AbstractAsyncContextManager[None]:
        """Record what the device does: ``async with engine.profile("trace.json"): ...``.

        The file is torch's own trace, for https://ui.perfetto.dev or chrome://tracing: an event for each step of the
        device, named ``step N (R rows, T tokens)``, with its operations nested in it. Steps of all requests are in it.
        The file is complete when the block is left, also by an error; a block that is cancelled may leave none.

        The cost: a recorded step takes a fifth longer. Afterwards torch holds the GIL, which blocks the event loop: for
        2 to 5 µs an operation after the last step, and for 1 to 3 µs an operation at the end of the block.
        ``max_steps`` bounds that: 100 steps of the demo model have 100,000 operations, block the loop for 0.2 to 0.5 s
        and again for 0.1 to 0.3 s, and make a file of 25 MB.

        Args:
            max_steps: most steps of the device to record.
        Raises:
            InvalidRequest: a value is bad; or, on entering the block, the process's one torch profiler is in use.
            OSError: on leaving the block: the file cannot be written. The recording is then lost.
            EngineClosed: the engine is not running, or was closed in the block.
        """
        begin, end = c.StartProfile(max_steps), c.StopProfile(path)
        return _profiling(self._here(), begin, end)

    async def start_profile(self, *, max_steps: int = 100) -> None:
        """Begin a recording that `stop_profile` ends; `profile` does both, and has the cost in its docstring.

        Raises:
            InvalidRequest: a value is bad, or torch's profiler is in use.
        """
        await self._call(c.StartProfile(max_steps))

    async def stop_profile(self, path: str | os.PathLike[str]) -> None:
        """End a recording, and write it to a file of the engine's machine.

        Raises:
            InvalidRequest: there is no recording.
            OSError: the file cannot be written. The recording is then lost.
        """
        await self._call(c.StopProfile(path))

    @property
    def info(self) -> ExecutorInfo:
        """The properties of the device and the model: KV blocks, lengths, sizes.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().info

    def describe(self) -> str:
        """One line about the model, its weights and its KV cache, for a person.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().describe()

    async def _start(self) -> None:
        check_asyncio()
        if self._runtime is not None:
            raise EngineClosed("an engine starts once; make a new one")
        self._runtime = runtime = Runtime(self.config, self._make_backend)
        await runtime.start()
        self.config = runtime.config

    def _begun(self) -> Runtime:
        """The runtime of an engine whose start has begun."""
        if self._runtime is None:
            error = EngineClosed("the engine has not been started")
            raise error.with_hint("use `async with Engine(...)` or `await Engine.start(...)`")
        return self._runtime

    def _running(self) -> Runtime:
        runtime = self._begun()
        runtime.check_running()
        return runtime

    def _here(self) -> Runtime:
        """The running engine's runtime, asked on its loop."""
        runtime = self._running()
        runtime.check_loop()
        return runtime

    def _call(self, control: AnyControl) -> Coroutine[Any, Any, Any]:
        return self._here().call(control)

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
    from aioengine.cluster.further_front_end import ConnectedCluster

    return lambda hooks: ConnectedCluster(owner, hooks, model=options["model"], timeout_s=options["timeout_s"])


def _refuse_another(*_args: object, **_kwargs: object) -> Never:
    raise RuntimeError(
        "this would make another engine, of other settings: `engine = await Engine.start(...)` makes one and starts "
        "it; to start one that is made write `async with engine:`"
    )


@contextlib.asynccontextmanager
async def _profiling(runtime: Runtime, begin: c.StartProfile, end: c.StopProfile) -> AsyncIterator[None]:
    await runtime.call(begin)
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineClosed):  # the block's own error is raised
            await runtime.call(end)
        raise
    try:
        await runtime.call(end)
    except EngineClosed as closed:
        raise EngineClosed("the engine was closed while it was recorded: there is no trace") from closed


async def _send_weights(runtime: Runtime, tensors: Mapping[str, Any]) -> None:
    """Stage all tensors at the engine core, then commit them; after an error the weights are unchanged."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise InvalidRequest("tensors: a mapping of names to tensors is needed, with at least one", param="tensors")
    transfer = os.urandom(8).hex()
    try:
        for name, tensor in tensors.items():
            dtype, shape, data = _bytes_of(name, tensor)
            for offset in range(0, max(len(data), 1), PIECE_BYTES):
                piece = data[offset : offset + PIECE_BYTES]
                await runtime.call(c.StageWeights(transfer, name, dtype, shape, offset, piece))
        await runtime.call(c.CommitWeights(transfer))
    except BaseException:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5), contextlib.suppress(Exception):
            await runtime.call(c.DropWeights(transfer))  # an engine that has gone has dropped everything
        raise


def _bytes_of(name: object, tensor: Any) -> tuple[WeightDtype, tuple[int, ...], memoryview]:
    """A tensor's dtype, shape and bytes in row-major order; copied only if the bytes are in another order."""
    if not isinstance(name, str):
        raise InvalidRequest(f"tensors: {shorten(name)} is no name", param="tensors")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        dtype = _NUMPY_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is not None and tensor.device.type == "cpu":
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            return dtype, tuple(tensor.shape), memoryview(flat.numpy())
    elif isinstance(tensor, np.ndarray) and (dtype := _NUMPY_DTYPES.get(tensor.dtype.name)) is not None:
        flat_array = np.ascontiguousarray(tensor).reshape(-1)
        return dtype, tensor.shape, flat_array.view(np.uint8).data
    kind = f"{typed(tensor)} of {getattr(tensor, 'dtype', 'no dtype')}"
    raise InvalidRequest(
        f"tensors[{shorten(name)}] is {kind}; a torch tensor on the CPU or a numpy array is needed, in float32, "
        "float16 or (torch) bfloat16",
        param="tensors",
    )
