"""What is done to a cluster on purpose, under load and while its replicas die: scaled, restarted, paused, put to sleep,
given other weights, drained."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from cluster.harness import Cluster, Reader, cluster, outputs_of, reading, unaffected, undisturbed, until_read
from cluster.mortal import NUM_BLOCKS, Faults
from nightly import nightly

from aioengine.transport import backends

pytestmark = pytest.mark.usefixtures("faults", "quiet_log")


@pytest.mark.parametrize("drain_timeout_s", [0.0, *nightly(30.0)])
async def test_a_rolling_restart_under_load_disturbs_no_request(drain_timeout_s: float) -> None:
    """Those that run may end where they are, or are moved at once."""
    readers = unaffected(random.Random(1), 30, max_tokens=150)
    expected = await undisturbed(readers)
    async with cluster(3, drain_timeout_s=drain_timeout_s) as replicas:
        before = {rank: replicas.pid(rank) for rank in replicas.ranks()}
        async with reading(replicas.engine, readers):
            await until_read(readers, 3)
            await replicas.engine.restart_replicas()
            late = unaffected(random.Random(2), 6)
            async with reading(replicas.engine, late):
                pass
        after = {rank: replicas.pid(rank) for rank in replicas.ranks()}
        assert before.keys() == after.keys()
        assert not set(before.values()) & set(after.values())
    assert outputs_of(readers) == expected
    assert outputs_of(late) == await undisturbed(late)


@pytest.mark.nightly
async def test_replicas_are_added_and_removed_under_load() -> None:
    readers = unaffected(random.Random(3), 30, max_tokens=200)
    expected = await undisturbed(readers)
    async with cluster(1, drain_timeout_s=0.05) as replicas, reading(replicas.engine, readers):
        await until_read(readers, 3)
        await replicas.engine.scale(3)
        assert len(replicas.ranks()) == 3
        assert replicas.engine.info.num_blocks == 3 * NUM_BLOCKS
        late = unaffected(random.Random(4), 12, max_tokens=100)
        async with reading(replicas.engine, late):
            await until_read(late, 3)
            await replicas.engine.scale(1)
        assert len(replicas.ranks()) == 1
        assert replicas.engine.info.num_blocks == NUM_BLOCKS
    assert outputs_of(readers) == expected
    assert outputs_of(late) == await undisturbed(late)


@pytest.mark.nightly
async def test_a_replica_dies_while_it_is_drained() -> None:
    readers = unaffected(random.Random(5), 20, max_tokens=150)
    expected = await undisturbed(readers)
    async with cluster(3) as replicas, reading(replicas.engine, readers), anyio.create_task_group() as tasks:
        await until_read(readers, 3)
        pid_of = {rank: replicas.pid(rank) for rank in replicas.ranks()}
        tasks.start_soon(replicas.engine.scale, 2)
        await replicas.until_serving(2)
        (drained,) = pid_of.keys() - set(replicas.ranks())
        replicas.kill_pid(pid_of[drained])
    assert outputs_of(readers) == expected


@pytest.mark.nightly
async def test_one_that_dies_while_paused_goes_on_after_the_pause() -> None:
    readers = unaffected(random.Random(6), 12, max_tokens=80)
    expected = await undisturbed(readers)
    async with cluster(2) as replicas, reading(replicas.engine, readers):
        await until_read(readers, 3)
        await replicas.engine.pause(mode="keep")
        nums = [reader.num_tokens for reader in readers]
        replicas.kill(0)
        await replicas.until_restarted(1, 2)
        assert [reader.num_tokens for reader in readers] == nums, "a replica that restarts is paused, too"
        await replicas.engine.resume()
    assert outputs_of(readers) == expected


@pytest.mark.nightly
async def test_one_that_dies_asleep_wakes_up_with_the_others() -> None:
    readers = unaffected(random.Random(7), 12, max_tokens=80)
    expected = await undisturbed(readers)
    async with cluster(2) as replicas, reading(replicas.engine, readers):
        await until_read(readers, 3)
        await replicas.engine.sleep(1, mode="keep")
        replicas.kill(0)
        await replicas.until_restarted(1, 2)
        await replicas.engine.wake_up()
    assert outputs_of(readers) == expected


@pytest.mark.nightly
async def test_one_that_restarts_has_the_weights_of_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "newer"
    folder.mkdir()
    async with cluster(2) as replicas:
        await replicas.engine.update_weights(folder)
        version = await weights_of(replicas)
        assert len(version) == 1
        reader = Reader([10, 11, 12, 13])
        async with reading(replicas.engine, [reader]):
            pass
        for number, rank in enumerate((0, 1), 1):
            replicas.kill(rank)
            await replicas.until_restarted(number, 2)
            assert await weights_of(replicas) == version
            again = Reader(reader.prompt)
            async with reading(replicas.engine, [again]):
                pass
            assert outputs_of([again]) == outputs_of([reader])


async def weights_of(replicas: Cluster) -> set[int]:
    return set(await replicas.engine.collective_rpc("mortal.weights"))


@pytest.mark.nightly
async def test_draining_ends_well_though_replicas_die(faults: Faults) -> None:
    readers = unaffected(random.Random(8), 20, max_tokens=150)
    expected = await undisturbed(readers)
    async with cluster(3) as replicas, anyio.create_task_group() as tasks:
        for reader in readers:
            tasks.start_soon(reader.read, replicas.engine)
        await until_read(readers, 3)
        pids = [replicas.pid(rank) for rank in (0, 1)]
        async with anyio.create_task_group() as closing:

            async def close() -> None:
                await replicas.engine.aclose(drain=True)

            closing.start_soon(close)
            for num_tokens, pid in enumerate(pids):
                await until_read(readers, 10 + 10 * num_tokens)
                replicas.kill_pid(pid)
    assert outputs_of(readers) == expected


@pytest.mark.nightly
async def test_all_are_restarted_while_one_is_starting_after_its_death(faults: Faults) -> None:
    readers = unaffected(random.Random(9), 6, max_tokens=100)
    expected = await undisturbed(readers)
    async with cluster(2) as replicas, reading(replicas.engine, readers), anyio.create_task_group() as tasks:
        await until_read(readers, 3)
        faults.hold_starts()
        replicas.kill(0)
        await replicas.until_in_state("starting", 1)
        tasks.start_soon(replicas.engine.restart_replicas)
        await anyio.lowlevel.checkpoint()
        faults.release_starts()
        await replicas.until(lambda: replicas.num_restarts() >= 2 and len(replicas.ranks()) == 2)
    assert outputs_of(readers) == expected


async def test_one_that_is_stopped_while_it_starts_is_started_again(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said HELLO and then nothing, for longer than ``stall_timeout_s``."""
    monkeypatch.setattr(backends, "MIN_SILENCE_S", 0.5)
    async with cluster(1, stall_timeout_s=0.5, max_restarts=100) as replicas:
        faults.stop_next_start()
        replicas.kill(0)
        await replicas.until_restarted(2, 1)
        assert not replicas.engine.replicas()[0].reason
        await replicas.engine.generate([10, 11, 12], max_tokens=2)


