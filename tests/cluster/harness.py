"""A cluster whose replicas die, and requests that are read while they do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import anyio
from cluster.mortal import EXECUTOR, FIRST_ID, LAST_ID, Mortal

from aioengine import AioEngineError, CompletionDelta, Engine, EngineConfig, ProcessOptions, RequestOutput, Stream
from aioengine.config import ReplicaOptions
from aioengine.outputs import TokenLogprobs

DEADLINE_S = 180.0
"""Of waits that take seconds at most: a busy machine fails no test."""

CONFIG: dict[str, Any] = {
    "heartbeat_interval_s": 0.05,
    "heartbeat_timeout_s": 1.0,
    "log_stats_interval_s": 0.0,
    "show_progress": False,
}


class Cluster:
    """A started engine with replicas, and their processes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ranks(self, state: str = "serving") -> list[int]:
        return [status.rank for status in self.engine.replicas() if status.state == state]

    def pid(self, rank: int) -> int:
        """Of its process, which `ReplicaStatus.where` names."""
        where = next(status.where for status in self.engine.replicas() if status.rank == rank)
        return int(where.rpartition(" ")[2])

    def kill(self, rank: int, number: int = signal.SIGKILL) -> int:
        """Returns the pid that got the signal."""
        pid = self.pid(rank)
        os.kill(pid, number)
        return pid

    def kill_pid(self, pid: int) -> None:
        """One that may have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def num_restarts(self) -> int:
        return sum(status.num_restarts for status in self.engine.replicas())

    async def until_serving(self, num_replicas: int) -> None:
        await self.until_in_state("serving", num_replicas)

    async def kill_and_wait(self, rank: int) -> None:
        """Kill it, and wait until the cluster knows."""
        self.kill(rank)
        await self.until(lambda: rank not in self.ranks())

    async def until_in_state(self, state: str, num_replicas: int) -> None:
        await self.until(lambda: len(self.ranks(state)) == num_replicas)

    async def until_serving_at_least(self, num_replicas: int) -> None:
        await self.until(lambda: len(self.ranks()) >= num_replicas)

    async def until_restarted(self, num_restarts: int, num_replicas: int) -> None:
        """Wait until so many have been started anew, and all serve."""
        await self.until(lambda: self.num_restarts() >= num_restarts and len(self.ranks()) == num_replicas)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so of the replicas; their core checks that when one has another state."""
        assert self.engine._runtime is not None
        core = self.engine._runtime.core
        with anyio.fail_after(DEADLINE_S):
            await core.when(is_so)
        assert is_so(), f"the cluster has ended: {core.health()}"


@contextlib.asynccontextmanager
async def cluster(num_replicas: int, *, executor: str | None = EXECUTOR, **given: Any) -> AsyncIterator[Cluster]:
    """``given``: fields of `ReplicaOptions`, `ProcessOptions` and `EngineConfig`."""
    of_replicas = {name: given.pop(name) for name in ReplicaOptions.__struct_fields__ if name in given}
    of_process = {name: given.pop(name) for name in ProcessOptions.__struct_fields__ if name in given}
    options = ReplicaOptions(replicas=num_replicas, **{"restart_backoff_s": 0.01, **of_replicas})
    process = ProcessOptions(executor=executor, **{"stop_timeout_s": 5.0, **of_process})
    async with Engine(replicas=options, process=process, **{**CONFIG, **given}) as engine:
        yield Cluster(engine)


class Reader:
    """One request, read as it comes.

    Attributes:
        deltas: what has come.
        gaps_s: between the times at which it was handed something.
        output, error: how it has ended; both None while it lives.
    """

    def __init__(self, prompt: Any, **sampling: Any) -> None:
        self.prompt = prompt
        self.sampling = {"max_tokens": 60, "ignore_eos": True, "seed": 1, **sampling}
        self.deltas: list[CompletionDelta] = []
        self.gaps_s: list[float] = []
        self.output: RequestOutput | None = None
        self.error: AioEngineError | None = None
        self.news = asyncio.Event()
        """Set with each delta, and with the end."""
        self.may_read = asyncio.Event()
        self.may_read.set()
        """Clear it, and nothing is read from the next delta on."""
        self.stream: Stream | None = None
        self._came_at = 0.0

    async def on_delta(self) -> None:
        """Called for each; for others to wait in."""
        await self.may_read.wait()

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    @property
    def has_ended(self) -> bool:
        return self.output is not None or self.error is not None

    async def read(self, engine: Engine) -> None:
        self._came_at = time.monotonic()
        try:
            async with engine.stream(self.prompt, **self.sampling) as stream:
                self.stream = stream
                async for delta in stream:
                    now = time.monotonic()
                    self.gaps_s.append(now - self._came_at)
                    self._came_at = now
                    self.deltas.append(delta)
                    self.news.set()
                    await self.on_delta()
                output = await stream.finish()
        except AioEngineError as error:
            self.error = error
        else:
            check_deltas(self.deltas, output)
            self.output = output
        finally:
            self.news.set()


