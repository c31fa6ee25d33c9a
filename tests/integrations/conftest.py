"""Engines with clients of theirs in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import openai
from openai import AsyncOpenAI
from waiting import turns, until

from aioengine import Engine
from aioengine.frontend.runtime import Runtime
from aioengine.integrations.openai_client import HTTP
from doubles.fake_executor import FakeExecutor

IDS = [5, 6, 7]
CUT_OFF = (openai.APIConnectionError, HTTP.RemoteProtocolError)
TOO_LATE = (openai.APITimeoutError, HTTP.ReadTimeout)
"""What a stream raises that ends amid its answer, or stands still: openai 2 leaves the HTTP library's errors alone."""


class InProcess(NamedTuple):
    """A fake engine and a client of it."""

    engine: Engine
    executor: FakeExecutor
    client: AsyncOpenAI

    @property
    def runtime(self) -> Runtime:
        assert self.engine._runtime is not None
        return self.engine._runtime

    @property
    def num_steps(self) -> int:
        return len(self.executor.plans)

    @property
    def num_registered(self) -> int:
        """Requests that the engine knows, in whatever stage."""
        return len(self.runtime.admission.requests)

    @property
    def num_tasks(self) -> int:
        """Those that serve clients in this process."""
        return len(self.runtime._side_tasks)

    @property
    def is_idle(self) -> bool:
        """The engine knows of nothing, holds no memory, and no task serves anything."""
        stats = self.runtime.core.stats()
        return (
            not (self.num_registered or self.num_tasks)
            and (stats.running, stats.waiting, stats.blocked) == (0, 0, 0)
            and stats.free_blocks == stats.num_blocks
        )

    async def step(self, count: int = 1) -> None:
        """Let a manual device end so many steps, each with a next one launched behind it."""
        for _ in range(count):
            num_next = self.num_steps + 1
            self.executor.complete()
            await until(lambda num_next=num_next: self.num_steps >= num_next)

    async def assert_aborted_at_once(self) -> None:
        """The engine forgets all requests while a manual device is still at its step, and computes no other one."""
        num_steps = self.num_steps
        await until(lambda: not self.num_registered)
        assert self.num_steps == num_steps, "the engine learned of it only after a step"
        for step in self.executor.unfinished:
            step.complete()
        await turns(100)
        assert self.num_steps == num_steps
        assert self.is_idle


@contextlib.asynccontextmanager
async def in_process(
    *,
    is_manual: bool = False,
    step_time_s: float = 0.0,
    max_model_len: int = 256,
    num_blocks: int = 1024,
    client: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[InProcess]:
    """An engine with a fake device and the bundled model's tokenizer, and a client that tries nothing twice."""
    executor = FakeExecutor(
        vocab_size=2048,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        is_manual=is_manual,
        step_time_s=step_time_s,
    )
    async with Engine(seed=1, executor=executor, **config) as engine:
        made = engine.openai_client(**{"max_retries": 0, **(client or {})})
        made._platform = "Linux"  # else the first request finds it out in a thread
        yield InProcess(engine, executor, made)


def completion(**fields: Any) -> dict[str, Any]:
    """The keywords of a completion that ends by its length alone."""
    return {"prompt": IDS, "max_tokens": 100, "extra_body": {"ignore_eos": True, "seed": 7}, **fields}


async def read(stream: AsyncIterator[Any]) -> str:
    """The text of a completion's stream."""
    return "".join([chunk.choices[0].text async for chunk in stream])
