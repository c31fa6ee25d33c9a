"""Random plans with everything that a row may ask for, run on two executors, and the comparison of what they bring."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from executor.plans import PlanWriter, choices_by_row

from aioengine.scheduler.plan import LogitsRow, PromptLogprobs, StepLogprobs, StepPlan, StepResult

LOGPROB_TOLERANCE = 1e-3
RANK_TOLERANCE = 2
"""Places by which near ties may move a rank."""


def follow(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    """Depends on the whole output so far: a missing or wrong token shows in the next."""
    for line, row in zip(logits, rows, strict=True):
        history = [*row.prompt_token_ids.tolist()[-2:], *row.output_token_ids.tolist()]
        for nth, token in enumerate(history[-4:]):
            line[(token * 7 + nth + len(history)) % len(line)] += 9.0


def halve(logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
    return logits * 0.5


def raise_late(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    if any(len(row.output_token_ids) == 3 for row in rows):
        raise KeyError("late")


def shorten(logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
    return logits[:, :-1] if len(rows[0].output_token_ids) == 2 else logits


def spoil(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    logits[:, 1:] = -torch.inf
    logits[:, 0] = torch.nan


PROCESSORS = [(follow,), (follow, halve), (halve,), (raise_late,), (shorten,), (spoil,)]
"""The last three fail, sooner or later."""


def random_sampling(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Fields of a `RowSampling`, few at a time and each of them now and then."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    few = tuple(sorted(set(ids(6))))
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.7, 1.4]), "seed": rng.getrandbits(63)}
    others: list[dict[str, Any]] = [
        {"top_k": rng.choice([1, 3, 20, vocab + 5])},
        {"top_p": rng.choice([0.2, 0.8])},
        {"min_p": rng.choice([0.02, 0.3])},
        {"repetition_penalty": rng.choice([0.7, 1.8])},
        {"frequency_penalty": rng.choice([-0.9, 1.2])},
        {"presence_penalty": rng.choice([-1.5, 1.9])},
        {"stop_ids": ids(vocab // 2), "min_tokens": rng.randint(1, 9)},
        {"logit_bias": (*((token, rng.uniform(-20, 20)) for token in ids(5)), (vocab + 3, 5.0))},
        {"allowed_token_ids": few},
        {"bad_words": tuple((token,) for token in ids(vocab // 3))},
        {"allowed_token_ids": few, "bad_words": tuple((a, b) for a in few for b in few[::2] if a <= b)},
        {"bad_words": tuple(ids(rng.randint(1, 3)) for _ in range(20))},
        {"bad_words": ((vocab + 1, 2), (3, vocab + 1), (vocab + 2,))},
        {"logits_processors": rng.choice(PROCESSORS)},
        {"logprobs": rng.choice([0, 1, 5, 6, 20])},
        {"logprobs": rng.choice([0, 2]), "logprob_token_ids": (*ids(3), vocab + 7)},
        {"logprobs": rng.choice([0, 5, 6]), "logprobs_mode": "processed"},
        {"prompt_logprobs": rng.choice([0, 3])},
        {"num_choices": rng.randint(2, 7), "temperature": 1.1},
        {"allowed_token_ids": few, "bad_words": tuple((token,) for token in few)},
    ]
    for other in rng.sample(others, rng.choice([0, 0, 1, 2, 3, 5])):
        fields.update(other)
    return fields


@dataclass
class RandomPlans:
    """Makes plans, and takes in what became of them.

    Attributes:
        failed: epochs of rows whose tokens mean nothing any more.
        ends: how often what happened.
    """

    rng: random.Random
    writer: PlanWriter
    vocab: int
    max_rows: int
    max_len: int
    failed: set[int] = field(default_factory=set)
    ends: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sampling: dict[int, dict[str, Any]] = {}
        self._firsts: dict[int, list[int]] = {}
        """By row, the first tokens of the choices that are to be forked."""

    def note(self, what: str) -> None:
        self.ends[what] = self.ends.get(what, 0) + 1

    def next(self) -> StepPlan:
        rng, writer = self.rng, self.writer
        for row, state in list(writer.rows.items()):
            if state.num_known >= self.max_len or rng.random() < 0.04:
                self._remove(row)
            elif state.epoch in self.failed:
                self._remove(row)
                self.note("failed")
            elif None not in state.token_ids and state.num_known > state.num_prompt_tokens and rng.random() < 0.1:
                self._preempt(row)
        for row in self._free_rows():
            if self._firsts and rng.random() < 0.8:
                self._fork(row)
            elif rng.random() < 0.4:
                self._add(row)
        return writer.plan(dict(self._chosen()))

    def _free_rows(self) -> list[int]:
        free = [row for row in range(self.max_rows) if row not in self.writer.rows]
        self.rng.shuffle(free)
        return free

    def _remove(self, row: int) -> None:
        self.writer.remove(row, is_reused_next=self.rng.random() < 0.7)
        self._sampling.pop(row)
        self._firsts.pop(row, None)

    def _add(self, row: int) -> None:
        prompt = [self.rng.randrange(self.vocab) for _ in range(self.rng.choice([1, 3, 8, 17, 40]))]
        sampling = random_sampling(self.rng, self.vocab)
        self.writer.add(row, prompt, **sampling)
        self._sampling[row] = sampling

    def _preempt(self, row: int) -> None:
        sampling = {**self._sampling[row], "num_choices": 1}
        state = self.writer.rows[row]
        self._remove(row)
        tokens = [token for token in state.token_ids if token is not None]
        target = self.rng.choice(self._free_rows())
        self.writer.add(target, tokens, num_prompt_tokens=state.num_prompt_tokens, **sampling)
        self._sampling[target] = sampling
        self.note("preempted")

    def _fork(self, row: int) -> None:
        parent = self.rng.choice(list(self._firsts))
        firsts = self._firsts[parent]
        choice = self._sampling[parent]["num_choices"] - len(firsts)
        sampling = {**self._sampling[parent], "num_choices": 1, "choice": choice, "prompt_logprobs": -1}
        self.writer.fork(parent, row, firsts.pop(0), **sampling)
        self._sampling[row] = sampling
        if not firsts:
            del self._firsts[parent]
        self.note("forked")

    def _chosen(self) -> Iterator[tuple[int, int | None]]:
        rows = list(self.writer.rows)
        self.rng.shuffle(rows)
        for row in rows:
            left = self.writer.rows[row].num_known - self.writer.rows[row].num_computed
            if self.rng.random() < 0.9:
                yield row, None if self.rng.random() < 0.7 else self.rng.randint(1, left)

    def read(self, plan: StepPlan, result: StepResult) -> None:
        epoch_of = dict(zip(plan.rows.tolist(), plan.epochs.tolist(), strict=True))
        self.failed.update(int(plan.epochs[failure.index]) for failure in result.failures)
        for row, tokens in choices_by_row(plan, result).items():
            state = self.writer.rows.get(row)
            if len(tokens) > 1 and state is not None and state.epoch == epoch_of[row]:
                self._firsts[row] = tokens[1:]
        self.writer.read(plan, result)

    def lose(self, plan: StepPlan) -> None:
        """The whole step failed."""
        self.failed.update(plan.epochs.tolist())


def check_equal(plan: StepPlan, found: StepResult, wanted: StepResult, meaningless: set[int]) -> None:
    """Two results of a plan are the same, rows of the epochs ``meaningless`` aside."""
    counts = [row for row, epoch in enumerate(plan.epochs.tolist()) if epoch not in meaningless]
    failures = [[(f.index, repr(f.error)) for f in r.failures if f.index in counts] for r in (found, wanted)]
    assert failures[0] == failures[1]
    for index in counts:
        tokens = [r.token_ids[r.offsets[index] : r.offsets[index + 1]].tolist() for r in (found, wanted)]
        assert tokens[0] == tokens[1], f"row {plan.rows[index]} of step {plan.step}"
    lines = [_lines(plan, r, counts) | prompt_lines(r.prompt_logprobs, counts) for r in (found, wanted)]
    assert lines[0].keys() == lines[1].keys()
    for key, line in lines[0].items():
        _check_line(line, lines[1][key])


@dataclass
class Line:
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    extra: list[tuple[int, float, int]] = field(default_factory=list)


def _line(of: StepLogprobs | PromptLogprobs, nth: int) -> Line:
    top = list(zip(of.top_ids[nth].tolist(), of.top_logprobs[nth].tolist(), strict=True))
    return Line(float(of.logprobs[nth]), int(of.ranks[nth]), top)


def _lines(plan: StepPlan, result: StepResult, counts: list[int]) -> dict[Any, Line]:
    """By (index of the row in the plan, which of its tokens)."""
    of, lines = result.logprobs, {}
    for nth, place in enumerate(of.index.tolist() if of is not None else ()):
        assert of is not None
        row = int(np.searchsorted(result.offsets, place, side="right")) - 1
        line = _line(of, nth)
        if len(of.extra_offsets):
            named = slice(*of.extra_offsets[nth : nth + 2].tolist())
            columns = (of.extra_ids, of.extra_logprobs, of.extra_ranks)
            line.extra = list(zip(*(column[named].tolist() for column in columns), strict=True))
        if row in counts:
            lines[row, place - int(result.offsets[row])] = line
    return lines


def prompt_lines(of: PromptLogprobs | None, counts: list[int]) -> dict[Any, Line]:
    """By (index of the row in the plan, "prompt", position)."""
    if of is None:
        return {}
    places = enumerate(zip(of.index.tolist(), of.positions.tolist(), strict=True))
    return {(index, "prompt", position): _line(of, nth) for nth, (index, position) in places if index in counts}


def is_near(logprob: float, other: float) -> bool:
    return logprob == other or abs(logprob - other) < LOGPROB_TOLERANCE  # -inf, too


def _check_line(found: Line, wanted: Line) -> None:
    assert is_near(found.logprob, wanted.logprob)
    assert abs(found.rank - wanted.rank) <= RANK_TOLERANCE
    assert len(found.top) >= len(wanted.top), "as many as the row asked for, or more"
    for (token, value), (wanted_token, wanted_value) in zip(found.top, wanted.top, strict=False):
        assert is_near(value, wanted_value)
        # Of two that are as likely either may come first.
        near = {token for token, other in wanted.top if is_near(other, value)}
        is_last = is_near(value, wanted.top[-1][1])
        assert token == wanted_token or token in near or is_last
    assert [token for token, _, _ in found.extra] == [token for token, _, _ in wanted.extra]
    for (_, value, rank), (_, wanted_value, wanted_rank) in zip(found.extra, wanted.extra, strict=True):
        assert is_near(value, wanted_value)
        assert abs(rank - wanted_rank) <= RANK_TOLERANCE
