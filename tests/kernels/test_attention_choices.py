"""Whatever is chosen for a launch of attention, its result is the oracle's; and for which launches it is chosen."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.harness import DEVICE, int32, quiet_numpy, triton
from kernels.paged_cases import PagedCase, assert_close, attend, paged_case
from nightly import few

from aioengine.kernels.attention.launch_choices import (
    ATTENTION_KERNELS,
    DECODE,
    PREFILL,
    PREFILL_ROWS,
    TUNED,
    AttentionShape,
    LaunchChoice,
    candidates,
    choice_of,
    default_choice,
    trying,
)
from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.triton import attend_decode as paged_decode
from aioengine.kernels.triton import attend_prefill as paged_prefill
from aioengine.kernels.triton.attend_prefill import prefill_tile

MAX_CANDIDATES = 8
"""Each is compiled; more than these belong into a benchmark."""

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


def attended(kernel: str, operations: Any) -> torch.Tensor:
    """Of one token, in three parts or whole; or of two tiles, the second of which is not full."""
    tile = prefill_tile(3, 1, 128)
    case = case_of(tile + 9, tile + 19) if kernel == PREFILL else case_of(1, 300)
    if kernel == PREFILL:
        tiles = int32([[0, 0, tile, 10], [0, tile, 9, 10 + tile]])
        attend(operations.attend_prefill, case, tiles, case.out, **KEYWORDS)
    else:
        num_splits = 1 if kernel == DECODE else 3
        decodes = int32([[0, 0, 300]])
        attend(operations.attend_decode, case, decodes, case.out, **KEYWORDS, num_splits=num_splits, max_context=300)
    return case.out


OF_SERVED = [(kernel, choice) for kernel in ATTENTION_KERNELS for choice in candidates(kernel, SERVED, 90)]


@pytest.mark.parametrize(
    ("kernel", "choice"),
    few(OF_SERVED[::4], of=OF_SERVED),
    ids=str,
)
def test_attention_is_right_by_every_choice_over_the_same_tiles(kernel: str, choice: LaunchChoice) -> None:
    with trying(choice):
        computed = attended(kernel, triton)
    assert_close(computed, attended(kernel, reference))


def launched(monkeypatch: pytest.MonkeyPatch, kernel: str) -> LaunchChoice:
    """How a kernel is launched now."""
    monkeypatch.setattr(paged_decode, "_decode_kernel", Kernel())
    monkeypatch.setattr(paged_prefill, "_prefill_kernel", Kernel())
    with pytest.raises(Launched) as raised:
        attended(kernel, triton)
    found = raised.value.keywords
    names = ("M", "N") if kernel == PREFILL else ("N",)
    return LaunchChoice(
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


def test_a_trial_is_its_threads_own_and_ends_with_a_failure() -> None:
    seen: list[LaunchChoice] = []

    def fail() -> None:
        thread = threading.Thread(target=lambda: seen.append(choice_of(DECODE, CPU, SERVED)))
        thread.start()
        thread.join()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), trying(candidates(DECODE, SERVED, 90)[3]):
        fail()
    assert [*seen, choice_of(DECODE, CPU, SERVED)] == [default_choice(DECODE, SERVED)] * 2


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_candidates_fit_their_shapes_and_defaults_into_99_kib(kernel: str) -> None:
    """Of 8.6, 8.9 and 12.0: queries, and keys and values of the stages on the way."""
    for shape, capability in itertools.product(SHAPES, (80, 89, 90)):
        found = candidates(kernel, shape, capability)
        assert 1 <= len(set(found)) == len(found) <= MAX_CANDIDATES
        assert found[0] == default_choice(kernel, shape)
        width = 1 << (shape.head_dim - 1).bit_length()
        for choice in found:
            sizes = dict(choice.constants)
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes.values())
            assert sizes.get("M", PREFILL_ROWS) <= PREFILL_ROWS
            keys = sizes["N"] * width * shape.cache_element_size * 2 * (choice.num_stages - 1)
            assert keys <= 163 * 1024
            if choice == found[0] and shape.element_size == 2:
                rows = sizes.get("M") or max(1 << (shape.group - 1).bit_length(), 16)
                assert rows * width * 2 + keys <= 99 * 1024, shape
