"""The engine core in this process, on this loop: files, executor and core, opened and closed."""

from __future__ import annotations

import logging
import time
from asyncio import AbstractEventLoop, get_running_loop
from asyncio import Future as AsyncioFuture
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aioengine.config import EngineConfig
from aioengine.core.engine_core import EngineCore
from aioengine.core.executor_makers import EXECUTOR_MAKERS
from aioengine.core.executor_protocol import Executor, ExecutorInfo
from aioengine.core.grammars import Grammars
from aioengine.core.named_functions import load_processors
from aioengine.core.protocol import CoreHooks
from aioengine.errors import ConfigError
from aioengine.models.folder import ModelFolder
from aioengine.processes.plugins import call_plugins
from aioengine.processes.progress import OnProgress
from aioengine.processes.worker_threads import TextWorker, run_abandonable
from aioengine.scheduler.policy import make_policy

logger = logging.getLogger("aioengine")

T = TypeVar("T")


class InProcess:
    """A `Backend` whose core lives here.

    Args:
        config: the engine's.
        executor: used instead of a torch executor of its own, if given, and closed like that.
    """

    core: EngineCore
    cluster = None

    def __init__(self, config: EngineConfig, executor: Executor | None, hooks: CoreHooks) -> None:
        self._config = config
        self._executor = executor
        self._hooks = hooks
        self._grammars: Grammars | None = None

    async def find_model(self) -> ModelFolder:
        await self._hooks.worker.run(call_plugins, None)
        has_weights = self._config.load_format != "dummy"
        self._files = await find(self._config, self._hooks.worker, with_weights=has_weights)
        return self._files

    async def open(self, on_progress: OnProgress | None = None) -> None:
        policy = await self._hooks.worker.run(make_policy, None, self._config.scheduler)
        processors = await self._hooks.worker.run(load_processors, None, self._config.logits_processors)
        if self._executor is None:
            # Importing torch takes a second: not on the loop.
            start = await self._hooks.worker.run(EXECUTOR_MAKERS["torch"], None)
            self._executor = await start(self._files, self._config, on_progress=on_progress)
            assert self._executor is not None
        elif use_model := getattr(self._executor, "use_model", None):
            await self._hooks.worker.run(use_model, None, self._files)
        _check_room(self._executor.info, self._config)
        info = self._executor.info
        eos_token_ids = await self._hooks.worker.run(lambda: self._files.eos_token_ids, None)
        self._grammars = Grammars(self._files, info.vocab_size, eos_token_ids)
        self.core = EngineCore(
            self._executor,
            self._config,
            policy=policy,
            processors=processors,
            grammars=self._grammars,
            eos_token_ids=eos_token_ids,
            on_capacity=self._hooks.on_capacity,
            write_dump=self._write_dump,
            clock=clock_of(get_running_loop()),
        )

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        assert self._executor is not None
        return await self.core.at_device("apply_model", self._executor.apply_model(function))

    async def aclose(self) -> None:
        try:
            if self._grammars is not None:
                await self._grammars.aclose()
        finally:
            if self._executor is not None:
                await self._executor.aclose()

    def kill(self) -> None:
        """There is no process."""

    def abandon(self) -> None:
        """The device thread sees for itself that its loop is gone."""

    def _write_dump(self, text: str) -> None:
        """Begin to write a report into ``dump_dir``, if there is one; `aclose` waits for it."""
        if self._config.dump_dir is not None:
            folder = Path(self._config.dump_dir)
            written = self._hooks.dump_worker.begin(lambda: write_dump(folder, text))
            written.add_done_callback(_log_dump)


async def find(config: EngineConfig, worker: TextWorker, *, with_weights: bool) -> ModelFolder:
    """Resolve a model's folder, in a thread."""
    resolve = partial(
        ModelFolder.resolve,
        config.model,
        revision=config.revision,
        with_weights=with_weights,
        with_code=config.trust_remote_code,
    )
    is_here = config.model is None or await worker.run(Path(config.model).exists, None)
    # A download cannot be stopped; a cancelled start, or Ctrl-C, must not wait for gigabytes.
    return await (worker.run(resolve, None) if is_here else run_abandonable(resolve))


def clock_of(loop: AbstractEventLoop) -> Callable[[], float]:
    """The clock of executors on this loop: a virtual loop's own, else the real one.

    Not ``loop.time``: uvloop's stands still during a turn, and counts whole milliseconds.
    """
    return loop.time if hasattr(loop, "outside_work") else time.monotonic


def write_dump(folder: Path, text: str) -> Path:
    """Write a report as a file of its own into ``folder``, which is made if it is missing; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"aioengine-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**9:09d}.json"
    path.write_text(text)
    return path


def _log_dump(written: AsyncioFuture[Path]) -> None:
    if written.cancelled():
        return
    error = written.exception()
    if error is not None:
        logger.error("the report of the failed step could not be written: %s", error)
    else:
        logger.error("the report of the failed step is in %s", written.result())


def _check_room(info: ExecutorInfo, config: EngineConfig) -> None:
    """Refuse a KV cache in which the longest sequence would wait for ever; its last token is never computed."""
    needed = info.most_held(info.max_model_len - 1, config.max_num_batched_tokens)
    for num_blocks, num_needed in zip(info.pool_blocks, needed, strict=True):
        if num_blocks < num_needed:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks of {info.block_size} tokens, and one sequence of "
                f"max_model_len={info.max_model_len} may need {num_needed}: lower max_model_len, or give the cache "
                "more memory (kv_cache_memory_bytes, memory_utilization)"
            )
