"""Rows for the sampler: as samples' words, or as requests with their tokens; and what plain definitions make of it."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.executor.batch import Batch
from aioengine.executor.launched import make_result
from aioengine.executor.step_words import ExtraWords, FixedWords, Span, num_fixed_words
from aioengine.kernels.operations import Operations
from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow, Status, param_of
from aioengine.kernels.torch.draws import is_allowed
from aioengine.sampler.outputs import DeviceOutputs
from aioengine.sampler.processors import run_processors
from aioengine.sampler.sampler import Sampler, SampleTensors
from aioengine.sampling_params import FILTERS, ROW_PARAMS, RowParams
from aioengine.scheduler.plan import (
    EMPTY,
    Handles,
    LogitsRow,
    Purpose,
    RowAdded,
    RowFailure,
    RowSampling,
    StepLogprobs,
    StepPlan,
    int32,
)

POISON = 0x7F7F7F7F
HANDLES = Handles()


def make_rows(n: int, **columns: Any) -> Tensor:
    """Samples of n rows of logits, int32 [n, SAMPLE_WORDS]; a scalar holds for all of them."""

    def column(name: str, default: float, dtype: type[np.generic]) -> Tensor:
        given = np.broadcast_to(np.asarray(columns.pop(name, default)), n)
        return torch.from_numpy(given.astype(dtype))

    samples = torch.zeros(n, SAMPLE_WORDS, dtype=torch.int32)
    samples[:, SampleRow.LOGITS_ROW] = column("logits_row", 0, np.int32) if "logits_row" in columns else torch.arange(n)
    samples[:, SampleRow.MASK] = column("mask", -1, np.int32)
    samples[:, SampleRow.FLAGS] = int(SampleFlag.FIRST)
    samples[:, SampleRow.CHOICE] = column("choice", 0, np.int32)
    samples[:, SampleRow.OUTPUT_POSITION] = column("positions", 0, np.int32)
    samples[:, SampleRow.SEED_LOW : SampleRow.SEED_HIGH + 1] = column("seed", 0, np.int64).view(torch.int32).view(n, 2)
    for name, kind in ROW_PARAMS.items():
        values = column(name, getattr(RowParams(), name), np.float32 if kind is float else np.int32)
        param_of(samples, name).copy_(values)
    assert not columns, f"no such columns: {columns}"
    return samples


def draw(
    logits: Tensor,
    samples: Tensor,
    masks: Tensor | None = None,
    *,
    is_greedy: bool = False,
    operations: Any = reference,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Tokens and status, int32 [s], by ``operations.draw``, which leaves the logits alone."""
    has_filters = any((param_of(samples, name) != off).any() for name, off in FILTERS.items())
    token_ids = torch.full((len(samples),), POISON, dtype=torch.int32, device=device)
    status, given = token_ids.clone(), logits.to(device, copy=True)
    masks = None if masks is None else masks.to(device)
    operations.draw(given, samples.to(device), masks, token_ids, status, has_filters=has_filters, is_greedy=is_greedy)
    assert torch.equal(given.cpu().view(torch.int32), logits.view(torch.int32))
    return token_ids.cpu(), status.cpu()


def drawn(logits: Tensor, samples: Tensor) -> list[int]:
    """The samples' tokens; none may fail."""
    token_ids, status = draw(logits, samples)
    assert (status == Status.SAMPLED).all()
    return token_ids.tolist()


@dataclass
class Asking:
    """A request's row: how it is sampled, and its tokens so far."""

    sampling: RowSampling
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)


def asking(prompt: Sequence[int] = (0,), output: Sequence[int] = (), **sampling: Any) -> Asking:
    """Greedy, unless told otherwise."""
    processors = HANDLES.add_processors(sampling.pop("logits_processors", ()))
    row = RowSampling(**{"temperature": 0.0, **sampling}, logits_processors=processors)
    return Asking(row, list(prompt), list(output))


