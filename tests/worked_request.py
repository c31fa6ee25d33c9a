"""Prints the request that ARCHITECTURE works through: ``python tests/worked_request.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.plan import StepPlan, StepResult, int32
from aioengine.scheduler.scheduler import Scheduler
from aioengine.scheduler.sequence import Request, Sequence, make_choices
from aioengine.scheduler.steps import Budget

PROMPT = int32([11, 12, 13, 14, 15])
SAMPLED = int32([21, 22, 23, 2, 24])
"""What the device samples, a step each."""
EOS = 2
MAX_TOKENS = 8
BLOCK_SIZE = 4
IN_FLIGHT = 2


def lines() -> Iterator[str]:
    """The request's way through the scheduler, a line an event and a line for the columns of its row after it."""
    scheduler = Scheduler(
        KVManager((6,), BLOCK_SIZE, enable_prefix_caching=True),
        max_num_seqs=2,
        budget=Budget(8, 8),
        eos_token_ids=(EOS,),
    )
    params = SamplingParams(max_tokens=MAX_TOKENS)
    request = Request(
        request_id="0", prompt_token_ids=PROMPT, params=params, seed=1, max_total_tokens=len(PROMPT) + MAX_TOKENS
    )
    sequence = make_choices(request)
    scheduler.add_sequence(sequence)
    yield f"add         prompt {PROMPT}, at most {MAX_TOKENS} tokens more, EOS {EOS}, blocks of {BLOCK_SIZE}"
    launched: deque[StepPlan] = deque()
    while True:
        while len(launched) < IN_FLIGHT and (plan := scheduler.schedule_step()) is not None:
            launched.append(plan)
            yield from describe(plan)
            yield columns(scheduler, sequence)
        if not launched:
            return
        plan = launched.popleft()
        token_ids = SAMPLED[plan.step : plan.step + 1]
        result = StepResult(step=plan.step, offsets=int32([0, 1]), token_ids=token_ids)
        output = scheduler.apply_result(plan, result)
        dropped = "" if output.sequences else ", dropped: the row has another epoch"
        yield f"apply {plan.step}     token_ids {token_ids}{dropped}"
        yield columns(scheduler, sequence)


def describe(plan: StepPlan) -> Iterator[str]:
    yield (
        f"launch {plan.step}    rows {plan.rows} epochs {plan.epochs} starts {plan.starts} "
        f"num_tokens {plan.num_tokens} purposes {plan.purposes}"
    )
    for added in plan.added:
        yield f"            added: row {added.row}, token_ids {added.token_ids}, block_ids {added.block_ids[0]}"
    if len(plan.grown_rows):
        yield f"            grown_rows {plan.grown_rows} grown_blocks {plan.grown_blocks}"


def columns(scheduler: Scheduler, sequence: Sequence) -> str:
    if sequence.row < 0:
        return f"            finished: {sequence.finish_reason}, output_ids {sequence.output_ids}"
    table, row = scheduler.table, sequence.row
    columns = {name: getattr(table, name) for name in ("computed", "scheduled", "expected", "last")}
    columns["capacity"] = table.capacity[0]  # of the one group of layers
    numbers = " ".join(f"{name} {column[row]:2}" for name, column in columns.items())
    return f"            row {row}: {numbers}   output_ids {sequence.output_ids}"


if __name__ == "__main__":
    np.set_printoptions(linewidth=200)
    print("\n".join(lines()))
