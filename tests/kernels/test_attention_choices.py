"""Whatever is chosen for a launch of attention, its result is the oracle's; and for which launches it is chosen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kernels.harness import DEVICE, int32, quiet_numpy
from kernels.paged_cases import PagedCase, assert_close, paged_case

from aioengine.kernels.attention import paged_decode, paged_prefill
from aioengine.kernels.attention.choices import (
    ATTENTION_KERNELS,
    DECODE,
    DECODE_IN_SPLITS,
    MAX_CANDIDATES,
    PREFILL,
    PREFILL_ROWS,
    TUNED,
    AttentionShape,
    Choice,
    candidates,
    choice_of,
    default_choice,
    trying,
)
from aioengine.kernels.attention.paged_prefill import prefill_tile
from aioengine.kernels.torch import attention as reference_attention

FP16 = torch.float16
CPU = torch.device("cpu")
KEYWORDS: dict[str, Any] = {"scale": 0.11, "window": None}
SHAPES = [
    AttentionShape(head_dim, group, 2, element_size, cache_element_size, 16)
    for head_dim in (16, 64, 80, 128, 192, 256)
    for group in (1, 4, 7, 17, 71)
    for element_size, cache_element_size in ((4, 4), (4, 1), (2, 2), (2, 1))
]
SERVED = AttentionShape(128, 3, 1, 2, 2, 16)

pytestmark = quiet_numpy


@pytest.fixture(autouse=True)
def nothing_is_chosen() -> Iterator[None]:
    TUNED.clear()
    yield
    TUNED.clear()


class Launched(Exception):
    """Attributes:
    keywords: of the launch.
    """

    def __init__(self, keywords: dict[str, Any]) -> None:
        self.keywords = keywords


class Kernel:
    """Instead of one, to see how it is launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **keywords: Any) -> None:
            raise Launched(keywords)

        return launch


def case_of(num_tokens: int, context: int) -> PagedCase:
    return paged_case(0, [(0, context)], num_tokens=num_tokens, heads=3, kv_heads=1, head_dim=128, dtype=FP16)


def decode(case: PagedCase, num_splits: int, attend: Any = paged_decode.attend_decode) -> torch.Tensor:
    decodes = int32([[0, 0, 300]])
    out = case.out.clone()
    attend(*case.tensors(), decodes, out, **KEYWORDS, num_splits=num_splits, max_context=300)
    return out


def prefill(case: PagedCase, attend: Any = paged_prefill.attend_prefill) -> torch.Tensor:
    """The second tile is not full."""
    tile = prefill_tile(3, 1, 128)
    lines = [[0, 0, tile, 10], [0, tile, 9, 10 + tile]]
    out = case.out.clone()
    attend(*case.tensors(), int32(lines), out, **KEYWORDS)
    return out


@pytest.mark.parametrize("choice", candidates(DECODE, SERVED, 90), ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_is_right_by_every_choice(num_splits: int, choice: Choice) -> None:
    case = case_of(1, 300)
    with trying(choice):
        computed = decode(case, num_splits)
    assert_close(computed, decode(case, num_splits, reference_attention.attend_decode))


@pytest.mark.parametrize("choice", candidates(PREFILL, SERVED, 90), ids=str)
def test_prefill_is_right_by_every_choice_over_the_same_tiles(choice: Choice) -> None:
    tile = prefill_tile(3, 1, 128)
    case = case_of(tile + 9, tile + 19)
    with trying(choice):
        computed = prefill(case)
    assert_close(computed, prefill(case, reference_attention.attend_prefill))


def launched(monkeypatch: pytest.MonkeyPatch, kernel: str) -> Choice:
    """How a kernel is launched now."""
    monkeypatch.setattr(paged_decode, "_decode_kernel", Kernel())
    monkeypatch.setattr(paged_prefill, "_prefill_kernel", Kernel())
    case = case_of(60, 300)
    launch = partial(prefill, case) if kernel == PREFILL else partial(decode, case, 1 if kernel == DECODE else 3)
    with pytest.raises(Launched) as raised:
        launch()
    found = raised.value.keywords
    names = ("M", "N") if kernel == PREFILL else ("N",)
    return Choice(
        num_warps=found["num_warps"],
        num_stages=found["num_stages"],
        constants=tuple((name, found[name]) for name in names),
    )


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_launches_are_by_what_was_chosen_for_the_kernel_the_gpu_and_the_shape(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    default, *others = candidates(kernel, SERVED, 90)
    assert launched(monkeypatch, kernel) == default
    for other in {*ATTENTION_KERNELS} - {kernel}:
        TUNED[other, None, SERVED] = others[0]
    TUNED[kernel, 7, SERVED] = TUNED[kernel, None, SERVED._replace(block_size=32)] = others[0]
    assert launched(monkeypatch, kernel) == default
    TUNED[kernel, None if DEVICE == "cpu" else 0, SERVED] = others[1]
    assert launched(monkeypatch, kernel) == others[1]
    with trying(others[2]):
        assert launched(monkeypatch, kernel) == others[2]
    assert launched(monkeypatch, kernel) == others[1]


def test_what_one_thread_tries_does_not_touch_the_others() -> None:
    seen = []
    with trying(candidates(DECODE, SERVED, 90)[3]):
        thread = threading.Thread(target=lambda: seen.append(choice_of(DECODE, CPU, SERVED)))
        thread.start()
        thread.join()
    assert seen == [default_choice(DECODE, SERVED)]


def test_a_trial_ends_with_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), trying(candidates(DECODE, SERVED, 90)[3]):
        raise ZeroDivisionError
    assert choice_of(DECODE, CPU, SERVED) == default_choice(DECODE, SERVED)


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_candidates_fit_their_shapes(kernel: str) -> None:
    for shape in SHAPES:
        for capability in (80, 89, 90):
            found = candidates(kernel, shape, capability)
            assert 1 <= len(set(found)) == len(found) <= MAX_CANDIDATES
            assert found[0] == default_choice(kernel, shape)
            for choice in found:
                sizes = dict(choice.constants)
                assert all(size >= 16 and size & (size - 1) == 0 for size in sizes.values())
                assert sizes.get("M", PREFILL_ROWS) <= PREFILL_ROWS
                # Keys and values of the stages on the way, at the least.
                width = 1 << (shape.head_dim - 1).bit_length()
                assert sizes["N"] * width * shape.cache_element_size * 2 * (choice.num_stages - 1) <= 163 * 1024


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_defaults_fit_into_99_kib(kernel: str) -> None:
    """Of 8.6, 8.9 and 12.0: queries, and keys and values of the stages on the way."""
    for shape in SHAPES:
        choice = default_choice(kernel, shape)
        sizes = dict(choice.constants)
        rows = sizes.get("M") or max(1 << (shape.group - 1).bit_length(), 16)
        width = 1 << (shape.head_dim - 1).bit_length()
        keys = 2 * (choice.num_stages - 1) * sizes["N"] * width * shape.cache_element_size
        if shape.element_size == 2:
            assert rows * width * 2 + keys <= 99 * 1024, shape


def test_the_choices_of_splits_are_those_without() -> None:
    """The kernel is the same one; which is best may differ."""
    for shape in SHAPES:
        assert candidates(DECODE, shape, 90) == candidates(DECODE_IN_SPLITS, shape, 90)
