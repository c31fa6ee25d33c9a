"""A team of threads: what is done, in which order, whatever the threads do meanwhile."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from nightly import nightly

from aioengine.errors import InternalError
from aioengine.kernels.native.library import Library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.sizes import MAX_CHUNKS
from aioengine.kernels.native.team import Team

NUM_SPANS = 5


@pytest.mark.parametrize("seconds", [0.5, *nightly(60)])
def test_records_come_one_after_the_other_in_programs_of_any_length(library: Library, seconds: float) -> None:
    """More threads than there are cores, so that they are interrupted anywhere."""
    team = Team(library, 6)
    spans = torch.tensor([[row, 0, 8 * row, 8] for row in range(NUM_SPANS)], dtype=torch.int32)
    tables = [torch.zeros(NUM_SPANS, 8, dtype=torch.int32) for _ in range(60)]

    def copy(length: int) -> None:
        for source, target in pairwise(tables[: length + 1]):
            team.launch("put_spans", NUM_SPANS, target, 8, spans, source)

    lengths = [1, 59, 2, 7, 30]
    programs = [team.capture(partial(copy, length)) for length in lengths]
    begin, value = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        for length, program in zip(lengths, programs, strict=True):
            value += 1
            team.use_threads(1 + value % 7)
            tables[0].fill_(value)
            copy(1)
            program.replay()
            assert all(bool((table == value).all()) for table in tables[: length + 1])
    team.close()


def test_a_program_of_nothing_and_a_team_that_is_closed_twice(team: Team) -> None:
    team.capture(lambda: None).replay()
    team.close()
    team.close()
    target, spans = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[0, 0, 0, 2]], dtype=torch.int32)
    team.launch("put_spans", 1, target, 2, spans, torch.tensor([3, 4], dtype=torch.int32))
    assert target.tolist() == [[3, 4]]  # by the caller's thread


def test_more_chunks_than_a_record_can_have_are_refused(team: Team) -> None:
    with pytest.raises(InternalError, match="chunks"):
        team.launch("put_spans", MAX_CHUNKS, 0)


def test_threads_of_a_team_that_was_dropped_have_what_they_read(library: Library) -> None:
    team = Team(library, 2)
    (thread,), words = team._threads, weakref.ref(team._words)
    end = partial(team._end, team._results, team._results + 8, team._address, 2)
    del team
    gc.collect()
    assert words() is not None
    end()
    thread.join()
    del thread
    gc.collect()
    assert words() is None


def test_programs_over_buffers_that_were_outgrown_keep_little_memory(team: Team) -> None:
    operations, weight, kept = NativeOperations(team), torch.ones(1), dict[int, int]()
    for num_rows in range(1, 2000, 30):
        program = team.capture(partial(operations.rms_norm, torch.ones(num_rows, 1), weight, 1e-5))
        kept |= {each.data_ptr(): each.nbytes() for each in program._kept[-1:]}
    assert sum(kept.values()) < 2 * max(kept.values())
