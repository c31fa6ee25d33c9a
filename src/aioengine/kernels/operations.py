"""The operations of a decoder's step, as a protocol with three implementations.

`aioengine.kernels.triton_operations` is made of the Triton kernels in this package, one operation a file;
`aioengine.kernels.torch.operations` is plain torch: the oracle, which runs anywhere. Both are modules of functions with
these names; `aioengine.kernels.native.operations` is a class, for CPUs. Shapes are those of one step: T tokens, h query
heads, g KV heads, d head size, n rows of logits, s samples (tokens to be sampled), V vocabulary. Unless said otherwise
tensors are contiguous, on one device, and ``x`` stands for float32, bfloat16 or float16. The launchers of kernels raise
InternalError where tensors do not fit each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from aioengine.kernels.packed_weight import CodedRows, CodedWeight, PackedWeight, Quantization, UnpackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """How one layer attends: all that a step asks of it between the products before and behind attention.

    Attributes:
        index: of the layer, from 0: where its keys and values are.
        rope_table: as in `Operations.rotate_and_write`; layers of a kind share one. None: not rotated.
        qk_weight, eps, qk_offset, is_qk_norm_wide: of the norm of queries and keys, as there.
        scale, window, soft_cap, sinks, slopes: as in `PagedKV`.
    """

    index: int
    rope_table: Tensor | None
    qk_weight: Tensor | None
    eps: float
    scale: float
    window: int | None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    qk_offset: float = 0.0
    is_qk_norm_wide: bool = False


Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
"""SiLU(x) = x · σ(x), or GELU by tanh: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) (Hendrycks and Gimpel, 2016,
arXiv:1606.08415); or gpt-oss's, x · σ(1.702 · x), of the gate cut off above 7, times up + 1, with up cut off beyond ±7.
"""


class PagedKV(NamedTuple):
    """The keys and values of a layer, and how they are attended to.

    Attributes:
        k_cache, v_cache: as in `Operations.rotate_and_write`; hold this step's tokens already.
        block_tables: int32 [rows, blocks of the longest], of all the executor's rows.
        scale: of the scores.
        window: the most positions that a query sees, itself included; None: all.
        soft_cap: c, above 0: each score s, scaled already, becomes c · tanh(s / c); None: it stays.
        sinks: float32 [h], the score of one more key for each query head, neither scaled nor capped, which counts in
            the softmax's sum alone (Agarwal et al., 2025, arXiv:2508.10925); None: there is none.
        slopes: float32 [h]: slope · (the key's position - the query's) is added to each score, once it is scaled and
            capped (Press et al., 2021, "ALiBi", arXiv:2108.12409); None: nothing is.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    scale: float
    window: int | None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The gated MLPs that a layer's tokens choose among, for `Operations.experts`.

    An expert's matrix begins at a multiple of `PANEL` rows, so that it can be packed and read like a matrix alone; rows
    behind it, up to the next, mean nothing.

    Attributes:
        num_experts: E.
        hidden, intermediate: sizes of an expert's inputs and outputs, and between its matrices.
        gate_up: E matrices [2 · intermediate, hidden] one below the other, in each the gate first.
        down: E matrices [hidden, intermediate] one below the other.
        gate_up_bias, down_bias: x, a number for each row of these; None: there are none.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = "silu"


