"""An executor of the bundled model in a process of its own: plans go in as bytes, tokens come out.

``python far_device.py`` is that process. A message is its length, as 8 bytes, and its bytes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo, ExecutorStats
from aioengine.core.grammars import Grammars
from aioengine.models.folder import DEMO_MODEL, ModelFolder
from aioengine.scheduler.plan import Handles, StepPlan, StepResult, decode_plan, encode_plan, int32


class Brought(msgspec.Struct):
    """A `StepResult` of tokens alone."""

    offsets: list[int]
    token_ids: list[int]
    forced: dict[int, list[int]]


class FarStep:
    is_done = False

    def __init__(self, executor: FarExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._step = plan.step

    async def finish(self) -> StepResult:
        brought = msgspec.msgpack.decode(await self._executor.read(), type=Brought)
        return StepResult(
            step=self._step,
            offsets=int32(brought.offsets),
            token_ids=int32(brought.token_ids),
            forced=brought.forced,
        )


class FarExecutor:
    """An `Executor` of steps alone, in another process.

    Attributes:
        num_bytes: of all plans.
    """

    info: ExecutorInfo
    _process: asyncio.subprocess.Process

    def __init__(self) -> None:
        self.stats = ExecutorStats()
        self.handles = Handles()
        self.num_bytes = 0

    async def start(self, config: EngineConfig) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, __file__, stdin=pipe, stdout=pipe)
        self._write(msgspec.msgpack.encode(config))
        self.info = msgspec.msgpack.decode(await self.read(), type=ExecutorInfo)

    def launch(self, plan: StepPlan) -> FarStep:
        message = encode_plan(plan)
        self.num_bytes += len(message)
        self._write(message)
        return FarStep(self, plan)

    def _write(self, message: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(message).to_bytes(8, "little") + message)

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        length = int.from_bytes(await self._process.stdout.readexactly(8), "little")
        return await self._process.stdout.readexactly(length)

    async def aclose(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await self._process.wait() == 0


def read() -> bytes:
    """A message of the parent's; empty at the end."""
    length = int.from_bytes(sys.stdin.buffer.read(8), "little")
    return sys.stdin.buffer.read(length)


def write(value: Any) -> None:
    message = msgspec.msgpack.encode(value)
    sys.stdout.buffer.write(len(message).to_bytes(8, "little") + message)
    sys.stdout.buffer.flush()


async def main() -> None:
    from aioengine.executor.torch_executor import TorchExecutor

    config = msgspec.msgpack.decode(read(), type=EngineConfig)
    folder = ModelFolder.read(Path(DEMO_MODEL))
    executor = await TorchExecutor.start(folder, config)
    grammars = Grammars(folder, executor.info.vocab_size, folder.eos_token_ids)
    executor.handles.compile_grammar = grammars.compile
    write(executor.info)
    while message := read():
        result = await executor.launch(decode_plan(message)).finish()
        assert not result.failures, result.failures
        forced = {index: list(token_ids) for index, token_ids in result.forced.items()}
        write(Brought(result.offsets.tolist(), result.token_ids.tolist(), forced))
    await executor.aclose()
    await grammars.aclose()


if __name__ == "__main__":
    asyncio.run(main())
