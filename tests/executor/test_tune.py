"""Launch parameters of attention: measured at a GPU's first start, read from a file by later ones, never in the way."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executor.gpu import start_gpu

import aioengine
from aioengine.executor import tune
from aioengine.executor.accelerator import Work
from aioengine.executor.tune import cache_folder, keep_choice, read_choices, tune_attention
from aioengine.kernels.attention.choices import (
    ATTENTION_KERNELS,
    DECODE,
    DECODE_IN_SPLITS,
    PREFILL,
    TUNED,
    AttentionShape,
    Choice,
    candidates,
    choice_of,
    default_choice,
)
from aioengine.kernels.attention.kv_cache import KVCacheShape
from aioengine.kernels.operations import Operations
from aioengine.kernels.torch import operations as reference
from aioengine.models.families import DecoderConfig
from doubles.fake_accelerator import FakeAccelerator

CPU = torch.device("cpu")
CACHE = KVCacheShape(num_layers=2, block_size=16, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
SHAPE = AttentionShape(128, 2, 2, 2, 2, 16)
CANDIDATES = {kernel: candidates(kernel, SHAPE, 90) for kernel in ATTENTION_KERNELS}
NUM_CANDIDATES = sum(map(len, CANDIDATES.values()))
MIB = 2**20


def model_of(**fields: Any) -> DecoderConfig:
    defaults: dict[str, Any] = {
        **{"architecture": "LlamaForCausalLM", "vocab_size": 97, "hidden_size": 512, "intermediate_size": 512},
        **{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "max_model_len": 8192},
        **{"dtype": torch.bfloat16, "rms_norm_eps": 1e-5, "qkv_bias": False, "output_bias": False, "mlp_bias": False},
        **{"qk_norm": False, "tie_word_embeddings": False, "windows": (None, None), "inv_freq": ()},
    }
    return DecoderConfig(**{**defaults, **fields})


class TimedGpu(FakeAccelerator):
    """A GPU whose launches of attention take what a script says; each timing takes a second of ``now``.

    Args:
        script: seconds of a kernel launched by a choice.

    Attributes:
        operations: the oracles, with something to choose. They are timed by the script, so need not compute.
        computes: they do.
        timed: kernels and choices, in order.
        launched: arguments of what was launched, by kernel.
    """

    def __init__(self, script: Callable[[str, Choice], float], **memory: int) -> None:
        super().__init__(**{"free_bytes": 4 * MIB, **memory})
        self.script = script
        self.now = 0.0
        self.computes = False
        self.timed: list[tuple[str, Choice]] = []
        self.launched: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {}
        self._last: tuple[str, Choice] | None = None
        self.operations: Any = SimpleNamespace(
            **{name: getattr(reference, name) for name in vars(Operations) if name[0] != "_"}
        )
        self.operations.COMPILER = "3.9.0"
        self.operations.attend_decode = self._attend_decode
        self.operations.attend_prefill = self._attend_prefill

    def _attend_decode(self, *tensors: torch.Tensor, **keywords: Any) -> None:
        self._note(DECODE_IN_SPLITS if keywords["num_splits"] > 1 else DECODE, tensors, keywords)
        if self.computes:
            reference.attend_decode(*tensors, **keywords)

    def _attend_prefill(self, *tensors: torch.Tensor, **keywords: Any) -> None:
        self._note(PREFILL, tensors, keywords)
        if self.computes:
            reference.attend_prefill(*tensors, **keywords)

    def _note(self, kernel: str, tensors: tuple[torch.Tensor, ...], keywords: dict[str, Any]) -> None:
        self.launched[kernel] = tensors, keywords
        self._last = kernel, choice_of(kernel, CPU, AttentionShape.of(tensors[0], tensors[1]))

    def seconds_of(self, work: Work) -> float:
        assert super().seconds_of(work) >= 0
        assert self._last is not None
        self.timed.append(self._last)
        self.now += 1.0
        return self.script(*self._last)

    def tune(self, folder: Path | None, model: DecoderConfig | None = None, **keywords: Any) -> None:
        model = model or model_of()
        tune_attention(self, self.operations, model, CACHE, folder, clock=lambda: self.now, **keywords)


def chosen(kernel: str) -> Choice:
    return choice_of(kernel, CPU, SHAPE)


def last_is_fastest(kernel: str, choice: Choice) -> float:
    return 1.0 / (1 + CANDIDATES[kernel].index(choice))


@pytest.fixture(autouse=True)
def nothing_is_chosen() -> Iterator[None]:
    TUNED.clear()
    yield
    TUNED.clear()


def all_are_default() -> bool:
    return all(chosen(kernel) == default_choice(kernel, SHAPE) for kernel in ATTENTION_KERNELS)


def test_the_fastest_of_each_kernels_candidates_is_taken(tmp_path: Path) -> None:
    gpu = TimedGpu(last_is_fastest)
    gpu.tune(tmp_path, deadline_s=1e9)
    assert gpu.timed == [(kernel, choice) for kernel in ATTENTION_KERNELS for choice in CANDIDATES[kernel]]
    assert [chosen(kernel) for kernel in ATTENTION_KERNELS] == [each[-1] for each in CANDIDATES.values()]
    assert gpu.num_releases == 1


def test_the_next_start_reads_the_file_of_its_gpu_and_leaves_the_gpu_alone(tmp_path: Path) -> None:
    TimedGpu(last_is_fastest).tune(tmp_path / "new", deadline_s=1e9)
    for name in ("fake", "other"):
        TUNED.clear()  # as another process would see it
        gpu = TimedGpu(last_is_fastest)
        gpu.name = name
        gpu.tune(tmp_path / "new", deadline_s=1e9)
        assert len(gpu.timed) == (0 if name == "fake" else NUM_CANDIDATES)
        assert (gpu.num_enqueued > 0, gpu.num_releases) == (name == "other", len(gpu.timed) > 0)
        assert chosen(DECODE) == CANDIDATES[DECODE][-1]
        file = tmp_path / "new" / f"{name}-triton-3.9.0-{aioengine.__version__}.json"
        assert len(json.loads(file.read_text())) == len(ATTENTION_KERNELS)


def test_a_second_engine_of_the_process_changes_nothing_for_the_first() -> None:
    TimedGpu(last_is_fastest).tune(None, deadline_s=1e9)
    before = dict(TUNED)
    gpu = TimedGpu(lambda kernel, choice: 1.0)
    gpu.tune(None)
    assert gpu.timed == []
    assert before == TUNED


def test_after_the_deadline_what_is_not_measured_is_as_by_default(tmp_path: Path) -> None:
    gpu = TimedGpu(last_is_fastest)
    gpu.tune(tmp_path, deadline_s=2.5)
    assert len(gpu.timed) == 3
    assert chosen(DECODE) == CANDIDATES[DECODE][2]
    assert chosen(PREFILL) == default_choice(PREFILL, SHAPE)
    assert list(tmp_path.iterdir()) == []


def test_candidates_that_cannot_be_launched_are_passed_over(tmp_path: Path) -> None:
    def script(kernel: str, choice: Choice) -> float:
        if choice.num_stages > 2:
            raise RuntimeError("out of shared memory")
        return 1.0 if choice.num_warps == 4 else float("nan")

    TimedGpu(script).tune(tmp_path, deadline_s=1e9)
    assert chosen(DECODE) == next(choice for choice in CANDIDATES[DECODE] if choice.num_stages == 2)


@pytest.mark.parametrize("memory", [{}, {"free_bytes": 1000}], ids=["nothing can be launched", "no memory"])
def test_what_cannot_be_measured_is_as_by_default_and_not_kept(tmp_path: Path, memory: dict[str, int]) -> None:
    TimedGpu(lambda kernel, choice: float("inf"), **memory).tune(tmp_path, deadline_s=1e9)
    assert all_are_default()
    assert list(tmp_path.iterdir()) == []


def test_a_stored_choice_that_is_no_candidate_any_more_is_measured_anew(tmp_path: Path) -> None:
    TimedGpu(last_is_fastest).tune(tmp_path, deadline_s=1e9)
    (file,) = tmp_path.iterdir()
    before = read_choices(file)
    name, choice = next(iter(before.items()))
    keep_choice(file, name, Choice(num_warps=32, num_stages=choice.num_stages, constants=choice.constants))
    TUNED.clear()  # as another process would see it
    gpu = TimedGpu(last_is_fastest)
    gpu.tune(tmp_path, deadline_s=1e9)
    assert {kernel for kernel, _ in gpu.timed} == {json.loads(name)[0]}
    assert read_choices(file) == before


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "not JSON": lambda content: b"\xff\x00" * 100,
    "another shape": lambda content: b"[1, 2]",
    "a field of another type": lambda content: content.replace(b'"num_warps": 8', b'"num_warps": "8"'),
    "an unknown field": lambda content: content.replace(b'"num_warps": 8', b'"num_ctas": 8'),
    "deep": lambda content: b'{"other": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_written_anew(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "not made yet" / "choices.json"
    choice = Choice(num_warps=8)
    keep_choice(file, "decode", choice)
    before = file.read_bytes()
    file.write_bytes(DAMAGES[damage](before))
    assert file.read_bytes() != before
    assert read_choices(file) == {}
    keep_choice(file, "decode", choice)
    assert file.read_bytes() == before


RACER = """
import sys
from pathlib import Path
from aioengine.executor.tune import keep_choice
from aioengine.kernels.attention.choices import Choice
for i in range(15):
    keep_choice(Path(sys.argv[1]), f"{sys.argv[2]}, {i}", Choice(num_warps=8))
