"""How many KV blocks fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import layout_of

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.executor.accelerator import DeviceMemory
from aioengine.executor.memory import available_memory, num_kv_blocks
from aioengine.kernels.zeros import lazy_zeros, untouched_bytes
from aioengine.server.config import HttpLimits

GIB = 2**30


def blocks(
    max_model_len: int = 1000,
    bytes_per_block: int = 100,
    available_bytes: int = 10**6,
    windows: tuple[int | None, ...] = (None,),
    max_in_flight: int = 1,
    **fields: Any,
) -> int:
    config = EngineConfig(**{"block_size": 16, **fields})
    memory = DeviceMemory(total=available_bytes, free=available_bytes, allocated=0)
    [num_blocks] = num_kv_blocks(
        config,
        layout_of(*windows, block_bytes=bytes_per_block),
        max_model_len=max_model_len,
        memory=memory,
        peak_bytes=None,
        max_in_flight=max_in_flight,
    )
    return num_blocks


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kv_cache_memory_bytes": 20_099}, 200),
        ({"memory_utilization": 0.5, "available_bytes": 30_000}, 150),
        ({"max_num_seqs": 3, "max_model_len": 17}, 3 * 2),
        ({"kv_cache_memory_bytes": 6300, "max_model_len": 1000}, 63),
    ],
    ids=["bytes that are given", "a share of the free ones", "no more than sequences could use", "just one sequence"],
)
def test_memory_is_filled_with_blocks(fields: dict[str, Any], expected: int) -> None:
    assert blocks(**fields) == expected


def test_less_than_one_sequence_is_an_error_that_says_what_would_fit() -> None:
    with pytest.raises(ConfigError) as error:
        blocks(kv_cache_memory_bytes=6299, max_model_len=1000)
    message = str(error.value)
    assert "max_model_len=1000 tokens needs 6300 bytes" in message
    assert "kv_cache_memory_bytes grants 6299" in message
    assert "set max_model_len to 992 at most" in message
    assert blocks(kv_cache_memory_bytes=6299, max_model_len=992) == 62
    with pytest.raises(ConfigError, match=r"memory_utilization=0\.4 of 200 free bytes grants 80: grant more$"):
        blocks(available_bytes=200, memory_utilization=0.4)
    with pytest.raises(ConfigError, match=r"0\.4 of 200 free bytes, unless memory_utilization says more, grants 80"):
        blocks(available_bytes=200)


@pytest.mark.parametrize(
    ("available_bytes", "expected"),
    [(10**6, 1000), (63_001, 63), (60_000, 63), (6300 * 5 // 2, 63)],
    ids=["a tenth", "a tenth that is one sequence", "one sequence", "one sequence, of four tenths"],
)
def test_a_guest_takes_a_tenth_of_the_free_memory_or_what_one_sequence_needs(
    available_bytes: int, expected: int
) -> None:
    assert blocks(available_bytes=available_bytes) == expected


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [("4GiB", 4 * GIB), ("512MB", 512 * 10**6), ("2g", 2 * GIB), ("1.5 GiB", 3 * GIB // 2), ("16777216", 2**24)],
)
def test_sizes_are_taken_as_people_write_them(written: str, num_bytes: int) -> None:
    assert EngineConfig(kv_cache_memory_bytes=written).kv_cache_memory_bytes == num_bytes
    assert HttpLimits(max_header_bytes=written).max_header_bytes == num_bytes


@pytest.mark.parametrize(
    "written", ["", "much", "4 bytes of it", "GiB", "-1G", "1e9", "1G" * 10**5, "9999999999G", "0", 1.5]
)
def test_what_is_no_size_is_refused(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_memory_bytes="):
        EngineConfig(kv_cache_memory_bytes=written)


def test_an_engine_counts_what_another_of_its_process_has_reserved_and_not_written() -> None:
    before = untouched_bytes()
    reserved = lazy_zeros(64, 2**20, dtype=torch.uint8, device=torch.device("cpu"))
    assert untouched_bytes() - before == 64 * 2**20
    reserved[:32] = 1
    assert untouched_bytes() - before == 32 * 2**20
    del reserved
    assert untouched_bytes() == before
    with pytest.raises(torch.OutOfMemoryError, match="1125899906842624 bytes"):
        lazy_zeros(2**50, dtype=torch.uint8, device=torch.device("cpu"))


def test_groups_with_windows_need_the_window_and_what_is_in_flight() -> None:
    fields: dict[str, Any] = {"windows": (None, 64, 64), "max_num_seqs": 8, "max_num_batched_tokens": 32}
    assert blocks(kv_cache_memory_bytes=7700, **fields) == 77, "63 of all tokens, twice 7 of 63 + 32"
    assert blocks(kv_cache_memory_bytes=8100, max_in_flight=2, **fields) == 81
    assert blocks(max_in_flight=2, **fields) == 8 * 81, "no more than sequences could use"
    with pytest.raises(ConfigError) as error:
        blocks(kv_cache_memory_bytes=7699, **fields)
    assert "needs 7700 bytes" in str(error.value)
    assert "set max_model_len to 992 at most, or grant more, or lower max_num_batched_tokens" in str(error.value)
    assert blocks(kv_cache_memory_bytes=7699, **{**fields, "max_model_len": 992}) == 76
    assert blocks(kv_cache_memory_bytes=7699, **{**fields, "max_num_batched_tokens": 16}) == 76


V2, V1 = "0::/\n", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("", {}, 16 * GIB, id="no groups"),
        pytest.param(
            V2,
            {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 5\ninactive_file {GIB}\nx 7"},
            2 * GIB,
            id="its limit, less what it uses and cannot drop",
        ),
        pytest.param(V2, {"memory.max": 100, "memory.current": 200}, 0, id="over its limit"),
        pytest.param(
            "0::/outer/inner\n",
            {
                **{"outer/inner/memory.max": "max", "outer/inner/memory.current": 1},
                **{"outer/memory.max": 2 * GIB, "outer/memory.current": GIB},
            },
            GIB,
            id="a limit of a group above",
        ),
        pytest.param(
            V1,
            {
                **{"memory/job/memory.limit_in_bytes": 8 * GIB, "memory/job/memory.usage_in_bytes": 6 * GIB},
                "memory/job/memory.stat": f"total_inactive_file {GIB}",
            },
            3 * GIB,
            id="version 1",
        ),
        pytest.param(
            "4:memory:/elsewhere\n0::/\n",
            {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 5},
            16 * GIB,
            id="not mounted here",
        ),
    ],
)
def test_the_least_that_the_system_and_each_control_group_leave_is_free(
    tmp_path: Path, groups: str, files: dict[str, object], expected: int
) -> None:
    meminfo = "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"
    written = {
        "proc/meminfo": meminfo,
        "proc/self/cgroup": groups,
        **{f"cgroup/{name}": f for name, f in files.items()},
    }
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(content))
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_a_system_that_says_nothing_is_half_free_and_this_machine_has_some_memory(tmp_path: Path) -> None:
    assert 2**28 < available_memory(tmp_path, tmp_path) < 2**50
    assert 2**24 < available_memory() < 2**50
