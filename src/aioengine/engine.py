"""The public face: an engine that lives in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import anyio
import msgspec

from aioengine.config import ConfigKeywords, EngineConfig, make_config
from aioengine.core import control_calls
from aioengine.core.control import (
    AnyControl,
    ExecuteDummyBatch,
    IsSleeping,
    PauseMode,
    ResetPrefixCache,
    SleepLevel,
    SupportedTasks,
    UpdateWeights,
    WakeTag,
)
from aioengine.core.executor_protocol import Executor, ExecutorInfo
from aioengine.core.health import Health
from aioengine.core.protocol import Backend, CoreHooks
from aioengine.core.weight_pieces import absolute, send_weights
from aioengine.errors import ConfigError, EngineClosed, InvalidRequest
from aioengine.executor.in_process import InProcess
from aioengine.frontend.admission import OnFull
from aioengine.frontend.prompt import (
    ChatMessage,
    Prompt,
    PromptDict,
    check_call,
    check_params,
    keep_prompt,
    make_id,
    open_prompt,
    take_prompt,
    take_template,
)
from aioengine.frontend.runtime import Runtime
from aioengine.metrics import EngineMetrics, EngineStats, Observer
from aioengine.outputs import RequestOutput
from aioengine.process_options import ProcessOptions
from aioengine.sampling_params import SamplingKeywords, SamplingParams, make_params
from aioengine.stream import Call, Checked, Profile, Stream, await_only
from aioengine.text.tokenizer import ModelTokenizer
from aioengine.validation import shorten

__all__ = ["ChatMessage", "Engine", "Prompt", "Stream"]

T = TypeVar("T")


class Engine:
    """An inference engine, whole, inside this process and this event loop.

    Made in a moment; the model is loaded by ``async with`` or by `start`. All methods belong to the loop that it was
    started on. Requests run side by side: start as many as you like with ``asyncio.gather`` or a task group.

    Args:
        model: a hub id, a folder, or None for the bundled demo model.
        executor: a device side of your own, such as `aioengine.testing.FakeExecutor`; the model then serves for its
            tokenizer and its generation config alone. It is closed with the engine, also when that cannot start.
        process: run the engine core, with its model and device, in a process of its own, which ends with this one.
        seed: requests that have no seed get theirs from this one, in the order of the calls; absent: at random.
        config: the fields of `EngineConfig`; and engine arguments of vLLM's, where they ask for nothing.
    Raises:
        ConfigError: a field is unknown, or its value is bad.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        executor: Executor | None = None,
        process: bool | ProcessOptions = False,
        seed: int | None = None,
        **config: Unpack[ConfigKeywords],
    ) -> None:
        self.config = make_config(os.fspath(model) if isinstance(model, os.PathLike) else model, config)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed={shorten(seed)}: an int is needed")
        self._seeds = None if seed is None else random.Random(seed)
        self._make_backend = _backend_of(self.config, executor, process)
        self._runtime: Runtime | None = None
        self._is_to_be_entered = False
        """It was started without a block, and one may still follow."""

    @classmethod
    async def start(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        executor: Executor | None = None,
        process: bool | ProcessOptions = False,
        seed: int | None = None,
        **config: Unpack[ConfigKeywords],
    ) -> Self:
        """Make an engine and start it, for notebooks and apps where no ``async with`` fits; close it with `aclose`.

        Cancelling stops the loading and leaves nothing behind.

        Raises:
            ConfigError, ModelLoadError: it cannot be started; nothing is left behind.
        """
        engine = cls(model, executor=executor, process=process, seed=seed, **config)
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
    ) -> Self:
        """Use an engine that serves in another process (``aioengine engine``, `EngineServer`); the same object.

        Its config is that engine's. `aclose` ends this connection and its requests; the engine serves on. When the
        engine or the connection breaks, everyone hears `EngineDead` once; connect anew then.

        Args:
            address: ``ipc:///path`` or ``tcp://host:port``.
            model: where to find the tokenizer here, if that is elsewhere than on the engine's machine.
            keys: the folder that ``aioengine keys`` made; for addresses that are not this machine's own.
            client: whose keys of the folder to use; may be left out where there are one client's.
            timeout_s: for what is there to answer; where nobody is, that is known at once.
        Raises:
            ConfigError: the address is not allowed, or lacks keys.
            EngineDead: nobody answers there, or what answers is no engine of this version.
        """
        if not isinstance(address, str):
            raise ConfigError(f"address={shorten(address)}: a str is needed, such as ipc:///path or tcp://host:port")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s={shorten(timeout_s)}: a number of seconds above 0 is needed")
        from aioengine.transport.backends import Connected

        engine = cls(model)
        folder = None if keys is None else os.fspath(keys)
        engine._make_backend = functools.partial(
            Connected, address, model=engine.config.model, keys=folder, client=client, timeout_s=float(timeout_s)
        )
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
            drain: first let all requests end that were made before, those included that wait for a place, and what is
                paused or asleep. A reader that has stalled at its ``max_unread_tokens`` is waited for: bound that by a
                timeout of your own, and `abort_all`. Without ``drain`` all requests hear `EngineClosed`.
        Raises:
            ModelLoadError, ConfigError: what slept could not be woken up to be drained; it is closed all the same.
        """
        if self._runtime is not None:
            await self._runtime.aclose(drain=drain)

    @await_only
    async def generate(
        self,
        prompt: Prompt | PromptDict,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_full: OnFull = "wait",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestOutput:
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
            priority: smaller goes first, and takes the place of larger ones that run; equal ones go by age.
            cache_salt: share cached prefixes only with requests of the same salt.
            on_full: with ``max_waiting`` requests waiting already, "wait" for a place or "raise" `EngineOverloaded`.
            chat_template_kwargs: variables for the model's chat template, such as ``enable_thinking``; plain data.
                Among them ``add_generation_prompt``: end the prompt with what begins an answer, True where no message
                is continued; ``continue_final_message``: leave the last message open, so that the answer goes on with
                it.
        Raises:
            InvalidRequest: a value is bad; raised before anything is queued.
            EngineOverloaded, StepFailed, EngineDead, EngineClosed: see there.
        """
        check_asyncio()
        stream = self._make_stream(
            prompt,
            params,
            request_id,
            sampling_params=sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            on_full=on_full,
            chat_template_kwargs=chat_template_kwargs,
            sampling=sampling,
            may_wait=True,
        )
        async with stream:
            return await stream.finish()

    def stream(
        self,
        prompt: Prompt | PromptDict,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_full: OnFull = "wait",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_unread_tokens: int | None = None,
        stream_interval: int | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Stream:
        """Complete a prompt and read it as it comes.

        ``async with engine.stream(...) as stream: async for delta in stream: ...``. Arguments and errors are those of
        `generate`, and two more. Leaving the block, for any reason, aborts the request. While another task starts the
        engine, entering the block waits for it, and raises what the call raises otherwise.

        Args:
            max_unread_tokens: with so many of a choice unread it is not computed any further until they are read; it
                then holds no running place and is the first to lose its memory. What is being computed at that moment
                still comes: at most a token for each step in flight. Absent: what is unread is merged.
            stream_interval: tokens of a choice between two deltas, the first and the last delta aside; absent: the
                engine's.
        """
        return self._make_stream(
            prompt,
            params,
            request_id,
            sampling_params=sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            on_full=on_full,
            chat_template_kwargs=chat_template_kwargs,
            max_unread_tokens=max_unread_tokens,
            stream_interval=stream_interval,
            sampling=sampling,
        )

    def _make_stream(
        self,
        prompt: Any,
        params: SamplingParams | None,
        request_id: str | None,
        *,
        sampling_params: SamplingParams | None,
        priority: int,
        cache_salt: str | None,
        on_full: OnFull,
        chat_template_kwargs: Mapping[str, Any] | None,
        sampling: SamplingKeywords,
        max_unread_tokens: int | None = None,
        stream_interval: int | None = None,
        may_wait: bool = False,
    ) -> Stream:
        """As `stream`. What `may_wait` is checked on entering where this turn of the loop has no time left."""
        runtime = self._here_or_starting()
        prompt, cache_salt = open_prompt(prompt, cache_salt)
        priority, max_unread_tokens, stream_interval = check_call(
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            on_full=on_full,
            max_unread_tokens=max_unread_tokens,
            stream_interval=stream_interval,
        )
        call = Call(
            request_id=make_id() if request_id is None else request_id,
            priority=priority,
            cache_salt=cache_salt or "",
            on_full=on_full,
            max_unread_tokens=max_unread_tokens,
            stream_interval=stream_interval,
        )
        seed = None
        if self._seeds is not None and all(getattr(given, "seed", None) is None for given in (params, sampling_params)):
            seed = self._seeds.getrandbits(56) if sampling.get("seed") is None else None

        def check() -> Checked:
            checked = make_params(params, runtime.sampling_defaults, sampling, alias=sampling_params)
            if seed is not None:
                checked = msgspec.structs.replace(checked, seed=seed)
            check_params(checked, runtime)
            taken = take_prompt(prompt, runtime)
            return Checked(taken, checked, take_template(template, taken))

        template: Any = chat_template_kwargs
        is_later = runtime.is_starting or (may_wait and runtime.turns.is_busy)
        if is_later:  # the caller may go on with what it gave
            prompt = keep_prompt(prompt)
            template = dict(template) if isinstance(template, dict) else template
        return Stream(self, runtime, call, check, is_later=is_later)

    async def wait_started(self) -> None:
        """Wait while another task starts the engine; returns at once where it runs. Cancelling stops the wait alone.

        `generate`, and entering a `stream`, do so by themselves.

        Raises:
            ConfigError, ModelLoadError: it cannot be started, as that other task hears, too.
            EngineClosed: no task has begun to start it, or it was closed.
        """
        await self._here_or_starting().wait_started()

    def check_accepting(self, num_sequences: int = 1) -> None:
        """Raise what a request with ``on_full="raise"`` would hear now; for who wants to refuse before other work.

        Takes no place, so that a request which follows may hear otherwise. Synchronous.

        Args:
            num_sequences: that the request will be (`SamplingParams.num_sequences`).
        Raises:
            EngineOverloaded: there is no place for so many; says when to try again.
            EngineClosed: the engine has not been started, drains, or is closed.
            EngineDead: it broke.
            InvalidRequest: so many never find room.
        """
        self._here().check_accepting(num_sequences)

    def abort(self, request_id: str) -> None:
        """End all requests of this id with what they have: ``finish_reason`` is "abort". Synchronous and idempotent."""
        if self._runtime is not None:
            self._runtime.abort(request_id)

    def abort_all(self) -> None:
        """End all requests, those that wait for a place included, with what they have. Synchronous and idempotent.

        They are in no later step. Of hundreds some readers hear of it in the next turns of the loop.
        """
        if self._runtime is not None:
            self._runtime.abort_all()

    async def drain(self) -> None:
        """Take no new requests, and wait until all that were made before have ended; `resume` takes new ones again.

        Those that wait for a place are served, too, and what was paused or asleep goes on. A reader that has stalled at
        its ``max_unread_tokens`` is waited for: bound that with a timeout of your own, and `abort_all`. A `pause`
        meanwhile holds it up. Returns early when it is resumed. Idempotent. Cancelling stops the wait alone.

        Raises:
            EngineDead, EngineClosed: it came to an end before they did.
        """
        await self._here().drain()

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
        control_calls.check_mode(mode)
        await self._here().pause(mode)

    async def resume(self) -> None:
        """Go on after `pause`, and take requests again after `drain`. Idempotent."""
        self._here().resume()

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> int:
        """Forget all cached prefixes: no later request sees KV from before. Idempotent; running requests go on.

        Args:
            reset_running: let running requests compute their KV again, too.
        Returns:
            how many KV blocks had been kept for a prefix.
        """
        num_blocks: int = await self._call(ResetPrefixCache(bool(reset_running)))
        return num_blocks

    async def sleep(self, level: SleepLevel = 1, *, mode: PauseMode = "abort") -> None:
        """Give the device's memory back until `wake_up`; meanwhile requests are accepted, and wait.

        The prefix cache is cleared. After waking, equal requests bring equal outputs.

        Args:
            level: 0 only pauses; 1 drops the KV cache and keeps the weights in the host's memory (on a CPU they are
                there already); 2 drops both, and waking reads the weights again from where they came.
            mode: what becomes of accepted requests, as in `pause`; what "keep" stopped goes on after waking.
        Raises:
            InvalidRequest: a value is bad; or level 2, and the weights came as tensors, so that nothing could bring
                them back; or level 1 on a GPU, and the host has no memory for them: nothing is asleep then.
        """
        call = control_calls.sleep(level, mode)
        runtime = self._here()
        if mode == "abort":
            runtime.abort_all()  # those on their way, too
        await runtime.call(call)

    async def wake_up(self, tags: Iterable[WakeTag] | None = None) -> None:
        """Bring back what `sleep` took, and go on. Idempotent.

        Args:
            tags: "weights", "kv_cache", or "scheduling" for what a `sleep` at level 0 has stopped; absent: all. With
                weights and KV cache both back, requests go on by themselves.
        Raises:
            InvalidRequest: there is no such tag.
            ModelLoadError: the weights cannot be read any more, or a GPU has no memory for them now; it sleeps on.
            ConfigError: a GPU has no memory for the KV cache now; that sleeps on. Both may be tried again.
        """
        await self._call(control_calls.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether anything that `sleep` took is not back yet."""
        is_sleeping: bool = await self._call(IsSleeping())
        return is_sleeping

    async def supported_tasks(self) -> tuple[str, ...]:
        """What this engine can do with its model, such as "generate"."""
        return tuple(await self._call(SupportedTasks()))

    # Weights and workers

    async def save_sharded_state(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 2**30
    ) -> list[str]:
        """Write the weights as they are now, with config and tokenizer, as a checkpoint that `Engine` loads again.

        Args:
            folder: on the engine's machine; made if it is missing.
            max_shard_bytes: of one file; a tensor larger than that has one of its own.
        Returns:
            the names of the weight files.
        Raises:
            OSError: it cannot be written.
        """
        return list(await self._call(control_calls.save_sharded_state(folder, max_shard_bytes)))

    async def update_weights(
        self, folder: str | os.PathLike[str] | None = None, *, tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Take other weights of the same shapes, all or nothing, between two steps.

        The prefix cache is cleared, and what runs computes its KV again. Needs the memory of the new weights beside
        the old ones for a moment.

        Args:
            folder: a checkpoint on the engine's machine.
            tensors: by their names in checkpoints, as many as are to change: torch tensors on the CPU, or numpy
                arrays; float32, float16, or torch's bfloat16.
        Raises:
            InvalidRequest: neither or both were given, or a tensor does not fit the model.
            ModelLoadError: the checkpoint does not fit, or cannot be read.
        """
        runtime = self._here()
        if (folder is None) == (tensors is None):
            raise InvalidRequest("give either a folder or tensors", param="folder")
        if folder is not None:
            await runtime.call(UpdateWeights(absolute(folder, "folder")))
        elif tensors is not None:
            async with runtime.weights_turn:  # one at a time: the engine holds what has come of each
                await send_weights(runtime.call, tensors)

    async def collective_rpc(
        self, name: str, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a function that the engine's process has registered (`worker_function`), between two steps.

        Args:
            args, kwargs: behind the `Worker` that it is given; plain data where the engine is another process.
        Returns:
            what it returned on each rank.
        Raises:
            InvalidRequest: no function has this name; in another process: an argument or a result is no plain data.
            Exception: what the function raised; from another process Python's own types only, else RuntimeError.
        """
        return list(await self._call(control_calls.collective_rpc(name, args, kwargs)))

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        """Call ``function`` with the model of each rank, in the device thread between two steps; in process only.

        Raises:
            InvalidRequest: the engine is another process: register a function there, and use `collective_rpc`.
        """
        return await self._here().apply_model(function)

    async def execute_dummy_batch(self) -> None:
        """Compute one token that is nobody's: for ranks that must take part in what others compute.

        Raises:
            InvalidRequest: the engine sleeps.
        """
        await self._call(ExecuteDummyBatch())

    # Text

    async def tokenize(
        self,
        prompt: str | list[ChatMessage],
        *,
        add_special_tokens: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a text or a chat, however long: more than the model takes may be counted, too.

        What is long is done in a thread; cancelling stops the wait, and the result is lost.

        Args:
            add_special_tokens: those that the tokenizer adds by itself, such as a BOS. Absent: as `generate` does, with
                a text and not with a chat, whose template writes them.
            chat_template_kwargs: as in `generate`.
        Raises:
            InvalidRequest: a value is bad, or the model has no tokenizer.
        """
        return await self._here().tokenize(
            prompt, add_special_tokens=add_special_tokens, chat_template_kwargs=chat_template_kwargs
        )

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, however many, as the tokenizer's own decode gives it.

        What is long is done in a thread; cancelling stops the wait, and the result is lost.

        Raises:
            InvalidRequest: an id is not in the model's vocabulary, or the model has no tokenizer.
        """
        return await self._here().detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(
        self, token_ids: list[int], *, is_start: bool = True, skip_special_tokens: bool = True
    ) -> list[bytes]:
        """Each token's part of the UTF-8 of their text: joined they are the text, where it has whole characters.

        The bytes of half a character, which a text shows as U+FFFD, are here what they are. Of a tokenizer whose
        decoder is only known as a function (`WindowTable`) each token is decoded alone, and half a character is U+FFFD.
        Synchronous, by a table: about half a microsecond a token, with the checks.

        Args:
            is_start: the text begins with these, as an output does: some tokenizers leave the space before the first
                word out. False: others came before them.
            skip_special_tokens: they have no bytes then; else those of their contents.
        Raises:
            InvalidRequest: an id is not in the model's vocabulary, or the model has no tokenizer.
        """
        return self._here().token_bytes(token_ids, is_start=is_start, skip_special_tokens=skip_special_tokens)

    # Numbers

    def health(self) -> Health:
        """Whether the engine is alive, stalled or dead, and why. Never raises once the engine has been started.

        ALIVE: loop and device get on. STALLED: the engine is there, and either its device has been at one step for
        longer than ``stall_after_s``, or its process does not beat (stopped, say). DEAD: it said so, its process is
        gone, the connection to it was cut, or beats are missing from another machine.

        Raises:
            EngineClosed: the engine has not been started.
        """
        if self._runtime is None:
            raise _not_started()
        return self._runtime.health()

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the names and defaults of transformers'; it may be awaited, too, as in vLLM.

        Raises:
            InvalidRequest: the model has none.
        """
        return ModelTokenizer(self._running().require_tokenizer())

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
        begin, end = control_calls.start_profile(max_steps), control_calls.stop_profile(path)
        return Profile(self._here(), begin, end)

    async def start_profile(self, *, max_steps: int = 100) -> None:
        """Begin a recording that `stop_profile` ends; `profile` does both, and tells what it costs.

        Raises:
            InvalidRequest: a value is bad, or torch's profiler is in use.
        """
        await self._call(control_calls.start_profile(max_steps))

    async def stop_profile(self, path: str | os.PathLike[str]) -> None:
        """End a recording, and write it to a file of the engine's machine.

        Raises:
            InvalidRequest: there is no recording.
            OSError: the file cannot be written. The recording is then lost.
        """
        await self._call(control_calls.stop_profile(path))

    @property
    def info(self) -> ExecutorInfo:
        """What the device offers: KV blocks, lengths, sizes.

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

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise _not_started()
        self._runtime.check_running()
        return self._runtime

    def _here(self) -> Runtime:
        """The running engine's runtime, asked on its loop."""
        runtime = self._running()
        runtime.check_loop()
        return runtime

    def _here_or_starting(self) -> Runtime:
        """As `_here`, and that of an engine that is being started."""
        if self._runtime is None or not self._runtime.is_starting:
            return self._here()
        self._runtime.check_loop()
        return self._runtime

    async def _call(self, control: AnyControl) -> Any:
        return await self._here().call(control)

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is not None and runtime.is_open:
            runtime.abandon()
            message = f"{self!r} was never closed: use `async with`, or await aclose()"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "new" if self._runtime is None else "open" if self._runtime.is_open else "closed"
        return f"<Engine {self.config.model or 'demo'!r} {state}>"


def check_asyncio() -> None:
    """Raise RuntimeError where a coroutine is not run by asyncio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "aioengine needs asyncio's event loop, and none runs here (trio does not have one): start the program with "
            "asyncio.run, or anyio.run with its asyncio backend, and serve with an asyncio worker "
            "(hypercorn --worker-class asyncio)"
        ) from None


def _backend_of(
    config: EngineConfig, executor: Executor | None, process: bool | ProcessOptions
) -> Callable[[CoreHooks], Backend]:
    """Where the core is to run."""
    if process is False:
        return functools.partial(InProcess, config, executor)
    if process is not True and not isinstance(process, ProcessOptions):
        raise ConfigError(f"process={shorten(process)}: True, False or a ProcessOptions is needed")
    if executor is not None:
        raise ConfigError("an executor is an object of this process: give either executor or process")
    from aioengine.transport.backends import InChild

    return functools.partial(InChild, config, ProcessOptions() if process is True else process)


def _not_started() -> EngineClosed:
    return EngineClosed("the engine has not been started: use `async with Engine(...)` or `await Engine.start(...)`")