def check_deltas(deltas: Iterable[CompletionDelta], output: RequestOutput) -> None:
    """What was read piece by piece is the whole: nothing twice, nothing missing, and each choice ended once."""
    for completion in output.outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
        assert "".join(delta.text for delta in mine) == completion.text
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == [completion.finish_reason]
        if completion.logprobs is not None:
            assert [entry for delta in mine for entry in delta.logprobs or ()] == completion.logprobs


def brought(output: RequestOutput) -> dict[str, Any]:
    """What has to be the same as in an undisturbed run."""
    choices = [
        (each.index, each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
        for each in output.outputs
    ]
    return {"choices": choices, "prompt_logprobs": output.prompt_logprobs}


def is_alike(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """The same, but for log-probabilities: those are of sums in another order where other rows were beside it."""
    if found == expected:
        return True
    for mine, its in zip(found["choices"], expected["choices"], strict=True):
        if mine[:-1] != its[:-1]:
            return False
        for one, other in zip(mine[-1] or (), its[-1] or (), strict=True):
            if not _are_near(one, other):
                return False
    prompts = (found["prompt_logprobs"] or (), expected["prompt_logprobs"] or ())
    return all(one == other or _are_near(one, other) for one, other in zip(*prompts, strict=True))


def _are_near(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    """Of one position; where two tokens are as likely, the other one may be among those reported."""
    shared = one.keys() & other.keys()
    return len(shared) >= len(one) - 1 and all(abs(one[key].logprob - other[key].logprob) < 1e-3 for key in shared)


async def undisturbed(readers: Iterable[Reader], **config: Any) -> list[dict[str, Any]]:
    """What these requests bring at one engine that lives, in this process."""
    config = {**CONFIG, **config}
    async with Engine(executor=Mortal(EngineConfig(**config), is_mortal=False), **config) as engine:
        outputs = await asyncio.gather(*(engine.generate(each.prompt, **plain(each.sampling)) for each in readers))
    return [brought(output) for output in outputs]


def plain(sampling: dict[str, Any]) -> dict[str, Any]:
    """What of these `Engine.generate` takes, too."""
    return {name: value for name, value in sampling.items() if name not in ("max_unread_tokens", "stream_interval")}


@contextlib.asynccontextmanager
async def reading(engine: Engine, readers: Iterable[Reader]) -> AsyncIterator[None]:
    """All are read meanwhile; at the block's end, until they have ended."""
    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.read, engine)
            yield


async def until_read(readers: Iterable[Reader], num_tokens: int) -> None:
    """Wait until each has so many tokens."""
    with anyio.fail_after(DEADLINE_S):
        for reader in readers:
            while reader.num_tokens < num_tokens and not reader.has_ended:
                reader.news.clear()
                await reader.news.wait()


def outputs_of(readers: Iterable[Reader]) -> list[dict[str, Any]]:
    """What they have brought. Fails where one has not ended well."""
    outputs = []
    for reader in readers:
        if reader.error is not None:
            raise reader.error
        assert reader.output is not None, f"{reader.prompt} has not ended"
        outputs.append(brought(reader.output))
    return outputs


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Of unaffected, some with common beginnings."""
    heads = [[rng.randint(FIRST_ID, LAST_ID) for _ in range(40)] for _ in range(3)]
    return [
        rng.choice(heads)[: rng.choice([0, 16, 40])]
        + [rng.randint(FIRST_ID, LAST_ID) for _ in range(rng.randint(2, 30))]
        for _ in range(count)
    ]


def unaffected(rng: random.Random, count: int, **sampling: Any) -> list[Reader]:
    """Greedy and seeded ones in turn."""
    return [
        Reader(prompt, seed=number, temperature=float(number % 2), **sampling)
        for number, prompt in enumerate(prompts(rng, count))
    ]