class Operations(Protocol):
    # Products with weights

    def pack(
        self,
        weight: Tensor | UnpackedRows | CodedWeight | CodedRows,
        quantization: Quantization | None = None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """Bring a weight into the layout that `linear` and `embed` read; the result takes the place of ``weight``.

        Not quantised, the result is in the memory of ``weight``: either ``weight`` itself, so that later changes of it
        count, or its bytes in another order. Quantised, it has memory of its own, and is made block by block. Codes
        stay at their width where `linear` reads them; else the result is dense, which `PackedWeight.coding` tells.

        Args:
            weight: [out_features, in_features], x; to be quantised it may also be the rows of another packed weight.
                Or codes, which are not quantised further.
            quantization: "int8": symmetric, with a scale for each output. "int4": with a scale for each group of
                inputs of each output. What `unpack` gives of such a weight is packed without a further error.
            dtype: of what it is multiplied with and of its embeddings; None: as ``weight``, float32 of codes.
        """

    def unpack(self, packed: PackedWeight, rows: slice | None = None) -> Tensor:
        """The dense matrix: a copy, unless ``packed.layout`` is "rows".

        Args:
            rows: one of its `row_blocks`, to be unpacked alone; None: all.
        Returns:
            [out_features, in_features], as it was packed; float32 where it is quantised, in which its values are exact.
        """

    def unpack_codes(self, packed: PackedWeight) -> CodedRows:
        """What `pack` made of codes, as codes again, exactly; for weights that have a ``coding``."""

    def linear(
        self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x · Wᵀ + b, summed in float32.

        Args:
            x: [T, in_features], of ``packed.dtype``. With "int8" weights each row is rounded to int8 values with a
                scale for that row, and the sums are exact integers.
            bias: [out_features], same dtype, or None.
            out_dtype: of the result, rounded to once where the device can; None: as ``x``.
        Returns:
            [T, out_features].
        """

    def embed(self, token_ids: Tensor, packed: PackedWeight) -> Tensor:
        """Rows of a matrix of whatever layout: a tied embedding and head are one weight.

        Args:
            token_ids: int32 [T], below out_features.
        Returns:
            [T, in_features], of ``packed.dtype``, in memory of its own.
        """

    # The decoder

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x / √(mean(x²) + ε) · (w + offset), in float32, rounded once (Zhang and Sennrich, 2019, arXiv:1910.07467).

        Args:
            x: [T, hidden]; weight: [hidden], same dtype.
        Returns:
            [T, hidden], same dtype.
        """

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        """Add ``x`` · scale to ``residual`` in place (rounded to its dtype), and return `rms_norm` of the sum.

        Args:
            x, residual: [T, hidden], same dtype.
        """

    def rms_norm_add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        """Add `rms_norm` of ``x`` to ``residual`` in place, rounded once, to its dtype.

        Args:
            x, residual: [T, hidden], same dtype.
        """

    def gated_activation(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """activation(gate) · up, in float32, rounded once (Shazeer, 2020, arXiv:2002.05202).

        Args:
            gate_up: [T, 2 · intermediate], gate first; for "clamped_silu" gate and up in turn, number by number.
        Returns:
            [T, intermediate].
        """

    def scale(self, x: Tensor, factor: float, soft_cap: float | None = None) -> None:
        """Multiply by ``factor`` in place, in float32, rounded once; with a soft cap c each product y becomes
        c · tanh(y / c) before that.

        Args:
            x: [any, any].
        """

    def route(self, logits: Tensor, num_experts: int, num_chosen: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
        """Choose each token's experts: those of the highest logits (Shazeer et al., 2017, arXiv:1701.06538).

        Args:
            logits: float32 [T, E], or [T, E + 1], the last that of an expert which all tokens share.
            num_experts: E. num_chosen: k, at most E.
            is_normalised: the weights are a softmax over the chosen, else over all E.
        Returns:
            ids: int32 [T, k], by falling logits, of equal ones the lowest id first.
            weights: float32 [T, k], or [T, k + 1], the last the sigmoid of the shared expert's logit.
        """

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, of_layer: ExpertWeights, shared: Tensor | None = None
    ) -> Tensor:
        """Σ weight · down(activation(gate_up(x))) over each token's experts, of which no others are read.

        Products round as `linear` and `gated_activation` do, but for the last, whose float32 sums are weighted, added
        in the order of ``ids`` and rounded once: a token's result does not depend on the other tokens.

        Args:
            x: [T, hidden].
            ids: int32 [T, k], below E. weights: float32 [T, k]; with ``shared`` [T, k + 1].
            shared: [T, hidden], same dtype as ``x``: what the shared expert made of it, added last.
        Returns:
            [T, hidden], same dtype as ``x``.
        """

    def rotate_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        rope_table: Tensor | None,
        qk_weight: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        qk_offset: float = 0.0,
        *,
        is_qk_norm_wide: bool = False,
    ) -> Tensor:
        """Normalise each head's query and key (where there is a weight), rotate them (Su et al., 2021,
        arXiv:2104.09864, halves layout), and write keys and values to the cache.

        Args:
            qkv: [T, (h + 2 g) · d]: queries, keys, values.
            positions: int32 [T].
            slots: int32 [T], where the key and value go in the cache seen as [blocks · block_size, g, d]; -1: nowhere.
            rope_table: [positions, 2 · d], cos then sin, sin negative in its first half; rotated = x · cos +
                roll(x, d / 2) · sin. Same dtype as ``qkv``, or float32. None: nothing is rotated.
            qk_weight: [h + g, d], of `rms_norm` over each head, or None.
            qk_offset: added to the weight, as there.
            is_qk_norm_wide: a token's queries of all heads are normalised as one row, and so are its keys.
            k_cache, v_cache: [blocks, block_size, g, d], same dtype as ``qkv``; on a GPU also float8_e4m3fn, which
                saturates; on a CPU also int8 [blocks, block_size, g, d + 4], where the last 4 bytes are the scale, in
                float32, of what is before them.
        Returns:
            q: [T, h, d].
        """

    def attention_output(self, q: Tensor) -> Tensor:
        """Room for what `attend_decode` and `attend_prefill` write, uninitialised, until it is next asked for.

        Returns:
            [T, h, d], same dtype as ``q``.
        """

    def attend_decode(
        self, q: Tensor, kv: PagedKV, decodes: Tensor, out: Tensor, *, num_splits: int, max_context: int
    ) -> None:
        """Attend single query tokens to their rows' cached keys, long contexts in splits (Dao et al., 2023,
        "Flash-Decoding").

        Args:
            q: [T, h, d].
            decodes: int32 [m, 3]: row, index of its token in ``q`` and ``out``, context length with this token. Row -1
                is padding: the token's row of ``out`` becomes 0.
            out: [T, h, d], same dtype as ``q``; the tokens of ``decodes`` are written, no others.
            num_splits: into how many parts, 1 or more, each context is cut; parts beyond a short context are empty.
            max_context: no context is longer; a bound for the grid, not more.
        """

    def attend_prefill(self, q: Tensor, kv: PagedKV, tiles: Tensor, out: Tensor) -> None:
        """Attend tiles of consecutive query tokens to their rows' cached keys, causally (Dao, 2023, arXiv:2307.08691).

        Args:
            tiles: int32 [m, 4]: row, index of the first token in ``q``, number of tokens (1 to ``prefill_tile``),
                position of the first token. Row -1 is padding: nothing is done.
            q, out: as in `attend_decode`.
        """

    def prefill_tile(self, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """The most query tokens in a tile of `attend_prefill`."""

    # The rows' state

    def put_spans(self, target: Tensor, spans: Tensor, words: Tensor) -> None:
        """Copy spans of words into rows of a table.

        Args:
            target: int32 [rows, width], changed in place.
            spans: int32 [m, 4]: row, first column, first word, number of words. Row -1 is padding. None overlap.
            words: int32 [any].
        """

    def gather_tokens(
        self, rows: Tensor, history: Tensor, block_tables: Tensor, block_size: int, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What each token of a step is, where it stands, and where its KV goes.

        Args:
            rows: int32 [b, 4]: row, position of its first token, index of that in the step, number of tokens. Row -1
                is padding: its tokens become id 0 at position 0 with slot -1.
            history: int32 [all rows, any].
            block_tables: int32 [groups, all rows, any].
            num_tokens: T; the rows cover all of them.
        Returns:
            token_ids, positions: int32 [T] each. slots: int32 [groups, T].
        """

    def rows_of_tokens(self, rows: Tensor, num_rows: int, num_tokens: int) -> Tensor:
        """The row of each token of a step.

        Args:
            rows: as in `gather_tokens`.
            num_rows: of the executor; tokens of padding get this number.
        Returns:
            int32 [T].
        """

    def append_tokens(self, history: Tensor, samples: Tensor, token_ids: Tensor) -> None:
        """Put the tokens of the samples that have `SampleFlag.FIRST` at the ends of their rows' histories, in place.

        Args:
            history: int32 [rows, any]. token_ids: int32 [s].
            samples: int32 [s, SAMPLE_WORDS], as in `aioengine.kernels.sampling.sample_rows`.
        """

    def copy_blocks(self, caches: Tensor, copied_from: Tensor, copied_to: Tensor) -> None:
        """Copy whole blocks in each of several caches, in place.

        Args:
            caches: [any, blocks, block_size, g, d].
            copied_from, copied_to: int32 [c]; no block is in both, and none twice in the second; -1: nothing.
        """

    # Rules: logits are changed in place. Only samples that have `SampleFlag.FIRST` count.

    def edit_logits(self, logits: Tensor, samples: Tensor, sample_of_row: Tensor, edits: Tensor) -> None:
        """Add to logits, in place; -inf masks, whatever is there, NaN and +inf too.

        Several edits may meet on one logit: they add up, and one mask is enough.

        Args:
            logits: float32 [n, V]; samples: int32 [s, SAMPLE_WORDS].
            sample_of_row: int32 [rows], the first sample of each row; -1: it does not sample in this step.
            edits: int32 [4, e]: rows; tokens; the bits of what is added, a float32; and the output positions below
                which the edits are made. Row -1 is padding; edits of rows that do not sample are passed over.
        """

    def ends_of_bad_words(
        self,
        samples: Tensor,
        sample_of_row: Tensor,
        history: Tensor,
        word_rows: Tensor,
        word_offsets: Tensor,
        word_ids: Tensor,
        edit_values: Tensor,
    ) -> None:
        """For bad words of several tokens: whether the row's *output* ends with all but the word's last token.

        Args:
            word_rows: int32 [w]; -1: padding. word_offsets: int32 [w + 1] and word_ids: int32 [any]: the tokens of each
                word but its last.
            edit_values: float32 [w], becomes -inf where it does, else 0: for `edit_logits` with the words' last tokens.
        """

    def penalise(self, logits: Tensor, samples: Tensor, history: Tensor, counters: Tensor) -> None:
        """Penalties on tokens that were there already, in place: repetition (Keskar et al., 2019, arXiv:1909.05858) on
        those of prompt and output, then frequency and presence on those of the output.

        Args:
            history: int32 [rows, any]; ids of V and above are passed over.
            counters: int32 [s or more, V], zeros, which it leaves as zeros.
            Samples without penalties are passed over.
        """

    # Sampling

    def draw(
        self,
        logits: Tensor,
        samples: Tensor,
        masks: Tensor | None,
        token_ids: Tensor,
        status: Tensor,
        *,
        has_filters: bool,
        is_greedy: bool,
    ) -> None:
        """Choose each sample's token: the highest logit at temperature 0, else by Gumbel noise over what min-p, then
        top-k, then top-p keep.

        Tokens of equal logits are kept or dropped together; of equal scores the lowest id wins. +inf is chosen for
        certain. The noise is that of (seed, choice, output position, token id) in
        `aioengine.kernels.torch.sampling.gumbel`.

        Args:
            logits: float32 [n, V]; only read.
            samples: int32 [s, SAMPLE_WORDS].
            masks: int32 [m, ⌈V / 32⌉]: bit ``t % 32`` of word ``t // 32`` says that token t is allowed; None: no sample
                has one.
            token_ids, status: int32 [s], written; padding becomes 0 and `Status.SAMPLED`.
            has_filters: False: no sample has a top-k, top-p or min-p, which takes one pass over the logits.
            is_greedy: True: all temperatures are 0.
        """

    # Log-probabilities, of logits as the model gave them

    def top_logprobs(self, logits: Tensor, samples: Tensor, log_mass: Tensor, ids: Tensor, logprobs: Tensor) -> None:
        """The k likeliest tokens in the rows of logits of samples with `SampleFlag.LOGPROBS`; outputs of others stay.

        Args:
            log_mass: float32 [s], logsumexp of the row of logits.
            ids: int32 [s, k], the likeliest first, of equal ones the lowest id; k may be 0, and is at most V.
            logprobs: float32 [s, k].
        """

    def look_up(
        self, logits: Tensor, logits_rows: Tensor, token_ids: Tensor, log_mass: Tensor, logprobs: Tensor, ranks: Tensor
    ) -> None:
        """A token's log-probability in a row of logits, and its rank: 1 plus the number of tokens with a higher logit.

        Args:
            logits_rows: int32 [m], rows of ``logits``; -1: passed over. token_ids: int32 [m], below V.
            log_mass: float32 [m], of each of those rows.
            logprobs: float32 [m]; ranks: int32 [m]; both are written.
        """
