"""One step on the device: plan → tensors → forward → sample → result.

The runner lives in the device thread and knows nothing of loops. The rows' state is in `InputBatch`, keys and values in
the KV cache; a plan changes the first, and the forward pass writes the second.
"""

from __future__ import annotations

import time

import numpy as np
from torch import Tensor

from aioengine.attention.backend import AttentionBackend
from aioengine.core.plan import EMPTY, Int32, StepLogprobs, StepPlan, StepResult, Want
from aioengine.executor.input_batch import InputBatch, StepInputs
from aioengine.executor.protocol import DeviceLost, ExecutorStats
from aioengine.models.decoder import Decoder
from aioengine.sampler import Scratch, sample


class Runner:
    """Runs plans in the order in which they come, each on top of the state that the one before left."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, batch: InputBatch, stats: ExecutorStats) -> None:
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._stats = stats
        self._scratch = Scratch()
        self._broken_by: Exception | None = None

    def step(self, plan: StepPlan) -> StepResult:
        """Run a plan.

        Raises:
            DeviceLost: the plan's deltas could not be applied, so that the rows' state is unknown; so for all later
                plans.
            Exception: the forward pass or the sampler failed. The deltas hold; rows that had a token to sample have a
                meaningless one.
        """
        started = time.perf_counter()
        self._stats.num_steps += 1
        self._apply(plan)
        token_ids, logprobs = self._compute(plan) if len(plan.rows) else (EMPTY, None)
        return StepResult(
            step=plan.step,
            offsets=np.concatenate(([0], np.cumsum(plan.wants == Want.LOGITS))).astype(np.int32),
            token_ids=token_ids,
            logprobs=logprobs,
            device_time_s=time.perf_counter() - started,
        )

    def _apply(self, plan: StepPlan) -> None:
        if self._broken_by is None:
            try:
                return self._batch.apply(plan)
            except Exception as error:
                self._broken_by = error
        raise DeviceLost(f"a plan could not be applied: {self._broken_by}") from self._broken_by

    def _compute(self, plan: StepPlan) -> tuple[Int32, StepLogprobs | None]:
        inputs = self._batch.inputs(plan)
        hidden = self._decoder(inputs.token_ids, inputs.positions, self._attention.begin_step(inputs.attention))
        self._stats.num_computed_tokens += len(inputs.token_ids)
        if not len(inputs.sampled):
            return EMPTY, None
        return self._sample(plan, inputs, hidden)

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> tuple[Int32, StepLogprobs | None]:
        logits = self._decoder.logits(hidden[inputs.last_tokens])
        sampled, logprobs = sample(logits, inputs.sampling, self._scratch)
        token_ids = sampled.int().numpy()
        self._batch.append(plan, inputs, token_ids)
        self._stats.num_sampled_tokens += len(token_ids)
        return token_ids, logprobs
