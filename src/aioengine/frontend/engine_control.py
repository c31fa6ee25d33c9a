"""The methods of a running engine beside requests: control calls, text, numbers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NoReturn, SupportsIndex, TypeVar

import anyio
import numpy as np

from aioengine.config import EngineConfig
from aioengine.core import control as c
from aioengine.core.control import AnyControl, PauseMode, SleepLevel, WakeTag, WeightDtype
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Health
from aioengine.core.protocol import Cluster, ReplicaStatus
from aioengine.errors import EngineClosed, InvalidRequest
from aioengine.frontend.prompt import ChatMessage
from aioengine.frontend.runtime import Runtime
from aioengine.metrics import EngineMetrics, EngineStats, Observer
from aioengine.text import calls
from aioengine.text.chat_input import copy_messages, open_messages, take_template_kwargs
from aioengine.text.tokenizer import Tokenizer
from aioengine.tool_calls.calls import read_tools, told_tools
from aioengine.validation import shorten, typed
from aioengine.vllm_names import NotYet, not_yet

T = TypeVar("T")

PIECE_BYTES = 2**20
"""Bytes of a tensor in one message; a message is copied a few times on its way, in less than a millisecond."""

_NUMPY_DTYPES: dict[str, WeightDtype] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class NotCopied:
    """`copy` and `pickle` raise TypeError: the first copy that is collected would close the parts of both."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: share this one, or make another one")


class EngineControl(NotCopied, NotYet):
    """The methods of `Engine` that concern the whole engine rather than a request.

    A control call is a message that checks its arguments (`aioengine.core.control`), sent to the engine core.
    """

    config: EngineConfig
    _runtime: Runtime | None = None
    """Set when the start begins."""

    chat = not_yet("chat", "give the list of messages to generate or stream")

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
        if told := told_tools(tools, read_tools(tools)):
            kwargs["tools"] = list(told)
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