@pytest.mark.nightly
async def test_a_scaling_that_is_cancelled_can_be_made_again() -> None:
    async with cluster(2) as replicas:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replicas.engine.scale, 1)
                await replicas.until_in_state("draining", 1)
                scope.cancel()
        await replicas.engine.scale(2)
        await replicas.until_serving(2)
        await replicas.engine.restart_replicas()
        await replicas.engine.generate([10, 11, 12], max_tokens=2)


@pytest.mark.nightly
async def test_scaling_down_to_one_that_was_given_up_starts_that_again(faults: Faults) -> None:
    async with cluster(2, max_restarts=0) as replicas:
        faults.let_no_start_succeed()
        replicas.kill(0)
        await replicas.until_in_state("failed", 1)
        faults.let_starts_succeed()
        await replicas.engine.scale(1)
        assert replicas.ranks() == [0]
        await replicas.engine.generate([10, 11, 12], max_tokens=2)


@pytest.mark.nightly
async def test_what_all_are_asked_waits_for_one_that_lives() -> None:
    async with cluster(1) as replicas:
        await replicas.kill_and_wait(0)
        await replicas.engine.pause()
        assert replicas.ranks() == [0]
        await replicas.engine.resume()
        await replicas.engine.generate([10, 11, 12], max_tokens=2)


@pytest.mark.nightly
async def test_one_that_dies_after_it_was_woken_part_by_part_serves() -> None:
    async with cluster(1) as replicas:
        await replicas.engine.sleep(1)
        await replicas.engine.wake_up(["weights"])
        await replicas.engine.wake_up(["kv_cache"])
        replicas.kill(0)
        await replicas.until_restarted(1, 1)
        await replicas.engine.generate([10, 11, 12], max_tokens=2)


@pytest.mark.nightly
async def test_prefixes_and_sessions_are_forgotten_with_the_caches() -> None:
    async with cluster(2) as replicas:
        balancer = replicas.engine._runtime.core.placing.balancer  # type: ignore[union-attr, attr-defined]
        await replicas.engine.generate([*range(10, 100)], max_tokens=2, session="one")
        assert (balancer.num_hashes > 0, balancer.num_sessions) == (True, 1)
        await replicas.engine.reset_prefix_cache()
        assert (balancer.num_hashes, balancer.num_sessions) == (0, 0)
