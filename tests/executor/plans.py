"""Plans as a scheduler would write them, for tests that drive an executor or a runner by hand."""

import random
from dataclasses import dataclass, field
from typing import Any

from aioengine.core.plan import RowAdded, RowSampling, StepPlan, StepResult, Want, int32


@dataclass
class PlannedRow:
    """Attributes:
    token_ids: all known ones, with None for each that was sampled on the device and not read yet.
    num_computed: how many of them the plans so far compute.
    """

    token_ids: list[int | None]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed: int = 0
    epoch: int = 0

    @property
    def num_known(self) -> int:
        return len(self.token_ids)


@dataclass
class PlanWriter:
    """Keeps the rows and the free blocks, hands out blocks in random order, numbers the steps from 1.

    Attributes:
        rows: by row.
    """

    num_blocks: int
    block_size: int
    seed: int = 0
    rows: dict[int, PlannedRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self._free)
        self._step = 0
        self._epoch = 0
        self._added: list[RowAdded] = []
        self._removed: list[int] = []

    def add(self, row: int, token_ids: list[int], *, num_prompt_tokens: int | None = None, **sampling: Any) -> None:
        """Let a sequence take a row with the next plan; greedy unless ``sampling`` says otherwise."""
        num_blocks = -(-len(token_ids) // self.block_size)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self._epoch += 1
        self.rows[row] = PlannedRow(list(token_ids), num_prompt_tokens, blocks, epoch=self._epoch)
        self._added.append(
            RowAdded(
                row=row,
                token_ids=int32(token_ids),
                num_prompt_tokens=num_prompt_tokens,
                block_ids=int32(blocks),
                sampling=RowSampling(**{"temperature": 0.0, **sampling}),
            )
        )

    def remove(self, row: int) -> PlannedRow:
        """Free a row with the next plan, and its blocks."""
        removed = self.rows.pop(row)
        self._removed.append(row)
        self._free[:0] = removed.block_ids
        return removed

    def plan(self, num_tokens: dict[int, int | None] | None = None) -> StepPlan:
        """The next step: so many tokens for each row, None for all known ones; every row if nothing is given.

        A row whose last known token is computed samples the next one.
        """
        chosen = dict.fromkeys(self.rows) if num_tokens is None else num_tokens
        lines, grown = [], []
        for row, count in chosen.items():
            state = self.rows[row]
            start = state.num_computed
            count = state.num_known - start if count is None else count
            state.num_computed += count
            for _ in range(len(state.block_ids) * self.block_size, state.num_computed, self.block_size):
                state.block_ids.append(self._free.pop())
                grown.append((row, state.block_ids[-1]))
            is_last = state.num_computed == state.num_known
            lines.append((row, state.epoch, start, count, Want.LOGITS if is_last else Want.NOTHING))
            if is_last:
                state.token_ids.append(None)
        rows, epochs, starts, counts, wants = zip(*lines, strict=True) if lines else ((),) * 5
        self._step += 1
        plan = StepPlan(
            step=self._step,
            removed=int32(self._removed),
            added=tuple(self._added),
            grown_rows=int32([row for row, _ in grown]),
            grown_blocks=int32([block for _, block in grown]),
            rows=int32(rows),
            epochs=int32(epochs),
            starts=int32(starts),
            num_tokens=int32(counts),
            wants=int32(wants).astype("int8"),
        )
        self._added, self._removed = [], []
        return plan

    def read(self, plan: StepPlan, result: StepResult) -> dict[int, int]:
        """Take in a result: the sampled token of each row that had one. Checks its form."""
        assert result.step == plan.step
        tokens = tokens_by_row(plan, result)
        epochs = dict(zip(plan.rows.tolist(), plan.epochs.tolist(), strict=True))
        for row, token in tokens.items():
            state = self.rows.get(row)
            if state is not None and state.epoch == epochs[row]:
                state.token_ids[state.token_ids.index(None)] = token
        return tokens


def tokens_by_row(plan: StepPlan, result: StepResult) -> dict[int, int]:
    """{row: sampled token}, with the result's offsets checked against the plan."""
    assert len(result.offsets) == len(plan.rows) + 1
    assert result.offsets[0] == 0
    assert result.offsets[-1] == len(result.token_ids)
    assert result.token_ids.dtype == result.offsets.dtype == "int32"
    tokens = {}
    for index, (row, want) in enumerate(zip(plan.rows.tolist(), plan.wants.tolist(), strict=True)):
        of_row = result.token_ids[result.offsets[index] : result.offsets[index + 1]].tolist()
        assert len(of_row) == (want == Want.LOGITS)
        if of_row:
            tokens[row] = of_row[0]
    return tokens
