"""A scheduler and a `FakeExecutor` that a test steps by hand, without a loop."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from integrity import check_integrity

from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.cache_layout import FULL_ATTENTION, CacheLayout
from aioengine.scheduler.kv_manager import KVManager
from aioengine.scheduler.plan import Float32, GrammarHandle, Purpose, StepPlan, StepResult, int32
from aioengine.scheduler.policy import Policy
from aioengine.scheduler.scheduler import Scheduler
from aioengine.scheduler.sequence import Product, Reason, Request, Sequence, make_choices, resume_choice
from aioengine.scheduler.steps import Budget, StepOutput
from aioengine.testing.fake_executor import Sampler, sample_hash
from doubles.fake_executor import FakeExecutor, FakeStep
from doubles.run_grammar import RunGrammar

EOS = 7
VOCAB = 1000


class Core:
    """The core at ``depth`` steps in flight, over blocks of four tokens.

    Each plan is checked when it is launched, and the scheduler after each change.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_mixed_prefill_tokens: int = 64,
        depth: int = 1,
        caching: bool = True,
        vocab_size: int = VOCAB,
        sampler: Sampler | None = None,
        policy: Policy | None = None,
        layout: CacheLayout = FULL_ATTENTION,
        more_blocks: tuple[int, ...] = (),
        max_model_len: int | None = None,
    ) -> None:
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len or num_blocks * block_size,
            layout=layout,
            more_blocks=more_blocks,
            vocab_size=vocab_size,
            max_in_flight=depth,
            sampler=sampler,
            is_manual=True,
        )
        self.kv = KVManager(
            (num_blocks, *more_blocks),
            block_size,
            enable_prefix_caching=caching,
            layout=layout,
            max_in_flight=depth,
            max_step_tokens=max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            budget=Budget(max_num_batched_tokens, max_mixed_prefill_tokens),
            eos_token_ids=(EOS,),
            policy=policy,
        )
        self.depth = depth
        self.launched: deque[tuple[StepPlan, FakeStep]] = deque()
        self.outputs: list[StepOutput] = []
        self.vectors: dict[Sequence, Float32] = {}
        self.sequences: list[Sequence] = []
        self._scheduled: dict[tuple[int, int], int] = {}
        self._num_computed: Counter[Sequence] = Counter()

    def add(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = 8,
        reason: Reason = Reason.NONE,
        seed: int = 1,
        priority: int = 0,
        cache_salt: str = "",
        has_grammar: bool = False,
        tenant: str = "",
        choice: int | None = None,
        num_given: int = 0,
        product: Product = "tokens",
        **params: Any,
    ) -> Sequence:
        """Add a request; returns its first choice, whose ``children`` are the others.

        Args:
            choice: the only one that is wanted; another engine has sampled ``num_given`` tokens of it, or all but one.
        """
        prompt_token_ids = int32(list(prompt))
        most = self.executor.info.max_model_len
        request = Request(
            request_id=str(len(self.sequences)),
            prompt_token_ids=prompt_token_ids,
            params=SamplingParams(**params),
            seed=seed,
            max_total_tokens=min(len(prompt_token_ids) + max_tokens, most),
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            product=product,
        )
        sequence = make_choices(request, eos_token_ids=(EOS,))
        if has_grammar and product == "tokens":
            handle = GrammarHandle(None)
            self.executor.handles.put_grammar(handle, RunGrammar(EOS))
            for member in (sequence, *sequence.children):
                member.sampling = msgspec.structs.replace(member.sampling, grammar=handle)
        if choice is not None and product == "tokens":
            due, *_ = expected_output((sequence, *sequence.children)[choice], vocab_size=self.executor.info.vocab_size)
            sequence = resume_choice(sequence, choice, due[: min(num_given, len(due) - 1)])
        self.scheduler.add_sequence(sequence, reason)
        self.sequences += [sequence, *sequence.children]
        return sequence

    def launch(self) -> StepPlan | None:
        """Schedule and launch one step, if there is one."""
        assert len(self.launched) < self.depth
        plan = self.scheduler.schedule_step()
        if plan is not None:
            self._check_plan(plan)
            self.launched.append((plan, self.executor.launch(plan)))
        check_integrity(self.scheduler)
        return plan

    def launch_all(self) -> list[StepPlan]:
        """Launch until the device takes no more or there is none."""
        plans = []
        while len(self.launched) < self.depth and (plan := self.launch()) is not None:
            plans.append(plan)
        return plans

    def land(self) -> StepOutput | None:
        """Finish the oldest launched step and apply its result; None if it failed."""
        plan, step = self.launched.popleft()
        try:
            result = wait_for(step)
        except Exception:
            self.scheduler.fail_step(plan)
            check_integrity(self.scheduler)
            return None
        output = self.scheduler.apply_result(plan, result)
        self.outputs.append(output)
        self.vectors.update(output.vectors)
        check_integrity(self.scheduler)
        return output

    def step(self) -> StepOutput | None:
        """Launch as many steps as the device takes, then land the oldest."""
        self.launch_all()
        return self.land()

    def run(self) -> None:
        """Step until there is no more to do. Ten steps a token would be slow; more are taken for endless."""
        max_steps = 10 * sum(sequence.limit for sequence in self.sequences) + 1
        for _ in range(max_steps):
            self.launch_all()
            if not self.launched:
                return
            self.land()
        raise AssertionError(f"not done in {max_steps} steps: {self.scheduler.sequences()}")

    def fail_next(self) -> None:
        """Make the next step that is launched fail."""
        self.executor.make_step_fail(self.executor.stats.num_steps, RuntimeError("the step broke"))

    @property
    def num_computed_tokens(self) -> int:
        return self.executor.stats.num_computed_tokens

    def num_computed_of(self, sequence: Sequence) -> int:
        """Tokens that were computed for one sequence, again ones included."""
        return self._num_computed[sequence]

    def _check_plan(self, plan: StepPlan) -> None:
        """What every plan promises; what a device could not run is the executor's to refuse."""
        assert plan.step == self.executor.stats.num_steps, "plans are numbered without a gap"
        held = self.executor.rows()
        columns = [name for name in plan.__struct_fields__ if name not in ("step", "added", "purposes")]
        arrays = [getattr(plan, name) for name in columns]
        assert all(array.dtype == np.int32 for array in arrays)
        assert plan.purposes.dtype == np.int8
        assert not any(array.flags.writeable for array in (*arrays, plan.purposes))
        assert len(plan.rows) == len(plan.epochs) == len(plan.starts) == len(plan.num_tokens) == len(plan.purposes) > 0
        assert plan.num_tokens.min() >= 1
        budget = self.scheduler.budget
        assert plan.num_tokens.sum() <= budget.max_tokens
        removed, rows = plan.removed.tolist(), plan.rows.tolist()
        assert len(set(removed)) == len(removed)
        assert set(removed) <= held.keys(), "a row is removed that nobody had"
        added = {line.row for line in plan.added}
        assert len(added) == len(plan.added)
        assert not added & (held.keys() - set(removed)), "a row is added that somebody has"
        assert added <= set(rows), "a row is added and not used"
        assert len(set(rows)) == len(rows), "a row stands there twice"
        assert set(plan.grown_rows.tolist()) <= set(rows), "a row grows that computes nothing"
        occupants = {sequence.row: sequence for sequence in self.scheduler.table.running}
        assert set(rows) <= occupants.keys(), "a row computes whose sequence is blocked or gone"
        num_decodes = 0
        columns = (plan.epochs, plan.starts, plan.num_tokens, plan.purposes)
        for row, epoch, start, num_tokens, want in zip(rows, *(c.tolist() for c in columns), strict=True):
            end = start + num_tokens
            if row not in added:
                assert start == self._scheduled[row, epoch], "a token is computed twice or left out"
            self._scheduled[row, epoch] = end
            self._num_computed[occupants[row]] += num_tokens
            has_grammar = occupants[row].sampling.grammar is not None  # whose forced tokens the device knows already
            known = len(held[row][0]) if row not in added and not has_grammar else occupants[row].num_tokens
            num_decodes += row not in added and num_tokens == 1 and end >= known
            is_behind = (want != Purpose.NOTHING) == (end == known)
            assert is_behind or has_grammar, "a row samples when all its known tokens are computed"
            assert end < occupants[row].limit, "the last token is sampled and never computed"
        if num_decodes:
            num_others = int(plan.num_tokens.sum()) - num_decodes
            assert num_others <= budget.max_mixed_prefill_tokens, "decodes wait for a longer chunk than they may"


