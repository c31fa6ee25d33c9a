"""Launch parameters of attention fit the shapes that they are chosen for."""

from __future__ import annotations

import pytest

from aioengine.kernels.attention_launches import PREFILL_ROWS, choose_decode_launch, choose_prefill_launch

GROUPS = (1, 4, 7, 17, 33, 71)


@pytest.mark.parametrize(("element_size", "cache_element_size"), [(4, 4), (4, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_launches_are_powers_of_two_and_fit_into_99_kib(
    head_dim: int, element_size: int, cache_element_size: int
) -> None:
    """GPUs of 8.6, 8.9 and 12.0 have so much for the queries, and for keys and values of the stages on the way."""
    width = 1 << (head_dim - 1).bit_length()
    prefill = choose_prefill_launch(head_dim, element_size, cache_element_size)
    decodes = [(group, choose_decode_launch(head_dim, group, element_size, cache_element_size)) for group in GROUPS]
    rows = [(max(1 << (group - 1).bit_length(), 16), launch) for group, launch in decodes]
    for num_rows, launch in [(prefill.num_rows, prefill), *rows]:
        assert all(size >= 16 and size & (size - 1) == 0 for size in (launch.num_keys, launch.num_rows))
        keys = launch.num_keys * width * cache_element_size * 2 * (launch.num_stages - 1)
        assert element_size == 4 or num_rows * width * 2 + keys <= 99 * 1024
    assert prefill.num_rows <= PREFILL_ROWS
