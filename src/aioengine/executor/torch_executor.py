"""The executor that runs a model with torch in this process, in a device thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple

import anyio
import torch

from aioengine.config import EngineConfig
from aioengine.core import control as c
from aioengine.core.executor_protocol import (
    DeviceLost,
    ExecutorInfo,
    ExecutorStats,
    already_recording,
    not_recording,
    weights_asleep,
)
from aioengine.core.named_functions import Worker, registered
from aioengine.errors import ConfigError, InternalError, describe
from aioengine.executor.accelerator import Accelerator
from aioengine.executor.cuda import CudaAccelerator, find_cuda
from aioengine.executor.device_thread import CLOSED, DeferredResult, DeviceThread, Pending
from aioengine.executor.host import HostAccelerator, num_usable_cores, num_usable_threads
from aioengine.executor.make_runner import make_cache, make_runner
from aioengine.executor.memory import return_freed_memory
from aioengine.executor.profiler import Recording
from aioengine.executor.runner import Runner
from aioengine.executor.weights import Load, Weights
from aioengine.kernels.kernel_check import find_faulty
from aioengine.kernels.native.native_operations import has_kernels
from aioengine.kernels.native.parts import parts_of
from aioengine.models.folder import ModelFolder
from aioengine.models.formats.catalogue import is_quantised
from aioengine.models.implementations import load_model, read_model_config
from aioengine.models.loader import LoadStopped
from aioengine.processes.progress import LOADING, OnProgress
from aioengine.scheduler.plan import StepPlan, StepResult

logger = logging.getLogger("aioengine")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CANCEL_DEADLINE_S = 60.0
"""Longest wait of a cancelled start for work that cannot be interrupted, such as an import."""

LARGE_LAYER_BYTES = 2 * 2**20
"""Size of a layer's work from which two idle cores compute a step faster than one: 1.03 times at the bundled model's
2 MiB a layer with one row, 1.2 times with 32 rows, 1.35 times at 7.5 MiB with one row (benchmarks/README.md)."""


class TorchExecutor:
    """An `Executor` in this process. Its thread holds the model and the KV cache; this object submits jobs to it."""

    def __init__(self, thread: DeviceThread, device: Device, info: ExecutorInfo, stats: ExecutorStats) -> None:
        self.info = info
        self.stats = stats
        self.handles = device.runner.handles
        self._thread = thread
        self._device = device

    @classmethod
    async def start(
        cls,
        folder: ModelFolder | None,
        config: EngineConfig,
        *,
        load: Load | None = None,
        find_accelerator: Callable[[], Accelerator] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Load a model and make room for its KV cache.

        Cancelling stops the loading and leaves nothing behind.

        Args:
            folder: the model's; None: the model came from no folder, and cannot be saved.
            load: makes the decoder in the device thread, in place of `load_model`.
            find_accelerator: makes the device in the device thread; absent: the device that ``config.device`` names.
            on_progress: called on the loop.
        Raises:
            ModelLoadError, ConfigError: as `load_model`; ConfigError also when the KV cache is too small.
        """
        if load is None:
            assert folder is not None
            load = partial(load_model, folder, config)
        device = Device(config)
        stats = ExecutorStats()
        thread = DeviceThread(num_threads=config.num_threads, on_end=device.free)
        find = find_accelerator or (lambda: _find_accelerator(config, folder, thread.should_stop))
        loop = asyncio.get_running_loop()

        def report(done: int, total: int, what: str = LOADING) -> None:
            if on_progress is not None:
                loop.call_soon_threadsafe(on_progress, done, total, *((what,) if what else ()))

        try:
            info = await thread.submit(device.load, find, load, folder, stats, report, thread.should_stop).finish()
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CANCEL_DEADLINE_S):
                await thread.aclose()
            raise
        return cls(thread, device, info, stats)

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        return self._thread.submit(self._device.step, plan)

    def launch_dummy(self) -> Pending[None]:
        return self._thread.submit(self._device.dummy_step)

    async def perform(self, call: c.Control) -> Any:
        try:
            return await self._thread.submit(_run_foreign, self._device.perform, call).finish()
        except asyncio.CancelledError:
            self._thread.submit(self._device.cancel, call)
            raise

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        return await self._thread.submit(_run_foreign, self._device.apply, function).finish()

    async def aclose(self) -> None:
        await self._thread.aclose()