"""


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(file), str(i)]) for i in range(3)]
    while any(racer.poll() is None for racer in racers):
        if file.exists():
            json.loads(file.read_text())
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert 15 <= len(read_choices(file)) <= 45


def test_a_folder_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    TimedGpu(last_is_fastest).tune(tmp_path / "file" / "below", deadline_s=1e9)
    assert chosen(DECODE) == CANDIDATES[DECODE][-1]


def test_a_failure_of_its_own_does_not_fail_the_start(caplog: pytest.LogCaptureFixture) -> None:
    gpu = TimedGpu(last_is_fastest)
    with caplog.at_level(logging.DEBUG, "aioengine"):
        gpu.tune(None, model_of(num_kv_heads=0))
    assert "default ones" in caplog.text
    assert (gpu.timed, TUNED) == ([], {})


def test_operations_with_nothing_to_choose_leave_the_gpu_alone(tmp_path: Path) -> None:
    gpu = FakeAccelerator()
    tune_attention(gpu, reference, model_of(), CACHE, tmp_path)
    assert (gpu.num_enqueued, gpu.num_releases, list(tmp_path.iterdir())) == (0, 0, [])


def test_what_is_measured_is_as_large_as_serving_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "MAX_CACHE_BYTES", 64 * MIB)  # a fourth of the heads, of the bytes
    gpu = TimedGpu(last_is_fastest, free_bytes=2**40)
    gpu.tune(None, model_of(num_heads=16), deadline_s=1e9)
    for kernel, num_rows, num_tokens, context in (
        (DECODE, 64, 64, 1024),
        (DECODE_IN_SPLITS, 1, 1, 4096),
        (PREFILL, 1, 2048, 2048),
    ):
        (q, k_cache, v_cache, tables, lines, out), keywords = gpu.launched[kernel]
        assert tuple(q.shape) == tuple(out.shape) == (num_tokens, 16, 128)
        assert tuple(tables.shape) == (num_rows, context // 16)
        assert tables.unique().numel() == tables.numel()
        assert 0 <= tables.min() <= tables.max() < len(k_cache)
        assert k_cache.nbytes + v_cache.nbytes <= 64 * MIB
        assert k_cache.isfinite().all()
        if kernel == PREFILL:
            assert lines[:, 2].sum() == num_tokens
        else:
            assert lines.tolist() == [[row, row, context] for row in range(num_rows)]
            assert keywords["max_context"] == context


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_start_tunes_unless_told_not_to(
    is_wanted: bool, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu = TimedGpu(lambda kernel, choice: 1.0)
    gpu.computes = True
    folder = checkpoint("llama2", num_hidden_layers=1)
    fields = {"dtype": "bfloat16", "max_model_len": 16, "cuda_graphs": "off"}
    executor = await start_gpu(folder, gpu, gpu.operations, tune_kernels=is_wanted, **fields)
    await executor.aclose()
    assert bool(gpu.timed) == bool(TUNED) == (tmp_path / "aioengine").exists() == is_wanted


def test_choices_are_kept_where_the_system_keeps_such_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_folder() == Path("/var/cache/me/aioengine")
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == tmp_path / ".cache" / "aioengine"

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None