class Sampled(NamedTuple):
    """What a step brings.

    Attributes:
        token_ids: int32 [t], the requests' one after the other.
        counts: int64 [n], how many each request has.
        next_ids: int32 [n], what is put behind each request's tokens.
        logprobs, failures: as in `StepResult`.
        logits: float32 [n, vocab], as the draw sees them; of rows that want log-probabilities as they were.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    next_ids: np.ndarray
    logprobs: StepLogprobs | None
    failures: tuple[RowFailure, ...]
    logits: Tensor


class Rows:
    """The rows of requests on the host and on a device, for steps that sample the next token of each.

    Args:
        seed: decides which rows of the executor they have.
    """

    def __init__(
        self, requests: Sequence[Asking], vocab: int, seed: int = 0, operations: Operations = reference
    ) -> None:
        num_rows = len(requests) + 3
        self.requests = requests
        self.rows = random.Random(seed).sample(range(num_rows), len(requests))
        self._operations = operations
        tokens = [request.prompt + request.output for request in requests]
        self.history = torch.zeros(num_rows, max(map(len, tokens)) + 2, dtype=torch.int32)
        self.batch = Batch(max_num_seqs=num_rows, vocab_size=vocab, max_tokens=self.history.shape[1], tile=16)
        self.batch.handles = HANDLES
        self.sampler = Sampler(operations, self.history, vocab)
        self._plan = StepPlan(
            step=1,
            removed=EMPTY,
            added=tuple(
                RowAdded(
                    row=row,
                    token_ids=int32(of_row),
                    num_prompt_tokens=len(request.prompt),
                    block_ids=(int32([0] * -(-len(of_row) // 16)),),
                    sampling=request.sampling,
                )
                for row, request, of_row in zip(self.rows, requests, tokens, strict=True)
            ),
            rows=int32(self.rows),
            epochs=int32([0] * len(requests)),
            starts=int32([len(of_row) - 1 for of_row in tokens]),
            num_tokens=int32([1] * len(requests)),
            purposes=np.full(len(requests), Purpose.SAMPLE, np.int8),
        )
        words, extra = np.full(num_fixed_words(num_rows), POISON, np.int32), ExtraWords()
        fixed = FixedWords.of(words, num_rows)
        deltas = self.batch.apply(self._plan, fixed, extra)
        self.step, _ = self.batch.step(self._plan, fixed, extra, {})
        self._extra = torch.full((extra.num_words,), POISON, dtype=torch.int32)
        extra.write(self._extra.numpy())
        self.fixed = FixedWords.of(torch.from_numpy(words), num_rows)
        self.sampler.make_room(self.batch.rules.sizes, self.batch.num_masks)
        for spans, table in ((deltas.tokens, self.history), (deltas.masks, self.sampler.masks)):
            if spans is not None:
                operations.put_spans(table, self._get(spans).view(-1, 4), self._extra)
        if deltas.rules is not None:
            self.sampler.put_tables(self._get(deltas.rules))

    def _get(self, span: Span) -> Tensor:
        return span.of(self._extra)

    @property
    def sample_of_row(self) -> Tensor:
        """int32 [rows]: the first sample of each row; -1: none."""
        places = torch.full((len(self.history),), -1, dtype=torch.int32)
        places[self.rows] = torch.arange(len(self.rows), dtype=torch.int32)
        return places

    @property
    def samples(self) -> SampleTensors:
        step, fixed, count = self.step, self.fixed, len(self.step.row_of_sample)
        samples = fixed.samples if step.samples is None else self._get(step.samples).view(-1, SAMPLE_WORDS)
        scored_rows = fixed.scored_rows if step.scored_rows is None else self._get(step.scored_rows)
        kept = fixed.kept[: len(self.requests)]
        return SampleTensors(samples[:count], fixed.sample_of_row, scored_rows[:count], kept, fixed.processed_samples)

    def sample(self, logits: Tensor) -> Sampled:
        """A step; ``logits`` are changed."""
        failures, process = dict[int, Exception](), None
        if self.step.processed:
            rows = self.batch.processed_rows(self.step)

            def process(given: Tensor) -> None:
                failures.update(run_processors(given, rows))

        words = torch.full((self.step.sizes.num_words,), POISON, dtype=torch.int32)
        self.launch(logits, DeviceOutputs(words, self.step.sizes), process)
        return self.read(logits, words, failures)

    def launch(
        self, logits: Tensor, out: DeviceOutputs[Tensor], process: Callable[[Tensor], None] | None = None
    ) -> None:
        """What a step does on the device."""
        self.sampler.sample(logits, self.samples, self.step.features, out, process)
        if self.step.extra_pairs is not None:
            self.sampler.score_tokens(logits, self._get(self.step.extra_pairs).view(3, -1), out)

    def read(self, logits: Tensor, words: Tensor, failures: dict[int, Exception]) -> Sampled:
        result = make_result(self.step, words.numpy(), failures, seconds=0.0, ended_at_s=0.0)
        ends = self._plan.starts + 1
        return Sampled(
            token_ids=result.token_ids,
            counts=np.diff(result.offsets),
            next_ids=self.history[self.rows, torch.from_numpy(ends)].numpy(),
            logprobs=result.logprobs,
            failures=result.failures,
            logits=self._masked(logits),
        )

    def _masked(self, logits: Tensor) -> Tensor:
        """Bitmasks are applied where logits are read."""
        samples = self.samples.samples
        samples = samples[(samples[:, SampleRow.FLAGS] & SampleFlag.FIRST != 0) & (samples[:, SampleRow.MASK] >= 0)]
        masks = is_allowed(self.sampler.masks[samples[:, SampleRow.MASK].long()], logits.shape[1])
        masked = logits.clone()
        masked[samples[:, SampleRow.LOGITS_ROW].long()] = logits[samples[:, SampleRow.LOGITS_ROW].long()].masked_fill(
            ~masks, -torch.inf
        )
        return masked


def sample_for(requests: Sequence[Asking], logits: Tensor, seed: int = 0) -> Sampled:
    """A step of these requests; ``logits`` stay as they are."""
    return Rows(requests, logits.shape[1], seed).sample(logits.clone(memory_format=torch.contiguous_format))


def tokens_of(sampled: Sampled) -> list[list[int]]:
    """Each row's."""
    ends = np.cumsum(sampled.counts)
    return [part.tolist() for part in np.split(sampled.token_ids, ends[:-1])]


