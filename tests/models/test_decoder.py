"""The decoder gives what transformers gives, for each family, over a paged cache and by whatever operations."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES
from kernels.harness import DEVICE
from models.reference import VOCAB_SIZE, Checkpoint, PagedStep, load, logprobs, reference, token_ids
from nightly import few
from torch import Tensor

from aioengine.kernels.operations import LayerAttention
from aioengine.kernels.operations import plain_torch as oracles
from aioengine.kernels.triton import triton_operations
from aioengine.models.decoder import Decoder
from aioengine.models.model import EmptyStep
from doubles.flipped_operations import FlippedOperations, flipped_operations

HEADS = [{"tie_word_embeddings": is_tied} for is_tied in (True, False)]
CASES = [
    *((family, {}) for family in FAMILIES),
    *itertools.product(("llama2", "qwen2", "qwen3", "gemma3-images"), HEADS),
]
OF_CHECK = ("mistral", "qwen3", "gemma3", "phi3", "olmo2", "gpt-oss")


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logprobs_equal_those_of_transformers(checkpoint: Checkpoint, family: str, overrides: dict[str, Any]) -> None:
    folder, ids = checkpoint(family, **overrides), token_ids()
    decoder = load(folder)
    assert (decoder.head is None) == decoder.config.tie_word_embeddings
    torch.testing.assert_close(logprobs(decoder, ids), reference(folder, ids), atol=1e-4, rtol=0)


# Largest error of a log-probability, and on average. These random models are far more sensitive than trained ones:
# transformers in the same dtype is 0.06 to 0.10 (bfloat16) off its own float32 result on average, and 1.3 at most.
TOLERANCES = {"bfloat16": (1.5, 0.1), "float16": (0.3, 0.012)}


@pytest.mark.parametrize("family", few(["mistral", "qwen3"], of=FAMILIES))
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_half_precision_is_no_worse_than_in_transformers(checkpoint: Checkpoint, family: str, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    # Saved in that dtype, so that both sides start from the same weights.
    folder, ids = checkpoint(family, dtype=torch_dtype), token_ids()
    exact = reference(folder, ids)
    decoder = load(folder)
    assert decoder.config.dtype is torch_dtype
    error = (logprobs(decoder, ids) - exact).abs()
    error_of_transformers = (reference(folder, ids, torch_dtype) - exact).abs()
    largest, mean = TOLERANCES[dtype]
    # Rounding may have a token choose other experts, and then all is another: with experts it is the median token's.
    by_token = error.amax(1), error.mean(1)
    if decoder.config.experts is None:
        assert by_token[0].max() < largest
        assert by_token[1].mean() < mean
    else:
        assert by_token[0].median() < largest
        assert by_token[1].median() < mean
    assert error.mean() < 1.05 * error_of_transformers.mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_asked_dtype_wins_over_the_files(checkpoint: Checkpoint, dtype: str) -> None:
    decoder = load(checkpoint("llama2"), dtype=dtype)
    assert {parameter.dtype for parameter in decoder.parameters()} == {getattr(torch, dtype)}
    assert {table.dtype for table in decoder.rope_tables.values()} == {getattr(torch, dtype)}
    assert logprobs(decoder, token_ids()).isfinite().all()


def test_a_tied_head_takes_no_memory_of_its_own(checkpoint: Checkpoint) -> None:
    tied, untied = (load(checkpoint("llama2", tie_word_embeddings=is_tied)) for is_tied in (True, False))
    assert untied.weight_bytes - tied.weight_bytes == tied.embedding.weight.nbytes == VOCAB_SIZE * 64 * 4


# Several rows in a step

LENGTHS = (70, 19, 30)
# For each step (row, tokens): chunks of prompts and single tokens, together and alone, and padding.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 40), (1, 16)),
    ((1, 1), (0, 13), (-1, 3), (2, 29)),
    ((2, 1), (0, 16), (1, 1)),
    ((-1, 1), (1, 1), (0, 1)),
)
FEW_STEPS = (((0, 5), (2, 3)), ((2, 1), (-1, 1), (0, 1)))


def sequences(seed: int = 0) -> Tensor:
    """The rows' tokens, with rubbish behind their ends."""
    return token_ids(seed, len(LENGTHS) * max(LENGTHS)).view(len(LENGTHS), -1)


