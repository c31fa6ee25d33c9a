"""One step: plan → words → one copy to the device → launches, or one graph → one copy back, awaited elsewhere.

The runner lives in the device thread and never waits for the device (but for a logits processor, which must see the
tokens so far): what a step needs of the one before it is on the device already. So the next step is launched while
this one runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aioengine.core.executor_protocol import DeviceLost, ExecutorStats
from aioengine.executor.accelerator import Accelerator, DeviceEvent, Work
from aioengine.executor.batch import NUM_TOP_SIZES, Batch, Deltas, Step
from aioengine.executor.graphs import DecodeGraphs, GraphKey
from aioengine.executor.launched import LaunchedStep, PinnedBuffers
from aioengine.executor.paged_attention import PagedAttention
from aioengine.executor.step_words import ExtraWords, FixedWords, num_fixed_words
from aioengine.kernels.operations import Operations
from aioengine.kernels.sample_rows import SAMPLE_WORDS, SampleFlag, SampleRow, param_of
from aioengine.kernels.torch.draws import chunks
from aioengine.kernels.zeros import lazy_zeros
from aioengine.models.model import ChosenTokens, EmptyStep, Model, StepContext
from aioengine.sampler.outputs import DeviceOutputs, OutputSizes
from aioengine.sampler.processed import CHUNK_ELEMENTS, process_logits
from aioengine.sampler.processors import ProcessedRow, run_processors
from aioengine.sampler.rules import RuleSizes
from aioengine.sampler.sampler import Features, Sampler, SampleTensors
from aioengine.scheduler.plan import StepPlan, StepResult

logger = logging.getLogger("aioengine")

REHEARSED_TOKENS = 16

START_FEATURES = (Features(), Features(has_filters=True))
"""The sampling of most steps; greedy ones fit in there, too."""

WARM_FEATURES = (
    Features(is_greedy=True),
    Features(num_top=0),
    Features(num_top=NUM_TOP_SIZES[-1]),
    Features(has_masks=True),
    Features(has_masks=True, has_filters=True),
    Features(has_masks=True, is_greedy=True),
    Features(is_penalised=True),
    Features(is_penalised=True, rules=RuleSizes(64, 64, 64), num_top=NUM_TOP_SIZES[1]),
)
"""Each sampling kernel at least once, beside the plain draw."""


class Runner:
    """Launches plans in the order in which they come, each on top of the state that the one before leaves.

    Args:
        decoder: on the device.
        make_attention: makes the KV cache, over block tables.
        max_in_flight: steps that may be launched and not waited for.
        num_groups: of layers, each with block tables of its own.
        graph_sizes: numbers of rows for which decode steps become graphs.

    Attributes:
        graphs: of decode steps.
        handles: the grammars and logits processors of plans.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        decoder: Model,
        make_attention: Callable[[Tensor], PagedAttention],
        stats: ExecutorStats,
        *,
        max_num_seqs: int,
        block_size: int,
        max_in_flight: int,
        num_groups: int,
        graph_sizes: tuple[int, ...],
    ) -> None:
        c, device = decoder.config, accelerator.device
        self._accelerator = accelerator
        self._operations = operations = accelerator.operations
        self._stats = stats
        self._block_size = block_size
        self._max_model_len = c.max_model_len
        self._decoder: Model | None = decoder
        self._batch = Batch(
            max_num_seqs=max_num_seqs,
            vocab_size=c.vocab_size,
            max_tokens=c.max_model_len + 1,
            tile=self._tile(),
            num_groups=num_groups,
            hidden_size=c.hidden_size,
        )
        self.handles = self._batch.handles
        self._vocab_size = c.vocab_size
        self._history = lazy_zeros(max_num_seqs, c.max_model_len + 1, dtype=torch.int32, device=device)
        self._block_tables = lazy_zeros(
            num_groups, max_num_seqs, -(-c.max_model_len // block_size), dtype=torch.int32, device=device
        )
        self._words = torch.zeros(num_fixed_words(max_num_seqs, num_groups), dtype=torch.int32, device=device)
        self._fixed = FixedWords.of(self._words, max_num_seqs, num_groups)
        self._extra = torch.zeros(0, dtype=torch.int32, device=device)
        """On the device: the words that the step brings beside the fixed ones, until the next step's come."""
        self._logits: Tensor | None = None
        """Logits of the step between its forward pass and its sampling, float32 [n, vocab]."""
        self._logits_of_tokens: Callable[[Tensor], Tensor] | None = None
        """As `_logits_of` makes it, of the same step."""
        self._late_logits = torch.zeros(0, c.vocab_size, dtype=torch.float32, device=device)
        """Where the graphs of forward passes leave theirs, which are sampled when the host has made masks."""
        self._late = torch.zeros(0, dtype=torch.int32, device=device)
        """On the device: spans, and the bitmasks of the rows that have grammars."""
        self._out = torch.zeros(
            OutputSizes(max_num_seqs, NUM_TOP_SIZES[-1]).num_words, dtype=torch.int32, device=device
        )
        self._sampler = Sampler(operations, self._history, c.vocab_size)
        self._staging = deque(PinnedBuffers(accelerator, max_num_seqs, num_groups) for _ in range(max_in_flight))
        self._learning: deque[LaunchedStep] = deque()
        self._make_attention = make_attention
        self._last_copy: DeviceEvent | None = None
        self._broken_by: Exception | None = None
        self._captures_all = False
        self.graphs = DecodeGraphs(accelerator, graph_sizes)
        self._attention: PagedAttention | None = None
        self.use(decoder)

    # What it computes with

    def use(self, decoder: Model | None) -> None:
        """Compute with other weights from now on; None: with none, and no step may come."""
        self.graphs.clear()
        if decoder is not None:
            decoder.use(self._operations)
        self._decoder = decoder
        self._capture_all()

    def use_operations(self, operations: Operations) -> None:
        """Compute by other operations from now on: the rows, the cache and the weights' values stay."""
        self._operations = self._sampler.operations = operations
        self._batch.tile = self._tile()
        if self._attention is not None:
            self._attention.operations = operations
        self.use(self._decoder)

    def _take_newer_operations(self) -> None:
        """Go on with the accelerator's newer operations if it has some, or else with those that there are."""
        before = self._operations
        try:
            operations = self._accelerator.newer_operations()
            if operations is not None:
                self.use_operations(operations)
        except Exception:  # no memory for a weight's copy, or a library that cannot be loaded
            logger.exception("native kernels could not take over, so that steps are slow")
            self.use_operations(before)

    def _tile(self) -> int:
        """The most query tokens of an attention tile."""
        assert self._decoder is not None
        c = self._decoder.config
        return self._operations.prefill_tile(c.num_heads, c.num_kv_heads, c.head_dim)

    def make_cache(self) -> None:
        """Have a KV cache, empty if there was none."""
        if self._attention is None:
            self._attention = self._make_attention(self._block_tables)
            self._batch.first_blocks = self._attention.first_blocks
            self._attention.operations = self._operations
            self._capture_all()

    def drop_cache(self) -> None:
        """Give up the KV cache and the graphs over it. The rows stay."""
        self.synchronize()
        self.graphs.clear()
        self._attention = None

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._accelerator.synchronize()

    def dummy_step(self) -> None:
        """Compute one token that no row has, which leaves no trace; waits for it."""
        self._accelerator.enqueue(self.profile_run, 1, 1)
        self.synchronize()

    def profile_run(self, num_tokens: int, num_logits_rows: int) -> None:
        """Run the largest step, without rows, to measure its peak of memory.

        Args:
            num_tokens, num_logits_rows: of the step.
        """
        assert self._decoder is not None
        device = self._accelerator.device
        tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        context = EmptyStep(self._decoder.config, tokens, len(self._history))
        hidden = self._decoder(tokens, context)
        logits = self._logits_of(hidden, context)(torch.arange(num_logits_rows, device=device))
        samples = torch.zeros(num_logits_rows, SAMPLE_WORDS, dtype=torch.int32, device=device)
        samples[:, SampleRow.LOGITS_ROW] = torch.arange(num_logits_rows, dtype=torch.int32, device=device)
        samples[:, SampleRow.FLAGS] = int(SampleFlag.LOGPROBS)
        for name in ("temperature", "top_p"):
            param_of(samples, name).fill_(0.9)
        num_top = min(NUM_TOP_SIZES[-1], self._vocab_size)
        sizes = OutputSizes(num_logits_rows, num_top, num_prompt=num_tokens, num_prompt_top=num_top)
        out = DeviceOutputs(torch.zeros(sizes.num_words, dtype=torch.int32, device=device), sizes)
        scored = out.sampled
        self._operations.top_logprobs(logits, samples, scored.log_mass, scored.top_ids, scored.top_logprobs)
        self._operations.draw(logits, samples, None, out.token_ids, out.status, has_filters=True, is_greedy=False)
        processed_samples = samples[
            next(chunks(num_logits_rows, self._vocab_size, CHUNK_ELEMENTS)), SampleRow.LOGITS_ROW
        ]
        process_logits(logits, samples, processed_samples, None, out.token_ids, logits, has_filters=True)
        self._sampler.score_prompt(self._logits_of(hidden, context), tokens.new_zeros(2, num_tokens), out.prompt)

    def warm_up(self, *, captures_all: bool, on_capture: Callable[[int, int], None]) -> None:
        """Run each kind of step once, over rows that are all padding, so that no request waits for a compiler; and
        capture the graphs of plain decode steps.

        Args:
            captures_all: graphs of all sizes, now and whenever weights and cache are back after a sleep; else none.
            on_capture: called with (done, all).
        """
        self._accelerator.enqueue(self._pad_all)
        self._accelerator.enqueue(self._rehearse_prefill)
        for features in (*START_FEATURES, *WARM_FEATURES):
            features = features._replace(num_top=min(features.num_top, self._vocab_size))
            self._accelerator.enqueue(self._sampler.make_room, features.rules, 1)
            self._accelerator.enqueue(self._decode_work(GraphKey(1, features)))
        self._accelerator.enqueue(self._decode_work(GraphKey(len(self._history), Features())))  # contexts in one part
        self._captures_all = captures_all
        self._capture_all(on_capture)
        self.synchronize()

    def _capture_all(self, on_capture: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture the graphs of plain decode steps, the largest first, since the others then fit into its memory."""
        if not self._captures_all or self._decoder is None or self._attention is None:
            return
        self._accelerator.enqueue(self._pad_all)
        keys = [GraphKey(size, features) for size in self.graphs.sizes[::-1] for features in START_FEATURES]
        for done, key in enumerate(keys):
            on_capture(done, len(keys))
            self.graphs.run(key, self._decode_work, captures_first=True)
        on_capture(len(keys), len(keys))
        self.synchronize()

    def _pad_all(self) -> None:
        """Make the fixed words those of a step of padding."""
        self._words.zero_()
        fixed = self._fixed
        each = torch.arange(len(fixed.rows), dtype=torch.int32, device=self._words.device)
        for section in (fixed.rows, fixed.decodes, fixed.grown, fixed.samples):
            section[:, 0] = -1  # a row, or a row of logits
        fixed.rows[:, 2], fixed.rows[:, 3], fixed.decodes[:, 1] = each, 1, each
        fixed.sample_of_row.fill_(-1)
        fixed.scored_rows.fill_(-1)
        fixed.kept.fill_(-1)

    def _rehearse_prefill(self) -> None:
        assert self._decoder is not None
        assert self._attention is not None
        device = self._words.device
        rows = torch.tensor([[-1, 0, 0, REHEARSED_TOKENS]], dtype=torch.int32, device=device)
        token_ids, positions, slots = self._operations.gather_tokens(
            rows, self._history, self._block_tables, self._block_size, REHEARSED_TOKENS
        )
        tiles = torch.tensor([[-1, 0, 1, 0]], dtype=torch.int32, device=device)
        no_block = torch.tensor([-1], dtype=torch.int32, device=device)
        for table in (self._history, self._sampler.masks):
            self._operations.put_spans(table, tiles, no_block)
        self._attention.copy_blocks(no_block, no_block)
        self._decoder(token_ids, self._attention.begin(positions=positions, slots=slots, tiles=tiles, rows=rows))

    # Steps

    def step(self, plan: StepPlan) -> StepResult | LaunchedStep:
        """Launch a plan; on the host it has run then, and this is its result.

        Raises:
            DeviceLost: the plan's deltas could not be applied, so that the rows' state is unknown; so for all later
                plans.
            Exception: it could not be launched. The deltas hold; rows that had a token to sample have a meaningless
                one.
        """
        assert self._decoder is not None, "a plan was launched while the weights were away"
        assert self._attention is not None, "a plan was launched while the KV cache was away"
        self._stats.num_steps += 1
        staging = self._staging[0]
        self._staging.rotate(-1)
        try:
            self._take_newer_operations()
            self._learn(sum(launched.is_done for launched in self._learning))  # before its memory is used again
            if self._broken_by is not None:
                raise self._broken_by
            extra, fixed = ExtraWords(), staging.sections
            deltas = self._batch.apply(plan, fixed, extra)
            step, size = self._batch.step(plan, fixed, extra, self.graphs.size_for)
            step.deltas = deltas
            started = self._accelerator.record()
            self._upload(step, staging)
        except Exception as error:
            self._broken_by = error
            raise DeviceLost(f"a plan could not be applied: {error}") from error
        failures: dict[int, Exception] = {}
        try:
            out = self._compute(step, size, failures, staging)
            staging.make_room(step.sizes.num_words)
            done = self._accelerator.copy_out(out, staging.out, step.sizes.num_words)
        except Exception:
            self._end_failed(step)
            raise
        staging.lend(done)
        self._last_copy = done
        launched = LaunchedStep(step, staging.out, (started, done), failures, self._batch.grammar_rows, keep=out)
        if step.learning or step.grammars:
            self._learning.append(launched)
        return launched.wait() if self._accelerator.is_host else launched

    def _end_failed(self, step: Step) -> None:
        """Wait for what was launched of a step that brings no result: the next step takes its memory.

        Its rows have their blocks all the same, or steps behind it would write into those of the rows' last tenants;
        and a token, whatever it is, or the host would count one too few.
        """
        try:
            self._accelerator.enqueue(self._grow_rows)
            self.synchronize()
            self._learn(len(self._learning))
        except Exception as error:
            raise DeviceLost(f"the device failed: {error}") from error
        for _, known in step.learning:
            known.append(0)

    def _grow_rows(self) -> None:
        """Put the blocks that rows get in a step, the last whose words were uploaded, into their tables."""
        self._operations.put_spans(self._block_tables.flatten(0, 1), self._fixed.grown, self._fixed.grown_blocks)

    def _upload(self, step: Step, staging: PinnedBuffers) -> None:
        """Bring the words to the device, and change the rows there."""
        room = self._batch.rules.sizes, self._batch.num_masks
        if not self._sampler.has_room(*room):
            self._accelerator.enqueue(self._sampler.make_room, *room)
            self.graphs.clear_ruled()
        num_words = step.extra.num_words
        if num_words:
            staging.write_extra(step.extra)
        self._accelerator.enqueue(self._change_rows, staging.fixed.tensor, staging.extra.tensor, num_words, step.deltas)

    def _change_rows(self, fixed: Tensor, extra_words: Tensor, num_words: int, deltas: Deltas) -> None:
        self._words.copy_(fixed, non_blocking=True)
        if not num_words:
            return
        if num_words > len(self._extra):
            self._extra = self._extra.new_empty(1 << (num_words - 1).bit_length())
        self._extra[:num_words].copy_(extra_words[:num_words], non_blocking=True)
        extra = self._extra
        tables = (
            (deltas.tokens, self._history),
            (deltas.blocks, self._block_tables.flatten(0, 1)),
            (deltas.masks, self._sampler.masks),
        )
        if deltas.copies is not None:
            assert self._attention is not None
            self._attention.copy_blocks(*deltas.copies.of(extra).chunk(2))
        for spans, table in tables:
            if spans is not None:
                self._operations.put_spans(table, spans.of(extra).view(-1, 4), extra)
        if deltas.rules is not None:
            self._sampler.put_tables(deltas.rules.of(extra))

    def _compute(self, step: Step, size: int | None, failures: dict[int, Exception], staging: PinnedBuffers) -> Tensor:
        """Enqueue the step; returns where its words will be.

        Args:
            failures: filled by row of logits with what goes wrong with its processors.
        """
        self._stats.num_computed_tokens += step.num_tokens
        self._stats.num_sampled_tokens += len(step.row_of_sample)
        if size is not None:
            if self._last_copy is not None:
                self._accelerator.enqueue_after(self._last_copy)  # it reads where this step is going to write
            key = GraphKey(size, step.features)
            if not step.grammars:
                self.graphs.run(key, self._decode_work)
            elif self._accelerator.is_host:  # all before it has run, so that its masks need not come late
                self._mask(step, staging)
                self.graphs.run(key, self._decode_work)
            else:
                if size > len(self._late_logits):
                    self.graphs.clear_late()
                    self._late_logits = self._late_logits.new_zeros(1 << (size - 1).bit_length(), self._vocab_size)
                self.graphs.run(GraphKey(size, Features(), is_late=True), self._forward_work)
                self._mask(step, staging)
                self._accelerator.enqueue(self._sample_decodes, key, self._late_logits[:size])
            return self._out
        # Memory of its own: the last graph's words may be on their way to the host still.
        out = torch.empty(max(step.sizes.num_words, 1), dtype=torch.int32, device=self._accelerator.device)
        self._accelerator.enqueue(self._compute_logits, step, out)
        rows: list[ProcessedRow] = []
        self._mask(step, staging)
        if step.processed:  # functions of the host's, which must see the tokens so far
            self._learn(len(self._learning))
            rows = self._batch.processed_rows(step)
        self._accelerator.enqueue(self._sample, step, out, rows, failures)
        return out

    def _decode_work(self, key: GraphKey) -> Work:
        """A step of single tokens as work of sizes alone, over the fixed words, that can be captured."""
        return lambda: self._sample_decodes(key, self._decode(key.size))

    def _forward_work(self, key: GraphKey) -> Work:
        """The first part of a step whose tokens are sampled late; it leaves its logits for the second."""
        size, late_logits = key.size, self._late_logits

        def work() -> None:
            late_logits[:size] = self._decode(size)

        return work

    def _decode(self, size: int) -> Tensor:
        """Compute float32 [size, vocab], the logits of a step of single tokens."""
        assert self._decoder is not None
        return self._decoder.logits(*self._forward(size, size, size, None, self._max_model_len))

    def _sample_decodes(self, key: GraphKey, logits: Tensor) -> None:
        size, fixed = key.size, self._fixed
        out = DeviceOutputs(self._out, OutputSizes(size, key.features.num_top))
        self._sampler.sample(logits, self._tensors(fixed.samples, fixed.scored_rows, size, size), key.features, out)

    def _tensors(self, samples: Tensor, scored_rows: Tensor, num_samples: int, num_logits: int) -> SampleTensors:
        fixed = self._fixed
        return SampleTensors(
            samples[:num_samples], fixed.sample_of_row, scored_rows[:num_samples], fixed.kept[:num_logits],
            fixed.processed_samples,
        )  # fmt: skip

    def _mask(self, step: Step, staging: PinnedBuffers) -> None:
        """Bring the masks of the rows that have grammars, which wait for the tokens before: not on the device, which
        is busy with the step's forward pass meanwhile."""
        if not step.grammars:
            return
        self._learn(len(self._learning))
        count, width = len(step.grammars), self._sampler.masks.shape[1]
        words = staging.late_words(count * (4 + width))
        masks = words[4 * count :].reshape(count, width)
        self._batch.grammar_rows.fill([(sample.row, sample.position) for sample in step.grammars], masks)
        spans = words[: 4 * count].reshape(count, 4)
        spans[:, 0] = [sample.mask for sample in step.grammars]
        spans[:, 1], spans[:, 3] = 0, width
        spans[:, 2] = 4 * count + np.arange(count) * width
        self._accelerator.enqueue(self._put_masks, staging.late.tensor, count, len(words))

    def _put_masks(self, late: Tensor, count: int, num_words: int) -> None:
        if num_words > len(self._late):
            self._late = self._late.new_empty(1 << (num_words - 1).bit_length())
        words = self._late[:num_words]
        words.copy_(late[:num_words], non_blocking=True)
        self._operations.put_spans(self._sampler.masks, words[: 4 * count].view(-1, 4), words)

    def _forward(
        self, num_rows: int, num_tokens: int, num_decodes: int, tiles: Tensor | None, max_context: int
    ) -> tuple[Tensor, StepContext]:
        """Compute [T, hidden_size], of the rows of the fixed words; arguments as in `Step`."""
        assert self._decoder is not None
        assert self._attention is not None
        self._grow_rows()
        fixed, attention = self._fixed, self._attention
        token_ids, positions, slots = self._operations.gather_tokens(
            fixed.rows[:num_rows], self._history, self._block_tables, self._block_size, num_tokens
        )
        context = attention.begin(
            positions=positions,
            slots=slots,
            decodes=fixed.decodes[:num_decodes] if num_decodes else None,
            tiles=tiles,
            rows=fixed.rows[:num_rows],
            num_splits=attention.num_splits(num_decodes, max_context) if num_decodes else 1,
            max_context=max_context,
        )
        return self._decoder(token_ids, context), context

    def _logits_of(self, hidden: Tensor, context: StepContext) -> Callable[[Tensor], Tensor]:
        """A function of the indices of some of a step's tokens that computes their logits."""
        decoder = self._decoder
        assert decoder is not None
        return lambda tokens: decoder.logits(hidden.index_select(0, tokens), ChosenTokens(context, tokens))

    def _compute_logits(self, step: Step, out: Tensor) -> None:
        """Compute the logits of the samples, and write the vectors."""
        assert self._decoder is not None
        self._logits_of_tokens = self._logits = None
        if not step.num_tokens:
            self._grow_rows()
            return
        tiles = step.tiles.of(self._extra).view(-1, 4) if step.tiles is not None else None
        found = self._forward(len(step.plan.rows), step.num_tokens, step.num_decodes, tiles, step.max_context)
        self._logits_of_tokens = self._logits_of(*found)
        if step.pooled_tokens is not None:
            vectors = found[0].index_select(0, step.pooled_tokens.of(self._extra))
            DeviceOutputs(out, step.sizes).vectors.copy_(vectors)
        if len(step.sampled):
            if step.logits_tokens is None:
                self._logits = self._decoder.logits(*found)
            else:
                self._logits = self._logits_of_tokens(step.logits_tokens.of(self._extra))

    def _sample(self, step: Step, out: Tensor, rows: list[ProcessedRow], failures: dict[int, Exception]) -> None:
        process = (lambda logits: failures.update(run_processors(logits, rows))) if rows else None
        outputs, fixed, logits = DeviceOutputs(out, step.sizes), self._fixed, self._logits
        if logits is not None:
            samples, scored_rows = fixed.samples, fixed.scored_rows
            if step.samples is not None and step.scored_rows is not None:
                samples = step.samples.of(self._extra).view(-1, SAMPLE_WORDS)
                scored_rows = step.scored_rows.of(self._extra)
            at = self._tensors(samples, scored_rows, len(step.row_of_sample), len(logits))
            self._sampler.sample(logits, at, step.features, outputs, process)
            if step.extra_pairs is not None:
                self._sampler.score_tokens(logits, step.extra_pairs.of(self._extra).view(3, -1), outputs)
        if step.prompt is not None:
            assert self._logits_of_tokens is not None
            prompt = step.prompt.of(self._extra).view(2, -1)
            self._sampler.score_prompt(self._logits_of_tokens, prompt, outputs.prompt)
        self._logits_of_tokens = self._logits = None

    def _learn(self, count: int) -> None:
        """Take in the tokens of the oldest of the steps whose tokens the host must know; waits for them."""
        for _ in range(count):
            self._learning.popleft().learn()
