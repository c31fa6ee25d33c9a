"""The executor that runs a model with torch in this process, in a device thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import anyio
import torch

from aioengine.attention.kv_cache import KVCache, KVCacheShape
from aioengine.attention.torch_paged import TorchPagedAttention
from aioengine.config import EngineConfig
from aioengine.core.plan import StepPlan, StepResult
from aioengine.executor.device import DeviceThread, Pending
from aioengine.executor.input_batch import InputBatch
from aioengine.executor.memory import available_memory, num_kv_blocks
from aioengine.executor.profiler import Recording
from aioengine.executor.protocol import ExecutorInfo, ExecutorStats, already_recording, not_recording
from aioengine.executor.runner import Runner
from aioengine.model_folder import ModelFolder
from aioengine.models.decoder import Decoder
from aioengine.models.loader import load_decoder

OnProgress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes to load)."""


class Load(Protocol):
    """Makes a decoder; blocks."""

    def __call__(self, *, on_progress: OnProgress, should_stop: Callable[[], bool]) -> Decoder: ...


DEFAULT_MAX_IN_FLIGHT = 1
"""On a CPU the loop and the device share the cores, so that a queued step gains little and costs a wasted token."""


CANCEL_DEADLINE_S = 60.0
"""How long a cancelled start waits for what cannot be interrupted, such as an import."""

LARGE_STEP_BYTES = 32 * 2**20


class TorchExecutor:
    """An `Executor` in this process. Its thread holds the model and the KV cache; this object only talks to it."""

    def __init__(self, thread: DeviceThread, device: Device, info: ExecutorInfo, stats: ExecutorStats) -> None:
        self.info = info
        self.stats = stats
        self._thread = thread
        self._device = device

    @classmethod
    async def start(cls, folder: ModelFolder, config: EngineConfig, *, on_progress: OnProgress | None = None) -> Self:
        """Load a model and make room for its KV cache.

        Cancelling stops the loading and leaves nothing behind.

        Args:
            on_progress: called on the loop.
        Raises:
            ModelLoadError, ConfigError: as `load_decoder`; ConfigError also when the KV cache is too small.
        """
        return await cls.start_with(partial(load_decoder, folder, config), config, on_progress=on_progress)

    @classmethod
    async def start_with(cls, load: Load, config: EngineConfig, *, on_progress: OnProgress | None = None) -> Self:
        """As `start`, with the decoder that ``load`` makes in the device thread."""
        device = Device()
        stats = ExecutorStats()
        thread = DeviceThread(num_threads=config.num_threads, on_end=device.free)
        make_decoder = partial(load, on_progress=_on_loop(on_progress), should_stop=thread.should_stop)
        try:
            info = await thread.submit(partial(device.load, make_decoder, config, stats)).wait()
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CANCEL_DEADLINE_S):
                await thread.aclose()
            raise
        return cls(thread, device, info, stats)

    def launch(self, plan: StepPlan) -> TorchStep:
        return TorchStep(self._thread.submit(partial(self._device.step, plan)))

    async def start_profile(self, *, max_steps: int) -> None:
        recording = Recording(max_steps)
        try:
            await self._thread.submit(partial(self._device.start_profile, recording)).wait()
        except asyncio.CancelledError:
            self._thread.submit(partial(self._device.drop_profile, recording))
            raise

    async def stop_profile(self, path: Path) -> None:
        await self._thread.submit(partial(self._device.stop_profile, path)).wait()

    async def aclose(self) -> None:
        await self._thread.aclose()


class TorchStep:
    """A step launched on a `TorchExecutor`."""

    def __init__(self, pending: Pending[StepResult]) -> None:
        self._pending = pending

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    async def finish(self) -> StepResult:
        return await self._pending.wait()


class Device:
    """What the device thread owns. Only jobs and the thread's end touch it, so that it is freed with the thread."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._weight_bytes = 0
        self._max_threads = 0
        """Threads of a large step; 0: leave the thread's number as it is, for all steps."""
        self._recording: Recording | None = None

    def load(self, make_decoder: Callable[[], Decoder], config: EngineConfig, stats: ExecutorStats) -> ExecutorInfo:
        """Load the decoder and make room for its KV cache."""
        decoder = make_decoder()
        model = decoder.config
        shape = KVCacheShape(
            num_layers=model.num_layers,
            block_size=config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
        )
        num_blocks = num_kv_blocks(
            config,
            max_model_len=model.max_model_len,
            bytes_per_block=shape.bytes_per_block,
            available_bytes=available_memory(),
        )
        batch = InputBatch(
            max_num_seqs=config.max_num_seqs, max_model_len=model.max_model_len, block_size=config.block_size
        )
        attention = TorchPagedAttention(KVCache.allocate(shape, num_blocks))
        self._runner = Runner(decoder, attention, batch, stats)
        self._weight_bytes = decoder.weight_bytes
        if config.num_threads is None:
            self._max_threads = torch.get_num_threads()
        return ExecutorInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            max_in_flight=config.max_in_flight or DEFAULT_MAX_IN_FLIGHT,
            kv_cache_bytes=num_blocks * shape.bytes_per_block,
            weight_bytes=decoder.weight_bytes,
            device="cpu",
            dtype=str(model.dtype).removeprefix("torch."),
        )

    def step(self, plan: StepPlan) -> StepResult:
        assert self._runner is not None
        if self._max_threads:
            is_large = is_large_step(self._weight_bytes, int(plan.num_tokens.sum()))
            torch.set_num_threads(self._max_threads if is_large else 1)  # 0.2 µs, and for this thread alone
        if self._recording is None:
            return self._runner.step(plan)
        with self._recording.step(plan):
            return self._runner.step(plan)

    def start_profile(self, recording: Recording) -> None:
        if self._recording is not None:
            raise already_recording()
        recording.start()
        self._recording = recording

    def stop_profile(self, path: Path) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            raise not_recording()
        recording.stop()
        recording.write(path)

    def drop_profile(self, recording: Recording) -> None:
        """End a recording that nobody will stop, if it has begun."""
        if self._recording is recording:
            self._recording = None
            recording.stop()

    def free(self) -> None:
        self._runner = None
        if self._recording is not None:
            self.drop_profile(self._recording)


def is_large_step(weight_bytes: int, num_tokens: int) -> bool:
    """Whether a step's operations are worth more than one thread: by the bytes read, and the work for each token.

    Threads of a small operation wait for each other longer than they work. Where another process holds one of their
    cores, each operation waits for that one: a token of a 7 MiB model took 175 ms with two threads and 13 with one.
    """
    return weight_bytes * (1 + num_tokens / 16) > LARGE_STEP_BYTES


def _on_loop(on_progress: OnProgress | None) -> OnProgress:
    """What the device thread calls to have ``on_progress`` called on this loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        if on_progress is not None:
            loop.call_soon_threadsafe(on_progress, done, total)

    return report
