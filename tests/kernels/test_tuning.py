"""Launch parameters: measured once, bounded in time, kept in a file that nothing can break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aioengine.errors import InternalError
from aioengine.kernels.attention.tuning import MAX_CHOICES, MAX_FILE_BYTES, Choice, Key, Tuner, choice_file

CANDIDATES = [Choice(num_warps=4), Choice(num_warps=8), Choice(num_warps=4, constants=(("N", 128),))]
FIRST, SECOND, THIRD = CANDIDATES
KEY: Key = (128, 4, "bf16")


class FakeGpu:
    """Measures by a table; each takes a second.

    Attributes:
        now: its clock.
        measured: in order.
    """

    def __init__(self, *seconds: float | Exception) -> None:
        self.seconds = dict(zip(CANDIDATES, seconds, strict=False))
        self.now = 0.0
        self.measured: list[tuple[str, Key, Choice]] = []

    def measure(self, kernel_name: str, key: Key, choice: Choice) -> float:
        self.measured.append((kernel_name, key, choice))
        self.now += 1.0
        seconds = self.seconds[choice]
        if isinstance(seconds, Exception):
            raise seconds
        return seconds

    def tuner(self, path: Path | None, deadline_s: float = 20.0) -> Tuner:
        return Tuner(path, deadline_s, measure=self.measure, clock=lambda: self.now)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "not made yet" / "choices.json"


def test_the_fastest_is_picked_and_measured_once(path: Path) -> None:
    gpu = FakeGpu(3.0, 1.0, 2.0)
    tuner = gpu.tuner(path)
    assert tuner.pick("decode", KEY, CANDIDATES) == SECOND
    assert tuner.pick("decode", KEY, CANDIDATES) == SECOND
    assert gpu.measured == [("decode", KEY, each) for each in CANDIDATES]


def test_the_next_start_measures_nothing(path: Path) -> None:
    FakeGpu(3.0, 1.0, 2.0).tuner(path).pick("decode", KEY, CANDIDATES)
    gpu = FakeGpu()
    assert gpu.tuner(path).pick("decode", KEY, CANDIDATES) == SECOND
    assert gpu.measured == []


def test_each_kernel_and_key_has_a_choice_of_its_own(path: Path) -> None:
    tuner = FakeGpu(3.0, 1.0, 2.0).tuner(path)
    tuner.pick("decode", KEY, CANDIDATES)
    for name, key in (("decode", (64, 4, "bf16")), ("prefill", KEY), ("decode", ("128", 4, "bf16"))):
        gpu = FakeGpu(1.0, 2.0, 3.0)
        assert gpu.tuner(path).pick(name, key, CANDIDATES) == FIRST
        assert len(gpu.measured) == 3


def test_what_does_not_compile_is_passed_over(path: Path) -> None:
    gpu = FakeGpu(RuntimeError("out of shared memory"), 2.0, float("nan"))
    assert gpu.tuner(path).pick("decode", KEY, CANDIDATES) == SECOND
    assert FakeGpu().tuner(path).pick("decode", KEY, CANDIDATES) == SECOND


def test_where_nothing_compiles_the_default_is_taken_and_not_kept(path: Path) -> None:
    errors = [RuntimeError()] * 3
    assert FakeGpu(*errors).tuner(path).pick("decode", KEY, CANDIDATES) == FIRST
    assert not path.exists()


def test_after_the_deadline_the_default_is_taken_and_not_kept(path: Path) -> None:
    gpu = FakeGpu(3.0, 2.0, 1.0)
    tuner = gpu.tuner(path, deadline_s=3.0)
    assert tuner.pick("decode", KEY, CANDIDATES) == THIRD
    assert tuner.pick("prefill", KEY, CANDIDATES) == FIRST
    assert len(gpu.measured) == 3
    later = FakeGpu(3.0, 2.0, 1.0)
    assert later.tuner(path).pick("prefill", KEY, CANDIDATES) == THIRD
    assert len(later.measured) == 3


def test_a_deadline_among_the_candidates_takes_the_best_so_far_and_keeps_nothing(path: Path) -> None:
    gpu = FakeGpu(3.0, 2.0, 1.0)
    assert gpu.tuner(path, deadline_s=1.5).pick("decode", KEY, CANDIDATES) == SECOND
    assert len(gpu.measured) == 2
    assert not path.exists()


def test_time_that_passes_between_two_picks_does_not_count(path: Path) -> None:
    gpu = FakeGpu(3.0, 2.0, 1.0)
    tuner = gpu.tuner(path, deadline_s=5.0)
    gpu.now = 1000.0
    assert tuner.pick("decode", KEY, CANDIDATES) == THIRD


def test_a_single_candidate_needs_no_measuring(path: Path) -> None:
    gpu = FakeGpu()
    assert gpu.tuner(path).pick("decode", KEY, [FIRST]) == FIRST
    assert gpu.measured == []


@pytest.mark.parametrize("count", [0, 9])
def test_too_few_and_too_many_candidates_are_refused(count: int) -> None:
    with pytest.raises(InternalError, match=f"{count} candidates"):
        FakeGpu().tuner(None).pick("decode", KEY, [Choice(num_warps=2**i) for i in range(count)])


def test_without_a_file_choices_last_as_long_as_the_tuner() -> None:
    gpu = FakeGpu(3.0, 2.0, 1.0)
    tuner = gpu.tuner(None)
    assert tuner.pick("decode", KEY, CANDIDATES) == tuner.pick("decode", KEY, CANDIDATES) == THIRD
    assert len(gpu.measured) == 3


def test_a_stored_choice_that_is_no_candidate_any_more_is_measured_anew(path: Path) -> None:
    FakeGpu(3.0, 2.0, 1.0).tuner(path).pick("decode", KEY, CANDIDATES)
    gpu = FakeGpu(3.0, 2.0, 1.0)
    assert gpu.tuner(path).pick("decode", KEY, [FIRST, SECOND]) == SECOND
    assert FakeGpu().tuner(path).pick("decode", KEY, [FIRST, SECOND]) == SECOND


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "not JSON": lambda content: b"\xff\x00" * 100,
    "another shape": lambda content: b"[1, 2]",
    "a field of another type": lambda content: content.replace(b'"num_warps": 8', b'"num_warps": "8"'),
    "an unknown field": lambda content: content.replace(b'"num_warps": 8', b'"num_ctas": 8'),
    "another format": lambda content: content.replace(b'"format": 1', b'"format": 2'),
    "endless": lambda content: content + b" " * MAX_FILE_BYTES + b"x",
    "deep": lambda content: b'{"other": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_written_anew(path: Path, damage: str) -> None:
    FakeGpu(3.0, 1.0, 2.0).tuner(path).pick("decode", KEY, CANDIDATES)
    before = path.read_bytes()
    path.write_bytes(DAMAGES[damage](before))
    assert path.read_bytes() != before
    gpu = FakeGpu(3.0, 1.0, 2.0)
    assert gpu.tuner(path).pick("decode", KEY, CANDIDATES) == SECOND
    assert len(gpu.measured) == 3
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_or_written_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "choices.json"
    folder.mkdir()
    (tmp_path / "file").touch()
    for path in (folder, tmp_path / "file" / "choices.json"):
        assert FakeGpu(3.0, 1.0, 2.0).tuner(path).pick("decode", KEY, CANDIDATES) == SECOND
    assert sorted(each.name for each in tmp_path.iterdir()) == ["choices.json", "file"]


def test_what_others_have_stored_meanwhile_stays(path: Path) -> None:
    one, other = FakeGpu(3.0, 1.0, 2.0).tuner(path), FakeGpu(3.0, 2.0, 1.0).tuner(path)
    one.pick("decode", KEY, CANDIDATES)
    other.pick("prefill", KEY, CANDIDATES)
    assert len(json.loads(path.read_text())["choices"]) == 2


def test_a_file_keeps_the_newest_choices(path: Path) -> None:
    path.parent.mkdir()
    old = {f'["decode",{i}]': {"num_warps": 8} for i in range(MAX_CHOICES)}
    path.write_text(json.dumps({"format": 1, "choices": old}))
    FakeGpu(3.0, 1.0, 2.0).tuner(path).pick("prefill", KEY, CANDIDATES)
    names = list(json.loads(path.read_text())["choices"])
    assert names == [*list(old)[1:], '["prefill",128,4,"bf16"]']


RACER = """
import sys
from pathlib import Path
from aioengine.kernels.attention.tuning import Choice, Tuner
candidates = [Choice(num_warps=n) for n in (2, 4, 8)]
for i in range(40):
    tuner = Tuner(Path(sys.argv[1]), measure=lambda name, key, choice: 1.0 / choice.num_warps)
    assert tuner.pick("decode", (sys.argv[2], i), candidates).num_warps == 8
"""


def test_processes_that_write_at_once_leave_a_whole_file(path: Path) -> None:
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(path), str(i)]) for i in range(3)]
    while any(racer.poll() is None for racer in racers):
        if path.exists():
            json.loads(path.read_text())
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert os.listdir(path.parent) == [path.name]
    assert 40 <= len(json.loads(path.read_text())["choices"]) <= 120


def test_a_file_is_one_gpus_and_one_versions(tmp_path: Path) -> None:
    file = choice_file(tmp_path, gpu="NVIDIA H200/../x", triton="3.6.0+git", package="0.6.0")
    assert file == tmp_path / "NVIDIA-H200-..-x-triton-3.6.0-git-0.6.0.json"


def test_neither_torch_nor_triton_is_needed() -> None:
    code = "import sys, aioengine.kernels.attention.tuning; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