def wait_for(step: FakeStep) -> StepResult:
    """The result of a step, at once."""
    step.complete()
    waiting = step.finish()
    try:
        waiting.send(None)
    except StopIteration as stop:
        result: StepResult = stop.value
        return result
    raise AssertionError("a step that is done made somebody wait")


def assert_run_as_alone(*sequences: Sequence) -> None:
    """Each has ended with what it brings alone."""
    for sequence in sequences:
        assert (sequence.output_ids, sequence.finish_reason, sequence.stop_reason) == expected_output(sequence)


def expected_output(sequence: Sequence, *, vocab_size: int = VOCAB) -> tuple[list[int], str, int | None]:
    """What a sequence brings when it runs alone on a perfect device: (token ids, finish reason, stop reason)."""
    prompt: list[int] = sequence.prompt.tolist()
    params = sequence.request.params
    output: list[int] = []
    grammar = sequence.sampling.grammar
    matcher = RunGrammar(EOS).matcher() if grammar is not None else None
    while True:
        token = sample_hash(prompt + output, sequence.sampling, vocab_size=vocab_size)
        if matcher is not None:
            if token == EOS and params.ignore_eos:
                token += 1
            token = (matcher.forced() or [token])[0]
            matcher.consume([token])
        output.append(token)
        if token == EOS and (not params.ignore_eos or matcher is not None):
            return output, "stop", None
        if token in params.stop_token_ids:
            return output, "stop", token
        if len(prompt) + len(output) == sequence.limit:
            return output, "length", None
