"""How many KV blocks fit."""

from pathlib import Path
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.executor.memory import available_memory, num_kv_blocks

GIB = 2**30


def blocks(max_model_len: int = 1000, bytes_per_block: int = 100, available_bytes: int = 10**6, **fields: Any) -> int:
    config = EngineConfig(**{"block_size": 16, **fields})
    return num_kv_blocks(
        config, max_model_len=max_model_len, bytes_per_block=bytes_per_block, available_bytes=available_bytes
    )


def test_bytes_that_are_given_are_filled_with_blocks() -> None:
    assert blocks(kv_cache_memory_bytes=20_099) == 200


def test_else_a_share_of_the_free_memory_is() -> None:
    assert blocks(memory_utilization=0.5, available_bytes=30_000) == 150


def test_no_more_blocks_than_all_sequences_could_use() -> None:
    assert blocks(max_num_seqs=3, max_model_len=17) == 3 * 2


def test_exactly_one_sequence_fits() -> None:
    assert blocks(kv_cache_memory_bytes=6300, max_model_len=1000) == 63


def test_less_than_one_sequence_is_an_error_that_says_what_would_fit() -> None:
    with pytest.raises(ConfigError) as error:
        blocks(kv_cache_memory_bytes=6299, max_model_len=1000)
    message = str(error.value)
    assert "max_model_len=1000 tokens needs 6300 bytes" in message
    assert "kv_cache_memory_bytes grants 6299" in message
    assert "set max_model_len to 992 at most" in message
    assert blocks(kv_cache_memory_bytes=6299, max_model_len=992) == 62


def test_a_cache_for_nothing_at_all_suggests_no_length() -> None:
    with pytest.raises(ConfigError, match=r"memory_utilization=0\.4 of 200 free bytes grants 80: grant more$"):
        blocks(available_bytes=200)


class Kernel:
    """Files as the kernel shows them."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def available(self) -> int:
        return available_memory(self.proc, self.cgroups)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path)
    kernel.write("proc/meminfo", "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n")
    return kernel


def test_without_groups_the_system_says_what_is_free(kernel: Kernel) -> None:
    assert kernel.available() == 16 * GIB


def test_a_group_of_version_2_leaves_its_limit_less_what_it_uses_and_cannot_drop(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "0::/\n")
    kernel.write("cgroup/memory.max", f"{4 * GIB}\n")
    kernel.write("cgroup/memory.current", f"{3 * GIB}\n")
    kernel.write("cgroup/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    assert kernel.available() == 2 * GIB


def test_a_limit_of_a_group_above_counts(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "0::/outer/inner\n")
    kernel.write("cgroup/outer/inner/memory.max", "max\n")
    kernel.write("cgroup/outer/inner/memory.current", "1\n")
    kernel.write("cgroup/outer/memory.max", f"{2 * GIB}\n")
    kernel.write("cgroup/outer/memory.current", f"{GIB}\n")
    assert kernel.available() == GIB


def test_a_group_of_version_1_counts(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    kernel.write("cgroup/memory/job/memory.limit_in_bytes", f"{8 * GIB}\n")
    kernel.write("cgroup/memory/job/memory.usage_in_bytes", f"{6 * GIB}\n")
    kernel.write("cgroup/memory/job/memory.stat", f"total_inactive_file {GIB}\n")
    assert kernel.available() == 3 * GIB


def test_a_group_that_is_not_mounted_here_is_passed_over(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "4:memory:/elsewhere\n0::/\n")
    kernel.write("cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    kernel.write("cgroup/memory/memory.usage_in_bytes", "5\n")
    assert kernel.available() == 16 * GIB


def test_a_group_over_its_limit_leaves_nothing(kernel: Kernel) -> None:
    kernel.write("proc/self/cgroup", "0::/\n")
    kernel.write("cgroup/memory.max", "100\n")
    kernel.write("cgroup/memory.current", "200\n")
    assert kernel.available() == 0


def test_a_system_that_says_nothing_is_half_free(tmp_path: Path) -> None:
    assert 2**28 < available_memory(tmp_path, tmp_path) < 2**50


def test_this_machine_has_some_memory() -> None:
    assert 2**24 < available_memory() < 2**50
