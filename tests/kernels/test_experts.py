"""Mixtures of experts: the choice and the grouped products, against formulas, transformers and the oracle."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from kernels.harness import (
    ALL,
    BOTH,
    COMPILED,
    DEVICE,
    SMALL,
    TOLERANCES,
    assert_close,
    assert_same,
    int32,
    make_conversions_right,
    native,
    normal,
    quiet_numpy,
    triton,
)
from nightly import few, nightly
from torch import Tensor

from aioengine.kernels.operations import ExpertWeights
from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.packed_weight import CodedWeight, PackedWeight, in_panels

pytestmark = quiet_numpy


def stacked(matrices: Tensor) -> Tensor:
    """[E, N, ...] as rows, each matrix from a panel on, NaN in between, which must not show."""
    room = matrices.new_full((len(matrices), in_panels(matrices.shape[1]), *matrices.shape[2:]), torch.nan)
    room[:, : matrices.shape[1]] = matrices
    return room.flatten(0, 1)


def made(
    ops: Any,
    num_experts: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    pack: Callable[[Any, Tensor], PackedWeight] = lambda ops, weight: ops.pack(weight),
) -> ExpertWeights:
    gate_up = normal(num_experts, 2 * intermediate, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
    down = normal(num_experts, hidden, intermediate, dtype=dtype, seed=2, scale=intermediate**-0.5)
    biases = [stacked(normal(*each.shape[:2], dtype=dtype, seed=3)) if has_bias else None for each in (gate_up, down)]
    return ExpertWeights(
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        gate_up=pack(ops, stacked(gate_up)),
        down=pack(ops, stacked(down)),
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )


def choices(num_tokens: int, num_experts: int, num_chosen: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    return reference.route(normal(num_tokens, num_experts, seed=seed), num_experts, num_chosen, is_normalised=True)


# The choice


@SMALL
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [(7, 5, 3), (3, 128, 8), *nightly((1, 1, 1), (17, 60, 4), (123, 60, 4))],
)
def test_the_highest_logits_choose_and_weigh(
    ops: ModuleType, num_tokens: int, num_experts: int, num_chosen: int, has_shared: bool, is_normalised: bool
) -> None:
    logits = normal(num_tokens, num_experts + has_shared, seed=num_experts, scale=3.0)
    ids, weights = ops.route(logits, num_experts, num_chosen, is_normalised=is_normalised)
    exact = logits.double()[:, :num_experts]
    chosen = exact.topk(num_chosen)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), chosen.indices)
    expected = chosen.values.softmax(1) if is_normalised else exact.softmax(1).gather(1, chosen.indices)
    if has_shared:
        expected = torch.cat((expected, logits.double()[:, num_experts:].sigmoid()), 1)
    assert_close(weights, expected.float())


@SMALL
def test_of_equal_logits_the_lowest_id_is_first_and_a_nan_is_within_range(ops: ModuleType) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 0.0], [0.0] * 5, [torch.nan] * 5, [0.0, torch.nan, 1.0, 2.0, 3.0]])
    ids, _ = ops.route(logits.to(DEVICE), 5, 3, is_normalised=True)
    assert_same(ids[:2], int32([[1, 2, 0], [0, 1, 2]]))
    assert ids.min() >= 0
    assert ids.max() < 5
    assert ids[3, 0] == 1


# The products


@COMPILED
@pytest.mark.parametrize("has_bias", [*nightly(False), True])
@pytest.mark.parametrize("dtype", few([torch.bfloat16], of=TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "intermediate"),
    [(1, 4, 2, 64, 32), (7, 5, 3, 72, 40), *few([], of=[(123, 9, 5, 130, 66), (250, 3, 1, 64, 128)])],
)
def test_equals_the_oracle(
    ops: ModuleType,
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_conversions_right(monkeypatch)
    x, shared = (normal(num_tokens, hidden, dtype=dtype, seed=seed) for seed in (5, 6))
    ids, weights = choices(num_tokens, num_experts, num_chosen)
    results = []
    for each in (ops, reference):
        of_layer = made(each, num_experts, hidden, intermediate, dtype, has_bias=has_bias)
        alone = each.experts(x, ids, weights, of_layer).clone()
        with_shared = torch.cat((weights, normal(num_tokens, 1, seed=7)), 1)
        results.append((alone, each.experts(x, ids, with_shared, of_layer, shared).clone()))
    for computed, expected in zip(*results, strict=True):
        assert computed.dtype == dtype
        assert_close(computed, expected, factor=4)


def codes(ops: Any, weight: Tensor) -> PackedWeight:
    """Of 4 bits with a table and scales of groups of 32, as in MXFP4."""
    rows, columns = weight.shape
    coded = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(columns)).to(torch.uint8)
    scales = normal(rows, -(-columns // 32), seed=rows).exp2().to("cpu") * 0.01
    return ops.pack(CodedWeight(coded, 4, torch.linspace(-6, 6, 16), scales, None, 32), None, weight.dtype)


CODINGS: dict[str, Callable[[Any, Tensor], PackedWeight]] = {
    "int8": lambda ops, weight: ops.pack(weight.nan_to_num(), "int8"),
    "int4": lambda ops, weight: ops.pack(weight.nan_to_num(), "int4"),
    "table": codes,
}


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 23])
def test_quantised_experts_by_native_kernels_equal_the_oracle_and_are_the_same_in_any_company(
    num_tokens: int, dtype: torch.dtype, coding: str
) -> None:
    x, (ids, weights) = normal(num_tokens, 128, dtype=dtype), choices(num_tokens, 5, 3)
    theirs, ours = (made(ops, 5, 128, 96, dtype, pack=CODINGS[coding]) for ops in (reference, native))
    assert "panels" in ours.gate_up.layout
    computed = native.experts(x, ids, weights, ours).clone()
    assert_close(computed, reference.experts(x, ids, weights, theirs), factor=4)
    alone = [native.experts(x[n:][:1], ids[n:][:1], weights[n:][:1], ours).clone() for n in range(num_tokens)]
    assert torch.equal(torch.cat(alone), computed)


@pytest.mark.parametrize("coding", [*nightly("int4"), "table"])
@pytest.mark.parametrize(("dtype", "num_tokens"), [*nightly((torch.bfloat16, 1)), (torch.float32, 7)], ids=str)
def test_experts_of_codes_in_triton_equal_the_oracle(
    num_tokens: int, dtype: torch.dtype, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_conversions_right(monkeypatch)
    x, (ids, weights) = normal(num_tokens, 128, dtype=dtype), choices(num_tokens, 5, 3)
    ours, theirs = (made(ops, 5, 128, 96, dtype, pack=CODINGS[coding]) for ops in (triton, reference))
    computed = triton.experts(x, ids, weights, ours)
    # The table is not exact in bfloat16.
    factor = 32 if coding == "table" and dtype == torch.bfloat16 else 4
    assert_close(computed, reference.experts(x, ids, weights, theirs), factor=factor)


def test_experts_of_codes_that_no_kernel_multiplies_are_packed_dense_for_a_gpu() -> None:
    """A step of them asks nothing of the host, which a graph could not."""
    weight = CodedWeight(normal(128, 64).byte(), 8, None, normal(128, 8, seed=1), None, 8)
    for coded in (weight, weight.rows()):
        packed = triton.pack(coded, None, torch.bfloat16)
        assert (packed.layout, packed.coding, packed.shape) == ("rows", None, (128, 64))
        assert_same(packed.values, weight.dense().bfloat16())


@ALL
@pytest.mark.parametrize("num_tokens", [7, *nightly(1, 40)])
def test_experts_without_tokens_and_one_with_all(ops: ModuleType, num_tokens: int) -> None:
    """Whatever lies in experts that were not chosen shows nowhere: they are not read."""
    of_layer, x = made(ops, 6, 64, 32, torch.float32), normal(num_tokens, 64)
    ids, weights = int32([[3, 1]] * num_tokens), normal(num_tokens, 2, seed=1)
    expected = ops.experts(x, ids, weights, of_layer).clone()
    for packed in (of_layer.gate_up, of_layer.down):
        of_expert = packed.values.view(6, -1)
        of_expert[[0, 2, 4, 5]] = torch.nan
    assert_same(ops.experts(x, ids, weights, of_layer), expected)
    assert expected.isfinite().all()


@COMPILED
@pytest.mark.parametrize("dtype", few([torch.float32], of=TOLERANCES), ids=str)
def test_a_token_is_the_same_in_any_company(
    ops: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_conversions_right(monkeypatch)
    of_layer, x = made(ops, 5, 72, 40, dtype), normal(23, 72, dtype=dtype)
    ids, weights = choices(23, 5, 3)
    together = ops.experts(x, ids, weights, of_layer).clone()
    for token in (0, 7, 22):
        one = slice(token, token + 1)
        assert torch.equal(ops.experts(x[one], ids[one], weights[one], of_layer), together[one])
    order = torch.arange(22, -1, -1, device=DEVICE)
    assert torch.equal(ops.experts(x[order], ids[order], weights[order], of_layer), together[order])


BLOCKS: dict[str, Callable[[], Any]] = {
    "Mixtral": lambda: transformers.MixtralConfig(num_local_experts=5, hidden_size=64, intermediate_size=48),
    "Qwen2Moe": lambda: transformers.Qwen2MoeConfig(
        num_experts=7, num_experts_per_tok=3, hidden_size=64, moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
    ),
    "Qwen3Moe": lambda: transformers.Qwen3MoeConfig(
        num_experts=7, num_experts_per_tok=3, hidden_size=64, moe_intermediate_size=48, norm_topk_prob=True
    ),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", few(["Qwen2Moe"], of=BLOCKS))
def test_the_two_together_are_the_block_of_transformers(ops: ModuleType, name: str) -> None:
    config = BLOCKS[name]()
    module = getattr(transformers.models, config.model_type)
    block = getattr(module, f"modeling_{config.model_type}").__dict__[f"{name}SparseMoeBlock"](config)
    for parameter in block.parameters():
        parameter.data = normal(*parameter.shape, seed=parameter.numel(), scale=parameter.shape[-1] ** -0.5)
    block.to(DEVICE)
    x, experts = normal(11, 64), block.experts
    router, shared = block.gate.weight, None
    if name == "Qwen2Moe":
        router, shared = torch.cat((router, block.shared_expert_gate.weight)), block.shared_expert(x)
    with torch.inference_mode():
        expected = block(x[None])[0]
        is_normalised = name != "Qwen2Moe"
        ids, weights = ops.route(
            x @ router.T, experts.num_experts, config.num_experts_per_tok, is_normalised=is_normalised
        )
        of_layer = ExpertWeights(
            num_experts=experts.num_experts,
            hidden=64,
            intermediate=48,
            gate_up=ops.pack(stacked(experts.gate_up_proj)),
            down=ops.pack(stacked(experts.down_proj)),
        )
        assert_close(ops.experts(x, ids, weights, of_layer, shared), expected, factor=4)