@torch.inference_mode()
def logprobs_in_steps(
    decoder: Decoder,
    history: Tensor,
    steps: tuple[tuple[tuple[int, int], ...], ...] = STEPS,
    operations: Any = oracles,
) -> list[Tensor]:
    """For each row the log-probabilities after each of its tokens."""
    step_context = PagedStep(decoder, len(LENGTHS), max(LENGTHS), operations=operations)
    done = [0] * len(LENGTHS)
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    for step in steps:
        rows, first = [], 0
        for row, count in step:
            rows.append([row, done[row] if row >= 0 else 0, first, count])
            first += count
        hidden = decoder(step_context.begin_step(rows, history), step_context)
        assert hidden.dtype == decoder.config.dtype
        logits = decoder.logits(hidden, step_context)
        for row, _, first, count in rows:
            if row >= 0:
                parts[row].append(logits[first : first + count].log_softmax(-1).cpu())
                done[row] += count
    assert steps is not STEPS or done == list(LENGTHS)
    return [torch.cat(row) if row else torch.empty(0, VOCAB_SIZE) for row in parts]


def logprobs_alone(decoder: Decoder, history: Tensor) -> list[Tensor]:
    """As `logprobs_in_steps`, each row at once and alone."""
    return [logprobs(decoder, row[:length]) for row, length in zip(history, LENGTHS, strict=True)]


def assert_close(computed: list[Tensor], expected: list[Tensor], atol: float = 1e-4) -> None:
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("family", few(OF_CHECK, of=FAMILIES))
def test_rows_that_share_steps_get_what_each_gets_alone(checkpoint: Checkpoint, family: str) -> None:
    decoder, history = load(checkpoint(family)), sequences()
    assert_close(logprobs_in_steps(decoder, history), logprobs_alone(decoder, history))


def on_device(decoder: Decoder) -> Decoder:
    decoder.move(torch.device(DEVICE))
    for rope, table in decoder.rope_tables.items():
        decoder.rope_tables[rope] = None if table is None else table.to(DEVICE)
    return decoder


@pytest.mark.parametrize("family", few(["qwen3", "gemma3", "olmo2"], of=FAMILIES))
def test_the_kernels_give_the_same(checkpoint: Checkpoint, family: str) -> None:
    decoder, history = load(checkpoint(family, num_hidden_layers=2)), sequences(1)
    expected = logprobs_alone(decoder, history)
    decoder.use(triton_operations())
    computed = logprobs_in_steps(on_device(decoder), history, FEW_STEPS, triton_operations())
    assert [len(row) for row in computed] == [6, 0, 4]
    assert_close(computed, [row[: len(ours)] for row, ours in zip(expected, computed, strict=True)])


# Weights in other layouts


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_other_operations_unpack_and_pack_each_weight_in_turn(
    checkpoint: Checkpoint, family: str, is_tied: bool
) -> None:
    decoder, history = load(checkpoint(family, tie_word_embeddings=is_tied)), sequences()
    expected, size = logprobs_in_steps(decoder, history), decoder.weight_bytes
    held = {name: decoder.dense(name).clone() for name, _ in decoder.named_parameters()}
    for operations in (flipped_operations, oracles, flipped_operations):
        decoder.use(operations)
        assert {linear.packed.layout for linear in decoder.linears()} == {
            "flipped" if operations is flipped_operations else "rows"
        }
        assert decoder.weight_bytes == size
        assert_close(logprobs_in_steps(decoder, history), expected)
        for name, values in held.items():
            assert torch.equal(decoder.dense(name), values), name


