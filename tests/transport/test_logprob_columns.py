"""Log-probabilities as columns: read entry by entry, and columns that do not fit each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.wire_samples import float32, int32

from aioengine.core.listener import SampledLogprobs
from aioengine.errors import WireError
from aioengine.transport.wire import LogprobColumns

pack = LogprobColumns.pack


def entry(rank: int, *others: tuple[int, float, int]) -> SampledLogprobs:
    return SampledLogprobs(-0.5 * rank, rank, list(others))


ENTRIES = [entry(1, (7, -1.0, 1)), entry(2), entry(3, (8, -2.0, 1), (9, -3.0, 2)), entry(4, (1, -4.0, 1))]


class TestLogprobColumns:
    def test_those_of_tokens_and_then_those_of_prompts(self) -> None:
        columns = LogprobColumns(pack([0, 3], ENTRIES))
        assert [columns.at(index) for index in range(5)] == [ENTRIES[0], None, None, ENTRIES[1], None]
        assert columns.take(1) == ENTRIES[2:3]
        assert columns.take(9) == ENTRIES[3:]
        assert columns.take(1) == []

    @given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.just(-0.5), st.integers(1, 9)), max_size=4), max_size=6))
    def test_any_entries(self, others: list[list[tuple[int, float, int]]]) -> None:
        entries = [SampledLogprobs(-1.0, 1, each) for each in others]
        columns = LogprobColumns(pack([*range(len(entries))], entries))
        assert [columns.at(index) for index in range(len(entries))] == entries

    @pytest.mark.parametrize("column", range(1, 7))
    @pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
    def test_a_column_that_does_not_fit_the_others(self, column: int, change: str) -> None:
        columns = pack([0, 1], ENTRIES)
        full = columns[column]
        columns[column] = {"shorter": full[:-1], "longer": np.append(full, full[-1:]), "empty": full[:0]}[change]
        with pytest.raises(WireError, match="do not fit"):
            LogprobColumns(columns)

    @pytest.mark.parametrize("counts", [(-1, 2, 1, 2), (2**31 - 1, 2**31 - 1, 2, 4), (1, 0, 2, 2)])
    def test_counts_that_are_none_and_more_indices_than_entries(self, counts: tuple[int, ...]) -> None:
        columns = pack([], ENTRIES)
        columns[3] = int32(*counts)
        with pytest.raises(WireError):
            LogprobColumns(columns)
        with pytest.raises(WireError):
            LogprobColumns(pack([0, 1, 2, 3, 4], ENTRIES))

    @pytest.mark.parametrize("indices", [(3, 1), (-1, 0), (9, 10)], ids=["falling", "negative", "beyond"])
    def test_indices_that_no_token_has_do_no_harm(self, indices: tuple[int, ...]) -> None:
        columns = LogprobColumns(pack([*indices], ENTRIES))
        assert len([found for index in range(5) if (found := columns.at(index)) is not None]) <= 2


def test_an_entry_may_hold_what_no_finite_number_is() -> None:
    """A likeliest token's log-probability may be -inf, where rules left nothing else."""
    columns = LogprobColumns([int32(0), float32(-math.inf), int32(1), int32(0), int32(), float32(), int32()])
    found = columns.at(0)
    assert found is not None
    assert found.logprob == -math.inf
