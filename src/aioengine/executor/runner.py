"""One step on the device: plan → tensors → forward → sample → result.

The runner lives in the device thread and knows nothing of loops. The rows' state is in `InputBatch`, keys and values in
the KV cache; a plan changes the first, and the forward pass writes the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from aioengine.core.executor_protocol import DeviceLost, ExecutorStats
from aioengine.executor.completion_thread import DeferredResult
from aioengine.executor.input_batch import InputBatch, StepInputs
from aioengine.kernels.attention.torch_paged import TorchPagedAttention
from aioengine.models.decoder import Decoder
from aioengine.sampler.blocks import Scratch
from aioengine.sampler.logprobs import prompt_logprobs
from aioengine.sampler.sampling import sample
from aioengine.scheduler.plan import EMPTY, RowFailure, StepPlan, StepResult, int32


def dummy_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
    """Attention where each token sees itself alone, as an `Attend` without a cache."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


class StepRunner(Protocol):
    """Runs plans in the order in which they come, each on top of the state that the one before left."""

    def step(self, plan: StepPlan) -> StepResult | DeferredResult[StepResult]:
        """Run a plan, or launch it.

        Raises:
            DeviceLost: the plan's deltas could not be applied, so that the rows' state is unknown; so for all later
                plans.
            Exception: the forward pass or the sampler failed. The deltas hold; rows that had a token to sample have a
                meaningless one.
        """

    def use(self, decoder: Decoder | None) -> None:
        """Compute with these weights from now on; None: no step may come."""

    def make_cache(self) -> None:
        """Have a KV cache, an empty one if there was none. Needs the weights."""

    def drop_cache(self) -> None:
        """Give up the KV cache, and the memory that steps use again. The rows stay."""

    def dummy_step(self) -> None:
        """Compute one token that no row has, which leaves no trace."""

    def synchronize(self) -> None:
        """Wait for what was launched."""


class Runner:
    """The `StepRunner` of a CPU.

    Args:
        make_attention: over an empty KV cache, now and after `drop_cache`.

    Attributes:
        decoder, attention: while one is None no step may come.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch: InputBatch,
        stats: ExecutorStats,
        make_attention: Callable[[], TorchPagedAttention],
    ) -> None:
        self.decoder: Decoder | None = decoder
        self.attention: TorchPagedAttention | None = make_attention()
        self._make_attention = make_attention
        self._batch = batch
        self._stats = stats
        self._scratch = Scratch()
        self._broken_by: Exception | None = None

    def step(self, plan: StepPlan) -> StepResult:
        decoder, attention = self.decoder, self.attention
        assert decoder is not None, "a plan was launched while the weights were away"
        assert attention is not None, "a plan was launched while the KV cache was away"
        started = time.perf_counter()
        self._stats.num_steps += 1
        self._apply(plan, attention)
        result = self._compute(plan, decoder, attention)
        ended = time.perf_counter()
        return msgspec.structs.replace(result, device_time_s=ended - started, ended_at_s=time.monotonic())

    def use(self, decoder: Decoder | None) -> None:
        self.decoder = decoder

    def make_cache(self) -> None:
        if self.attention is None:
            self.attention = self._make_attention()

    def drop_cache(self) -> None:
        self.attention = None
        self._scratch = Scratch()

    def synchronize(self) -> None:
        pass

    def dummy_step(self) -> None:
        assert self.decoder is not None
        token = torch.zeros(1, dtype=torch.int64)
        self.decoder.logits(self.decoder(token, token, dummy_attention))

    def _apply(self, plan: StepPlan, attention: TorchPagedAttention) -> None:
        if self._broken_by is None:
            try:
                # Copies read no state of rows, which is all that the rest changes: `StepPlan`'s order matters there.
                if len(plan.copied_from):
                    attention.copy_blocks(plan.copied_from, plan.copied_to)
                return self._batch.apply(plan)
            except Exception as error:
                self._broken_by = error
        raise DeviceLost(f"a plan could not be applied: {self._broken_by}") from self._broken_by

    def _compute(self, plan: StepPlan, decoder: Decoder, attention: TorchPagedAttention) -> StepResult:
        result = StepResult(step=plan.step, offsets=int32([0] * (len(plan.rows) + 1)), token_ids=EMPTY)
        if not len(plan.rows):
            return result
        inputs = self._batch.inputs(plan)
        hidden = decoder(inputs.token_ids, inputs.positions, attention.begin_step(inputs.attention))
        self._stats.num_computed_tokens += len(inputs.token_ids)
        if len(inputs.sampled):
            result = self._sample(plan, inputs, decoder.logits(hidden[inputs.last_tokens]))
        if inputs.prompt is not None:
            of_prompts = prompt_logprobs(decoder.logits, hidden, inputs.prompt, decoder.config.vocab_size)
            result = msgspec.structs.replace(result, prompt_logprobs=of_prompts)
        return result

    def _sample(self, plan: StepPlan, inputs: StepInputs, logits: Tensor) -> StepResult:
        sampled = sample(logits, inputs.sampling, self._scratch)
        self._batch.append(plan, inputs, sampled.next_ids)
        self._stats.num_sampled_tokens += len(sampled.token_ids)
        counts = np.zeros(len(plan.rows), np.int32)
        counts[inputs.sampled] = sampled.counts
        return StepResult(
            step=plan.step,
            offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            failures=tuple(RowFailure(int(inputs.sampled[f.index]), f.error) for f in sampled.failures),
        )
