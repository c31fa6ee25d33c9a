"""Which replicas are children, which join, and what the children of one machine are told of it."""

import os
from pathlib import Path
from typing import Any

import pytest

from aioengine import ConfigError, EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.cluster.host import address_of
from aioengine.cluster.host_launcher import HostLauncher
from aioengine.cluster.lockstep_launcher import LockstepLauncher
from aioengine.cluster.remote import OnHost
from aioengine.core.protocol import CoreHooks
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport.backends import InChild

FREE = "tcp://127.0.0.1:*"


async def backends_of(ranks: list[int], process: ProcessOptions, options: ReplicaOptions, **config: Any) -> list[Any]:
    worker = TextWorker()
    launcher = HostLauncher(EngineConfig(**config), process, options)
    try:
        await launcher.open(worker, find_rank=lambda _: None, on_join=lambda _: None)
        hooks = CoreHooks(worker, worker, lambda: None)
        return [launcher(rank, hooks) for rank in ranks]
    finally:
        await launcher.aclose()
        await worker.aclose()


async def test_the_first_ranks_are_children_and_the_others_join() -> None:
    options = ReplicaOptions(replicas=4, replicas_local=2, join_address=FREE)
    backends = await backends_of([0, 1, 2, 3, 4], ProcessOptions(), options, device="cpu")
    assert [type(each) for each in backends] == [InChild, InChild, OnHost, OnHost, InChild], "scale makes further ones"


async def test_children_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.cluster.devices.count_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ReplicaOptions(replicas=2)
    backends = await backends_of([0, 1, 2], ProcessOptions(), options, device="cpu", memory_utilization=0.6)
    assert [each._engine._env for each in backends] == [{"OMP_NUM_THREADS": str(count)} for count in (4, 4, 2)]
    assert [each._config.memory_utilization for each in backends] == pytest.approx([0.3, 0.3, 0.2])
    (alone,) = await backends_of([0], ProcessOptions(), ReplicaOptions(replicas=1), device="cpu")
    assert (alone._engine._env, alone._config.memory_utilization) == ({}, None)


async def test_children_get_a_gpu_each() -> None:
    process, options = ProcessOptions(visible_devices=(3, 5)), ReplicaOptions(replicas=2)
    backends = await backends_of([0, 1, 0], process, options)
    assert [each._options.visible_devices for each in backends] == [(3,), (5,), (3,)]
    assert [each._engine._env for each in backends] == [{}, {}, {}]
    with pytest.raises(ConfigError, match=r"replica 2 needs a GPU of its own, and this machine shows 2 \(3, 5\)"):
        await backends_of([0, 1, 2], process, options)


async def test_ranks_in_lockstep_share_a_machine_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.cluster.devices.count_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker = TextWorker()
    hooks = CoreHooks(worker, worker, lambda: None)
    try:
        on_cores = LockstepLauncher(EngineConfig(device="cpu", memory_utilization=0.6), ProcessOptions(), 2)
        on_gpus = LockstepLauncher(EngineConfig(), ProcessOptions(visible_devices=(3, 5)), 2)
        for launcher in (on_cores, on_gpus):
            await launcher.open(worker, find_rank=lambda _: None, on_join=lambda _: None)
        members = [on_cores(rank, hooks) for rank in range(2)]
        assert [each._env for each in members] == [{"OMP_NUM_THREADS": "4"}] * 2
        assert [each._config.memory_utilization for each in members] == pytest.approx([0.3, 0.3])
        again = [on_gpus(rank, hooks)._process.visible_devices for rank in (0, 1, 0, 1)]
        assert again == [(3,), (5,), (3,), (5,)]
    finally:
        await worker.aclose()


@pytest.mark.parametrize(
    ("address", "addresses"),
    [
        (None, [None, None]),
        ("tcp://10.0.0.7:5600", ["tcp://10.0.0.7:5600", "tcp://10.0.0.7:5601"]),
        ("tcp://[::1]:5600", ["tcp://[::1]:5600", "tcp://[::1]:5601"]),
        ("tcp://10.0.0.7:*", ["tcp://10.0.0.7:*", "tcp://10.0.0.7:*"]),
        ("tcp://10.0.0.7:0", ["tcp://10.0.0.7:0", "tcp://10.0.0.7:0"]),
    ],
)
def test_engines_of_a_host_serve_at_ports_behind_each_other(address: str | None, addresses: list[str | None]) -> None:
    assert [address_of(address, nth) for nth in range(2)] == addresses


def test_a_socket_file_is_for_one_engine(tmp_path: Path) -> None:
    address = f"ipc://{os.fspath(tmp_path)}/engine"
    assert address_of(address, 0) == address
    with pytest.raises(ConfigError, match="is for one engine; leave it out, or give tcp://HOST:PORT for several"):
        address_of(address, 1)