def test_a_change_of_operations_that_fails_halfway_leaves_a_decoder_that_computes(checkpoint: Checkpoint) -> None:
    decoder, history = load(checkpoint("qwen3")), sequences()
    expected = logprobs_in_steps(decoder, history)
    calls: list[None] = []

    class Failing(FlippedOperations):
        def pack(self, *arguments: Any) -> Any:
            calls.append(None)
            if len(calls) == 6:
                raise MemoryError
            return super().pack(*arguments)

    with pytest.raises(MemoryError):
        decoder.use(Failing())
    assert {linear.packed.layout for linear in decoder.linears()} == {"flipped", "rows"}
    assert_close(logprobs_in_steps(decoder, history), expected)
    decoder.use(flipped_operations)
    assert {linear.packed.layout for linear in decoder.linears()} == {"flipped"}
    assert_close(logprobs_in_steps(decoder, history), expected)


@pytest.mark.parametrize("is_moved", [False, True])
def test_values_that_change_or_move_are_seen(checkpoint: Checkpoint, is_moved: bool) -> None:
    first, second = (load(checkpoint("qwen3", seed=seed)) for seed in (0, 1))
    history = sequences()
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if is_moved:
                parameter.data = second.dense(name).clone()
            else:
                parameter.copy_(second.dense(name))
    assert_close(logprobs_in_steps(first, history), logprobs_alone(second, history))


# The operations


def test_a_layer_is_two_norms_one_activation_and_one_attention(checkpoint: Checkpoint) -> None:
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(name)
            return getattr(oracles, name)(*arguments)

        return run

    names = ("rms_norm", "add_rms_norm", "gated_activation", "linear", "embed")
    decoder = load(checkpoint("mistral"))
    decoder.use(SimpleNamespace(**{name: counted(name) for name in names}, pack=oracles.pack, unpack=oracles.unpack))
    seen: list[tuple[int, int | None]] = []

    def attend(qkv: Tensor, layer: LayerAttention) -> Tensor:
        assert qkv.shape == (5, (4 + 2 * 2) * 16)
        assert qkv.is_contiguous()
        assert layer.qk_weight is None
        calls.append("attend")
        seen.append((layer.index, layer.window))
        return qkv[:, : 4 * 16]

    ids = torch.arange(5, dtype=torch.int32)
    with torch.inference_mode():
        assert decoder(ids, SimpleNamespace(attend=attend, embeddings=None)).shape == (5, 64)
    mlp = ["add_rms_norm", "linear", "gated_activation", "linear", "add_rms_norm"]
    assert calls == ["embed", "rms_norm"] + ["linear", "attend", "linear", *mlp] * 3
    assert seen == [(0, 8), (1, 8), (2, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_float32_products(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    decoder = on_device(load(checkpoint("llama2", dtype=dtype)))
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    with torch.inference_mode():
        logits = decoder.logits(hidden, EmptyStep(decoder.config, token_ids(0, 7)))
    assert (logits.dtype, logits.shape) == (torch.float32, (7, VOCAB_SIZE))
    exact = hidden.double() @ decoder.dense("head.weight").double().T
    # A GPU's are not rounded to 16 bits on their way.
    is_rounded = DEVICE == "cpu" and dtype != torch.float32
    tolerance = torch.finfo(dtype).eps if is_rounded else 1e-5
    torch.testing.assert_close(logits.double(), exact, rtol=tolerance, atol=tolerance)


def test_rotation_covers_the_last_position_and_no_more(checkpoint: Checkpoint) -> None:
    decoder = load(checkpoint("llama2"), max_model_len=50)
    (table,) = decoder.rope_tables.values()
    assert decoder.config.max_model_len == len(table) == 50
    ids = token_ids(0, 51)
    assert logprobs(decoder, ids[:50]).isfinite().all()
    with pytest.raises(IndexError):
        logprobs(decoder, ids)
