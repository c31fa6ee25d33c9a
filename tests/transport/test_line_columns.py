"""Log-probabilities as columns: read line by line, and columns that fit no lines."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.wire_samples import Sample, float32, float64, frames_of, int32

from aioengine.core.listener import SampledLogprobs
from aioengine.errors import WireError
from aioengine.transport import wire
from aioengine.transport.line_columns import LineColumns
from aioengine.transport.session import pack_lines


def line(rank: int, *others: tuple[int, float, int]) -> SampledLogprobs:
    return SampledLogprobs(-0.5 * rank, rank, list(others))


LINES = [line(1, (7, -1.0, 1)), line(2), line(3, (8, -2.0, 1), (9, -3.0, 2)), line(4, (1, -4.0, 1))]


class TestLineColumns:
    def test_lines_of_tokens_and_then_those_of_prompts(self) -> None:
        columns = LineColumns(int32(0, 3), pack_lines(LINES))
        assert [columns.at(place) for place in range(5)] == [LINES[0], None, None, LINES[1], None]
        assert columns.take(1) == LINES[2:3]
        assert columns.take(9) == LINES[3:]
        assert columns.take(1) == []

    def test_none(self) -> None:
        columns = LineColumns(int32(), pack_lines([]))
        assert columns.at(0) is None
        assert columns.take(5) == []

    def test_across_the_wire(self) -> None:
        arrays = (int32(1, 2), int32(3, 4), float64(), int32(0, 1), *pack_lines(LINES))
        sample = Sample("", wire.StepOutputsMessage(has_lines=True), arrays)
        _, read_arrays = wire.Reader[wire.StepOutputsMessage](wire.FromEngine).read(frames_of(sample))
        columns = LineColumns(read_arrays[3], read_arrays[4:])
        assert [columns.at(0), columns.at(1), *columns.take(2)] == LINES

    @given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.just(-0.5), st.integers(1, 9)), max_size=4), max_size=6))
    def test_any_lines(self, others: list[list[tuple[int, float, int]]]) -> None:
        lines = [SampledLogprobs(-1.0, 1, each) for each in others]
        columns = LineColumns(int32(*range(len(lines))), pack_lines(lines))
        assert [columns.at(place) for place in range(len(lines))] == lines

    @pytest.mark.parametrize("column", range(6))
    @pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
    def test_a_column_that_does_not_fit_the_others(self, column: int, change: str) -> None:
        columns = pack_lines(LINES)
        full = columns[column]
        columns[column] = {"shorter": full[:-1], "longer": np.append(full, full[-1:]), "empty": full[:0]}[change]
        with pytest.raises(WireError, match="do not fit"):
            LineColumns(int32(0, 1), columns)

    def test_more_places_than_lines(self) -> None:
        with pytest.raises(WireError):
            LineColumns(int32(0, 1, 2, 3, 4), pack_lines(LINES))

    @pytest.mark.parametrize("counts", [(-1, 2, 1, 2), (2**31 - 1, 2**31 - 1, 2, 4), (1, 0, 2, 2)])
    def test_counts_that_are_none(self, counts: tuple[int, ...]) -> None:
        columns = pack_lines(LINES)
        columns[2] = int32(*counts)
        with pytest.raises(WireError):
            LineColumns(int32(), columns)

    @pytest.mark.parametrize("places", [(3, 1), (-1, 0), (9, 10)], ids=["falling", "negative", "beyond"])
    def test_places_that_no_token_has_do_no_harm(self, places: tuple[int, ...]) -> None:
        columns = LineColumns(int32(*places), pack_lines(LINES))
        assert len([found for place in range(5) if (found := columns.at(place)) is not None]) <= 2


def test_a_line_may_hold_what_no_finite_number_is() -> None:
    """A likeliest token's log-probability may be -inf, where rules left nothing else."""
    columns = LineColumns(int32(0), [float32(-math.inf), int32(1), int32(0), int32(), float32(), int32()])
    found = columns.at(0)
    assert found is not None
    assert found.logprob == -math.inf