def random_logits(*shape: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def changed_logits(raw: np.ndarray, request: Asking) -> np.ndarray:
    """A row's logits after its rules, token by token, in float64."""
    s, logits = request.sampling, [float(value) for value in raw]
    vocab, masked = len(logits), set()
    if s.allowed_token_ids:
        masked |= set(range(vocab)) - set(s.allowed_token_ids)
    for word in s.bad_words:
        others = list(word[:-1])
        if not others or request.output[-len(others) :] == others:
            masked.add(word[-1])
    if len(request.output) < s.min_tokens:
        masked |= set(s.stop_ids)
    for token in masked:
        if token < vocab:
            logits[token] = -math.inf
    for token, bias in s.logit_bias:
        if token < vocab:
            logits[token] += bias
    for processor in HANDLES.get_processors(s.logits_processors):
        row = LogitsRow(int32(request.prompt), int32(request.output), s.choice)
        given = torch.tensor([logits], dtype=torch.float32)
        returned = processor(given, [row])
        logits = (given if returned is None else returned)[0].double().tolist()
    for token in range(vocab):
        if token in request.prompt or token in request.output:
            repetition = s.repetition_penalty
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        count = request.output.count(token)
        logits[token] -= s.frequency_penalty * count
        logits[token] -= s.presence_penalty if count else 0.0
    return np.array(logits)


def expected_probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution by its definition, in float64, one token after the other."""
    probabilities = np.exp((logits - logits.max()) / temperature)
    probabilities /= probabilities.sum()
    kept = probabilities >= min_p * probabilities.max()
    if top_k > 0:
        kept &= probabilities >= np.sort(probabilities)[::-1][min(top_k, len(logits)) - 1]
    probabilities = np.where(kept, probabilities, 0)
    probabilities /= probabilities.sum()
    mass, last_kept = 0.0, 1.0
    for probability in np.sort(probabilities)[::-1]:
        if mass >= top_p:
            break
        mass += probability
        last_kept = probability
    probabilities = np.where(probabilities >= last_kept, probabilities, 0)
    return probabilities / probabilities.sum()


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts could be drawn from probabilities: false for 1 in 30,000 fair ones.

    What has no probability is never drawn: one count there is too many.
    """
    if counts[probabilities == 0].any():
        return False
    total = counts.sum()
    common = probabilities * total >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) == 1:
        return True
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(observed) - 1
    # Wilson and Hilferty: the cube root of a chi-square variable is nearly normal.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return bool(deviation < 4)