class Device:
    """The state of the device thread. Only jobs and the thread's end use it, so that it is freed with the thread.

    Attributes:
        weights, runner: from `load` to `free`.
    """

    weights: Weights
    runner: Runner
    _accelerator: Accelerator

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._asleep: set[c.WakeTag] = set()
        self._num_layers = 1
        self._kv_bytes_per_token = 0
        self._max_threads = 0
        """Threads of a large step; 0: do not change the number of threads, for any step."""
        self._recording: Recording | None = None

    def load(
        self,
        find_accelerator: Callable[[], Accelerator],
        load: Load,
        folder: ModelFolder | None,
        stats: ExecutorStats,
        report: OnProgress,
        should_stop: Callable[[], bool],
    ) -> ExecutorInfo:
        """Load the decoder and make room for its KV cache."""
        config = self._config
        self._accelerator = accelerator = find_accelerator()
        if config.quantization is not None and not accelerator.is_host:
            raise ConfigError(f"quantization={config.quantization!r} is for a CPU; give device='cpu', or leave it out")
        self.weights = Weights(
            load,
            folder,
            is_in_folder=config.load_format != "dummy",
            on_progress=report,
            should_stop=should_stop,
            device=accelerator.device,
            operations=accelerator.operations,
            is_elsewhere=not accelerator.is_host,
        )
        decoder = self.weights.decoder
        assert decoder is not None
        self.runner, info = make_runner(accelerator, decoder, config, stats, report)
        self._num_layers = decoder.config.num_layers
        block_bytes = sum(info.layout.pools[group.pool].block_bytes for group in info.layout.groups)
        self._kv_bytes_per_token = block_bytes // info.block_size
        self._weight_bytes = info.weight_bytes
        if accelerator.is_host:
            if config.num_threads is None:
                self._max_threads = num_usable_threads()
            elif config.num_threads > (cores := num_usable_cores()):
                logger.warning(
                    "num_threads=%d is more than the usable cores (%d): steps are slower so; leave it out",
                    config.num_threads,
                    cores,
                )
        return info

    def step(self, plan: StepPlan) -> StepResult | DeferredResult[StepResult]:
        assert not self._asleep, f"a plan was launched while these were asleep: {sorted(self._asleep)}"
        if self.weights.is_torn:
            raise DeviceLost("the device failed while its weights were replaced: some are new and others old")
        if self._max_threads:
            num_tokens = int(plan.num_tokens.sum())
            self._use_threads_for(num_tokens, num_tokens + int(plan.starts.sum()))
        if self._recording is None:
            return self.runner.step(plan)
        with self._recording.step(plan):
            return self.runner.step(plan)

    def dummy_step(self) -> None:
        """Run a step as `Executor.launch_dummy`, and wait for its end."""
        self._use_threads_for(1, 0)
        self.runner.dummy_step()

    def perform(self, call: c.Control) -> Any:
        """See `Executor.perform`."""
        match call:
            case c.StartProfile():
                if self._recording is not None:
                    raise already_recording()
                self._recording = Recording(call, self._accelerator.profiler_activities())
            case c.StopProfile():
                recording, self._recording = self._recording, None
                if recording is None:
                    raise not_recording()
                self.runner.synchronize()
                recording.stop()
                recording.write(Path(call.path))
            case c.Sleep():
                self._sleep(call.level)
            case c.WakeUp():
                self._wake_up(call.tags)
            case c.UpdateWeights():
                self._replace(lambda: self.weights.update(Path(call.folder)))
            case c.StageWeights():
                self.weights.staging.add(call)
            case c.CommitWeights():
                self._replace(lambda: self.weights.commit(call.transfer))
            case c.DropWeights():
                self.weights.staging.drop(call.transfer)
            case c.SaveShardedState():
                return self.weights.save(Path(call.folder), call.max_shard_bytes)
            case c.CollectiveRpc():
                function = registered(call.name)
                self.runner.synchronize()
                worker = Worker(rank=0, world_size=1, model=self.weights.decoder, config=self._config)
                return [function(worker, *call.args, **call.kwargs)]
            case c.ExecuteDummyBatch():
                if "weights" in self._asleep:
                    raise weights_asleep("execute_dummy_batch")
                self.dummy_step()
            case _:
                raise InternalError(f"a device has nothing to do for {call}")
        return None

    def cancel(self, call: c.Control) -> None:
        """Undo the parts of a call that nothing else would end, since the caller of `perform` was cancelled."""
        match call:
            case c.StageWeights():
                self.weights.staging.drop(call.transfer)
            case c.StartProfile() if self._recording is not None and self._recording.asked_by is call:
                self._drop_profile()

    def _drop_profile(self) -> None:
        """End a recording that no call will stop, if there is one."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()

    def _sleep(self, level: c.SleepLevel) -> None:
        self.runner.synchronize()
        if level == 2:
            self.weights.discard()  # first, since it may refuse
            self.runner.use(None)
        elif self.weights.is_elsewhere:
            self.weights.move_away()  # first, since it may refuse
            self.runner.use(None)
        self.runner.drop_cache()
        self._asleep = {"weights", "kv_cache"}
        self._return_memory()

    def _wake_up(self, parts: tuple[c.WakeTag, ...]) -> None:
        if "weights" in parts:
            self._use_threads(True)
            try:
                self.weights.restore()
                self.runner.use(self.weights.decoder)
            finally:
                self._return_memory()
            self._asleep.discard("weights")
        if "kv_cache" in parts:
            if problem := make_cache(self.runner):
                self._return_memory()
                raise ConfigError(
                    f"there is no room for the KV cache: {problem}. Free some of the device's memory, and wake up again"
                )
            self._asleep.discard("kv_cache")

    def _replace(self, change: Callable[[], None]) -> None:
        self._use_threads(True)
        self.runner.synchronize()
        change()  # in place: the runner and its graphs stay valid
        self._return_memory()

    def apply(self, function: Callable[[Any], T]) -> list[T]:
        if self.weights.decoder is None:
            raise weights_asleep("apply_model")
        self.runner.synchronize()
        return [function(self.weights.decoder)]

    def _use_threads_for(self, num_tokens: int, context_len: int) -> None:
        context_bytes = context_len * self._kv_bytes_per_token
        self._use_threads(is_large_step(self._weight_bytes, self._num_layers, num_tokens, context_bytes))

    def _use_threads(self, all_of_them: bool) -> None:
        if self._max_threads:
            self._accelerator.use_threads(self._max_threads if all_of_them else 1)

    def _return_memory(self) -> None:
        self._accelerator.release()
        return_freed_memory()

    def free(self) -> None:
        self._drop_profile()
        accelerator: Accelerator | None = vars(self).get("_accelerator")  # None if it was not found
        vars(self).clear()
        if accelerator is not None:
            with contextlib.suppress(Exception):  # a lost device gives nothing back while the process lives
                accelerator.close()


def _run_foreign(job: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a job that is no step: it may call foreign code, and may be asked to stop."""
    try:
        return job(*args)
    except LoadStopped as error:
        raise DeviceLost(CLOSED) from error
    except Exception:
        raise
    except BaseException as error:  # a SystemExit that went on would end the loop
        raise RuntimeError(f"a function that was called in the device thread raised {describe(error)}") from error


