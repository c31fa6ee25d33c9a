"""What is bounded when replicas die: restarts, attempts, and how long a request waits for one; and what can be done
with a request that waits so."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest
from cluster.harness import DEADLINE_S, Reader, cluster, outputs_of, reading, unaffected, undisturbed, until_read
from cluster.mortal import Faults

from aioengine import EngineDead, EngineOverloaded

pytestmark = pytest.mark.usefixtures("faults", "quiet_log")


@pytest.mark.nightly
async def test_a_replica_that_cannot_restart_is_given_up_and_others_go_on(faults: Faults) -> None:
    readers = unaffected(random.Random(1), 12, max_tokens=100)
    expected = await undisturbed(readers)
    async with cluster(2, max_restarts=2) as replicas:
        faults.let_no_start_succeed()
        async with reading(replicas.engine, readers):
            await until_read(readers, 3)
            replicas.kill(0)
        assert outputs_of(readers) == expected
        await replicas.until_in_state("failed", 1)
        (failed,) = [status for status in replicas.engine.replicas() if status.rank == 0]
        assert "shard 3 of 7 is damaged" in failed.reason
        assert replicas.engine.health().status == "ALIVE"
        late = unaffected(random.Random(2), 4)
        async with reading(replicas.engine, late):
            pass
        assert outputs_of(late) == await undisturbed(late)


async def test_requests_hear_why_none_is_left(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    readers = unaffected(random.Random(1), 12, max_tokens=100)
    async with cluster(2, max_restarts=1) as replicas:
        faults.let_no_start_succeed()
        async with reading(replicas.engine, readers):
            await until_read(readers, 3)
            for rank in (0, 1):
                replicas.kill(rank)
        for reader in readers:
            assert isinstance(reader.error, EngineDead)
            assert "shard 3 of 7 is damaged" in str(reader.error)
        with pytest.raises(EngineDead, match="shard 3 of 7 is damaged"):
            await replicas.engine.generate([10, 11, 12])
        assert replicas.engine.health().status == "DEAD"
        statuses = replicas.engine.replicas()
        assert [status.state for status in statuses] == ["failed", "failed"]
        assert all("shard 3 of 7 is damaged" in status.reason for status in statuses)
    deaths = [message for message in caplog.messages if "was killed by SIGKILL" in message]
    assert sorted(message[:9] for message in deaths) == ["engine 0 ", "engine 1 ", "replica 0", "replica 1"]
    assert not any("last words" in message for message in deaths)


@pytest.mark.nightly
async def test_a_request_waits_so_long_and_not_longer(faults: Faults) -> None:
    readers = unaffected(random.Random(1), 4, max_tokens=100)
    async with cluster(1, recover_timeout_s=0.3) as replicas:
        faults.hold_starts()
        async with reading(replicas.engine, readers):
            await until_read(readers, 3)
            replicas.kill(0)
        for reader in readers:
            assert isinstance(reader.error, EngineDead | EngineOverloaded), reader.error
            assert "recover_timeout_s" in str(reader.error)
            assert reader.num_tokens >= 3, "what had come was read"
        faults.release_starts()
        await replicas.until_serving(1)
        late = unaffected(random.Random(2), 2)
        async with reading(replicas.engine, late):
            pass
        assert outputs_of(late) == await undisturbed(late)


# Pending: their replica is dead, and no other is there yet


async def test_one_is_left_aborted_or_cancelled_while_pending_and_others_go_on(faults: Faults) -> None:
    readers = unaffected(random.Random(3), 4, max_tokens=60)
    expected = await undisturbed(readers)
    async with cluster(1) as replicas, anyio.create_task_group() as tasks, reading(replicas.engine, readers):
        engine = replicas.engine
        async with (
            engine.stream([50, 51], max_tokens=100, ignore_eos=True) as left,
            engine.stream([60, 61], max_tokens=100, ignore_eos=True) as aborted,
        ):
            cancelled = Reader([70, 71], max_tokens=100)
            scope = anyio.CancelScope()

            async def read_cancelled() -> None:
                with scope:
                    await cancelled.read(engine)

            tasks.start_soon(read_cancelled)
            await until_read([*readers, cancelled], 3)
            faults.hold_starts()
            await replicas.kill_and_wait(0)
            aborted.abort()
            output = await aborted.finish()  # at once
            assert output.outputs[0].finish_reason == "abort"
            scope.cancel()
        assert left.result.outputs[0].finish_reason == "abort"
        faults.release_starts()
    assert outputs_of(readers) == expected
    assert not cancelled.has_ended


@pytest.mark.nightly
async def test_all_are_aborted_while_pending(faults: Faults) -> None:
    readers = unaffected(random.Random(4), 6, max_tokens=100)
    async with cluster(1) as replicas:
        async with reading(replicas.engine, readers):
            await until_read(readers, 3)
            faults.hold_starts()
            await replicas.kill_and_wait(0)
            replicas.engine.abort_all()
        for reader in readers:
            assert reader.output is not None
            assert reader.output.outputs[0].finish_reason == "abort"
        faults.release_starts()


@pytest.mark.nightly
async def test_closing_while_pending_ends_all_with_a_word(faults: Faults) -> None:
    readers = unaffected(random.Random(5), 6, max_tokens=100)
    async with anyio.create_task_group() as tasks, cluster(1, stop_timeout_s=0.2) as replicas:
        for reader in readers:
            tasks.start_soon(reader.read, replicas.engine)
        await until_read(readers, 3)
        faults.hold_starts()
        await replicas.kill_and_wait(0)
    assert [type(reader.error).__name__ for reader in readers] == ["EngineClosed"] * 6


@pytest.mark.nightly
async def test_draining_waits_for_those_while_pending(faults: Faults) -> None:
    readers = unaffected(random.Random(6), 6, max_tokens=100)
    expected = await undisturbed(readers)
    with anyio.fail_after(DEADLINE_S):
        async with cluster(2) as replicas, anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.read, replicas.engine)
            await until_read(readers, 3)
            faults.hold_starts()
            for rank in (0, 1):
                replicas.kill(rank)
            await replicas.until_serving(0)
            async with anyio.create_task_group() as closing:

                async def close() -> None:
                    await replicas.engine.aclose(drain=True)

                closing.start_soon(close)
                await asyncio.sleep(0)
                faults.release_starts()
    assert outputs_of(readers) == expected
