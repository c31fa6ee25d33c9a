"""Processors of logits: what they are given, what they may do, and that they harm no other row."""

import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hostile_errors import HOSTILE
from sampler.batch import Rows, asking, random_logits, sample_for, tokens_of

from aioengine.scheduler.plan import LogitsRow

VOCAB = 128


def force(token: int) -> Any:
    def processor(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        logits[:, token] = 1000.0

    return processor


def test_rows_that_share_a_function_are_given_to_it_together_and_others_are_not() -> None:
    calls: list[tuple[torch.Tensor, list[LogitsRow]]] = []

    def record(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        calls.append((logits.clone(), rows))

    def other(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        assert len(rows) == 1

    logits = random_logits(5, VOCAB, seed=1)
    requests = [
        asking([1, 2], [3], logits_processors=(record,), choice=4),
        asking([1]),
        asking([1], logits_processors=(other,)),
        asking([5], [6, 7], logits_processors=(record,)),
        asking([8], [9], logits_processors=(record,), num_choices=3, choice=0),
    ]
    sample_for(requests, logits)
    ((given, rows),) = calls
    assert given.dtype == torch.float32
    assert torch.equal(given, logits[[0, 3, 4]])
    assert [row.prompt_token_ids.tolist() for row in rows] == [[1, 2], [5], [8]]
    assert [row.output_token_ids.tolist() for row in rows] == [[3], [6, 7], [9]]
    assert [row.choice for row in rows] == [4, 0, 0]
    assert all(ids.dtype == np.int32 for row in rows for ids in (row.prompt_token_ids, row.output_token_ids))


def test_functions_of_a_request_run_in_their_order_and_share_by_place() -> None:
    calls: list[tuple[str, int]] = []

    def make(name: str, change: Any) -> Any:
        def processor(logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
            calls.append((name, len(rows)))
            return change(logits)

        return processor

    reverse, raise_last = make("reverse", lambda logits: logits.flip(-1)), make("last", raise_last_token)
    requests = [
        asking(logits_processors=(reverse, raise_last)),
        asking(logits_processors=(reverse,)),
        asking(logits_processors=(raise_last, reverse)),
        asking(logits_processors=(reverse, reverse)),
    ]
    sampled = sample_for(requests, torch.arange(VOCAB).float().expand(4, -1))
    assert tokens_of(sampled) == [[VOCAB - 1], [0], [0], [VOCAB - 1]]
    assert calls == [("reverse", 3), ("last", 1), ("last", 1), ("reverse", 2)]


def raise_last_token(logits: torch.Tensor) -> torch.Tensor:
    logits[:, -1] = 1e6
    return logits


def test_logits_may_be_changed_in_place_or_returned_anew() -> None:
    logits = random_logits(3, VOCAB, seed=1)
    requests = [
        asking(logits_processors=(force(7),)),
        asking(logits_processors=(lambda logits, rows: -logits,)),
        asking(logits_processors=(lambda logits, rows: (logits * 1.0).requires_grad_(),)),
    ]
    sampled = sample_for(requests, logits)
    assert tokens_of(sampled) == [[7], [int(logits[1].argmin())], [int(logits[2].argmax())]]


def fail(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    logits.fill_(torch.nan)
    raise KeyError("the request's own mistake")


def leave(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    raise SystemExit(3)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "raises": (fail, KeyError, "own mistake"),
    "wants to end the process": (leave, RuntimeError, "SystemExit: 3"),
    "one row too few": (lambda logits, rows: logits[1:], ValueError, r"float32 \[\d, 128\]"),
    "flat": (lambda logits, rows: logits.flatten(), ValueError, r"float32 \[\d, 128\]"),
    "reshaped in place": (lambda logits, rows: logits.t_() and None, (ValueError, RuntimeError), ""),
    "of the vocabulary's wrong size": (lambda logits, rows: logits[:, :5], ValueError, r"float32 \[\d, 5\]"),
    "half precision": (lambda logits, rows: logits.half(), ValueError, "float16"),
    "double precision": (lambda logits, rows: logits.double(), ValueError, "float64"),
    "a list": (lambda logits, rows: logits.tolist(), TypeError, "list"),
    "an array": (lambda logits, rows: logits.numpy(), TypeError, "ndarray"),
    "sparse": (lambda logits, rows: logits.to_sparse(), (ValueError, RuntimeError, NotImplementedError), ""),
    "on no device": (lambda logits, rows: logits.to("meta"), ValueError, "meta"),
    "not numbers": (lambda logits, rows: logits * torch.nan, ArithmeticError, "after the request's processors"),
    "nothing left": (lambda logits, rows: logits.fill_(-torch.inf), ValueError, "a logits processor"),
}  # fmt: skip


@pytest.mark.parametrize(("bad", "error", "message"), BAD.values(), ids=BAD)
def test_what_goes_wrong_in_one_fails_its_rows_and_no_other(bad: Any, error: Any, message: str) -> None:
    logits = random_logits(6, VOCAB, seed=2)
    good = [
        asking(temperature=1.0, logprobs=2),
        asking([4], [5], frequency_penalty=1.0, logprobs=2),
        asking(logits_processors=(force(3),)),
        asking(temperature=0.5),
    ]
    alone = sample_for(good, logits[[0, 2, 4, 5]])
    broken = asking([1], [2], logits_processors=(bad,), logprobs=5, temperature=1.0)
    sampled = sample_for([good[0], broken, good[1], broken, good[2], good[3]], logits)
    assert [failure.index for failure in sampled.failures] == [1, 3]
    for failure in sampled.failures:
        assert isinstance(failure.error, error)
        assert re.search(message, str(failure.error))
    assert sampled.counts.tolist() == [1, 0, 1, 0, 1, 1]
    assert sampled.token_ids.tolist() == alone.token_ids.tolist() == sampled.next_ids[[0, 2, 4, 5]].tolist()
    assert sampled.logprobs is not None
    assert alone.logprobs is not None
    assert sampled.logprobs.index.tolist() == alone.logprobs.index.tolist() == [0, 1]
    np.testing.assert_array_equal(sampled.logprobs.logprobs, alone.logprobs.logprobs)


@pytest.mark.parametrize("what", HOSTILE)
def test_an_error_that_breaks_those_who_look_at_it_is_one_rows_too(what: str) -> None:
    logits = random_logits(2, VOCAB, seed=1)
    sampled = sample_for([asking(logits_processors=(lambda logits, rows: HOSTILE[what](),)), asking()], logits)
    assert [failure.index for failure in sampled.failures] == [0]
    assert sampled.counts.tolist() == [0, 1]


def test_an_error_says_where_it_was_raised_and_keeps_no_logits_alive() -> None:
    def fail_by_chance(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        try:
            fail(logits, rows)
        except KeyError as error:
            raise ValueError("again") from error

    logits = random_logits(1, VOCAB, seed=1)
    is_alive = weakref.ref(logits)
    (failure,) = Rows([asking(logits_processors=(fail_by_chance,))], VOCAB).sample(logits).failures
    del logits
    assert is_alive() is None
    assert "in fail_by_chance" in failure.error.__notes__[0]


def test_a_failed_row_runs_no_further_function_of_its_own() -> None:
    calls: list[int] = []
    last = lambda logits, rows: calls.append(len(rows))  # noqa: E731
    sampled = sample_for(
        [asking(logits_processors=(fail, last)), asking(logits_processors=(force(3), last))],
        random_logits(2, VOCAB, seed=1),
    )
    assert calls == [1]
    assert [failure.index for failure in sampled.failures] == [0]
    assert sampled.token_ids.tolist() == [3]


def test_what_a_function_keeps_is_its_own() -> None:
    kept: list[tuple[torch.Tensor, list[LogitsRow]]] = []

    def keep(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        for tensor, _ in kept:
            tensor.fill_(torch.nan)  # spoils nothing: those were copies
        kept.append((logits, rows))

    logits = random_logits(2, VOCAB, seed=1)
    requests = [asking(), asking([1], [2, 3], logits_processors=(keep, keep))]
    for _ in range(2):
        sampled = sample_for(requests, logits)
        assert sampled.failures == ()
        assert sampled.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    (row,) = kept[0][1]
    with pytest.raises(ValueError, match="read-only"):
        row.output_token_ids[0] = 5
    assert row.output_token_ids.tolist() == [2, 3]


def test_a_row_is_found_among_rows_and_equals_itself_alone() -> None:
    def row() -> LogitsRow:
        return LogitsRow(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32), 0)

    one, other = rows = [row(), row()]
    assert rows.index(other) == 1
    assert one != other
    assert {one: "one", other: "other"}[other] == "other"