def _find_accelerator(config: EngineConfig, folder: ModelFolder | None, should_stop: Callable[[], bool]) -> Accelerator:
    """The device that ``config.device`` names; "auto" is the CPU if there is no GPU, or no Triton.

    Raises:
        ConfigError: there is no such GPU, or Triton is missing; and as `_host`.
        LoadStopped: ``should_stop`` returned True.
    """
    device = config.device
    found = find_cuda(device)
    if found is None:
        return _host(config, folder)
    try:
        from aioengine.kernels.triton import triton_operations
    except ImportError as error:
        if device == "auto":
            logger.warning("there is a GPU, and no Triton to compute on it (%s): the model runs on the CPU", error)
            return _host(config, folder)
        raise ConfigError(
            f"device={device!r} needs Triton, which a torch for CUDA brings ({error}); device='cpu' does not"
        ) from error
    dtype: torch.dtype = read_model_config(folder, config).dtype if folder is not None else torch.float32

    def check_stopped() -> None:
        if should_stop():
            raise LoadStopped

    faulty = find_faulty(found, dtype, check_stopped=check_stopped)
    return CudaAccelerator(found, triton_operations(faulty))


def _host(config: EngineConfig, folder: ModelFolder | None) -> HostAccelerator:
    """The host's accelerator, with plain torch until the native kernels are compiled: some seconds, once a machine.

    Args:
        folder: of the model to be loaded; None: its dtype is ``config``'s, or float32.
    Raises:
        ModelLoadError, ConfigError: as `read_model_config`.
    """
    dtype: str = config.dtype if config.dtype != "auto" else "float32"
    quantization: str | None = config.quantization
    if folder is not None:
        quantization = quantization or ("coded" if is_quantised(folder) else None)
        model = read_model_config(folder, config)
        dtype = str(model.dtype).removeprefix("torch.")
        if not has_kernels(model.num_heads, model.num_kv_heads, model.head_dim):
            logger.warning("there are no native kernels for this model's heads, so that steps are slow")
            return HostAccelerator()
    accelerator = HostAccelerator(num_threads=num_usable_threads(), parts=parts_of(dtype, quantization))
    accelerator.operations = accelerator.newer_operations() or accelerator.operations
    return accelerator


def is_large_step(weight_bytes: int, num_layers: int, num_tokens: int, context_bytes: int) -> bool:
    """Whether a step's operations are long enough for more than one thread: by a layer's work, in bytes to be read.

    torch's threads wait for each other at the end of each operation, which takes a microsecond. If another process
    holds a core, they wait for its thread: the bundled model is then 1.3 to 1.5 times as fast with one thread. Native
    threads only wait for chunks that have begun.

    Args:
        weight_bytes: of all parameters; a product with 16 tokens takes as long as reading its weights.
        context_bytes: of the keys and values that the step's rows attend to; they are scattered, so that reading a byte
            takes as long as reading 4 bytes of weights.
    """
    return weight_bytes * (1 + num_tokens / 16) + 4 * context_bytes > num_layers * LARGE_LAYER_BYTES
