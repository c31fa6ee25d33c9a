"""What replicas of one host get of it: GPUs, cores, memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.cluster.devices import HostShare, HostSlots, count_cores, find_devices, share_cores
from aioengine.config import EngineConfig, ProcessOptions
from aioengine.errors import ConfigError


def test_each_rank_has_a_gpu_of_its_own_and_keeps_it() -> None:
    slots = HostSlots((4, "MIG-1", 6), num_cores=8)
    assert [slots.take(rank, 3).visible_devices for rank in (0, 1, 7)] == [(4,), ("MIG-1",), (6,)]
    assert slots.take(1, 3) == HostShare(("MIG-1",)), "started again it gets the same one"
    slots.free(1)
    slots.free(1)
    assert slots.take(9, 3).visible_devices == ("MIG-1",)


def test_one_gpu_too_few_is_said_with_what_to_do() -> None:
    slots = HostSlots((0, 1), num_cores=8)
    for rank in (2, 3):
        slots.take(rank, 3)
    with pytest.raises(ConfigError) as caught:
        slots.take(4, 3)
    assert str(caught.value) == (
        "replica 4 needs a GPU of its own, and this machine shows 2 (0, 1): start fewer replicas here, show more of "
        "them (visible_devices, CUDA_VISIBLE_DEVICES), or compute on the CPU (device='cpu')"
    )
    slots.free(2)
    assert slots.take(4, 3).visible_devices == (0,), "what was refused has taken nothing"


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=40))
def test_no_gpu_is_given_to_two(moves: list[tuple[int, bool]]) -> None:
    slots = HostSlots(tuple(range(8)), num_cores=8)
    held: dict[int, Any] = {}
    for rank, comes in moves:
        if comes:
            held[rank] = slots.take(rank, 8).visible_devices
        else:
            slots.free(rank)
            held.pop(rank, None)
        assert len({*held.values()}) == len(held)


@pytest.mark.parametrize(
    ("num_cores", "num_local", "share"),
    [
        (8, 1, HostShare()),
        (8, 2, HostShare(num_threads=4, memory=0.5)),
        (8, 3, HostShare(num_threads=2, memory=1 / 3)),
        (2, 4, HostShare(num_threads=1, memory=0.25)),
    ],
)
def test_cores_and_memory_are_shared_alike(num_cores: int, num_local: int, share: HostShare) -> None:
    assert share_cores(num_cores, num_local) == share
    assert HostSlots(None, num_cores).take(5, num_local) == share


def test_a_share_is_told_by_environment_and_config() -> None:
    share = HostShare(num_threads=4, memory=0.5)
    assert share.environment({}) == {"OMP_NUM_THREADS": "4"}
    assert share.environment({"OMP_NUM_THREADS": "3"}) == {}, "what the user has set holds"
    assert share.config(EngineConfig(memory_utilization=0.6)) == EngineConfig(memory_utilization=0.3)
    assert HostShare((0,)).environment({}) == {}
    assert HostShare((0,)).config(EngineConfig()) == EngineConfig()


@pytest.mark.parametrize(
    ("config", "options", "environ", "files", "devices"),
    [
        ({}, {}, {}, [], None),
        ({}, {}, {}, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], (0, 1)),
        ({"device": "cuda"}, {}, {}, ["nvidia0"], (0,)),
        ({"device": "cpu"}, {}, {}, ["nvidia0"], None),
        ({}, {}, {"CUDA_VISIBLE_DEVICES": "3, GPU-5,-1,7"}, ["nvidia0"], (3, "GPU-5")),
        ({}, {}, {"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], None),
        ({}, {"visible_devices": (7, 2)}, {"CUDA_VISIBLE_DEVICES": "3"}, [], (7, 2)),
        ({}, {"visible_devices": ()}, {"CUDA_VISIBLE_DEVICES": "3"}, [], None),
        ({}, {"executor": "a:b"}, {"CUDA_VISIBLE_DEVICES": "3"}, ["nvidia0"], None),
        ({}, {"executor": "a:b", "visible_devices": (1, 2)}, {}, [], (1, 2)),
    ],
)
def test_gpus_are_those_that_were_named_or_that_the_machine_shows(
    config: dict[str, Any],
    options: dict[str, Any],
    environ: Mapping[str, str],
    files: list[str],
    devices: Any,
    tmp_path: Path,
) -> None:
    for name in files:
        (tmp_path / name).touch()
    found = find_devices(EngineConfig(**config), ProcessOptions(**options), 2, environ, tmp_path)
    assert found == devices


def test_one_gpu_by_number_is_for_one_replica(tmp_path: Path) -> None:
    config, options = EngineConfig(device="cuda:1"), ProcessOptions(visible_devices=(4, 5))
    assert find_devices(config, options, 1, {}, tmp_path) is None
    with pytest.raises(ConfigError, match=r"device='cuda:1' is one GPU, and 2 replicas need one each: name them in"):
        find_devices(config, options, 2, {}, tmp_path)


def test_no_folder_of_devices_is_no_gpu(tmp_path: Path) -> None:
    assert find_devices(EngineConfig(), ProcessOptions(), 2, {}, tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("siblings", "quota", "cores"),
    [
        (["0", "1", "2", "3"], "max 100000", 4),
        (["0,2", "1,3", "0,2", "1,3"], "max 100000", 2),
        (["0,2", "1,3", "0,2", "1,3"], "150000 100000", 1),
        ([None] * 4, "max 100000", 4),
        (["0"], "max 100000", 4),
    ],
)
def test_cores_are_physical_ones_within_affinity_and_quota(
    siblings: list[str | None], quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for number, text in enumerate(siblings):
        if text is not None:
            folder = tmp_path / f"cpu{number}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(text + "\n")
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "cpu.max").write_text(quota)
    (tmp_path / "own").write_text("0::/group\n")
    assert count_cores(tmp_path, tmp_path, tmp_path / "own") == cores
