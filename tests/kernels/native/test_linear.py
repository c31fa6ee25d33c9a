"""Products by native kernels against float64 ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from nightly import nightly
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aioengine.errors import InternalError
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import plain_torch as plain
from aioengine.kernels.packed_weight import BLOCK_NUMBERS, CodedWeight, Quantization
from aioengine.kernels.torch.quantized import INT4_GROUP, quantize
from aioengine.models.decoder import Linear

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 8, 64), (7, 96, 100), (13, 200, 1), (250, 40, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(team: Team, dtype: torch.dtype, rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    operations = NativeOperations(team)
    x, weight = made(rows, inputs, dtype=dtype), made(outputs, inputs, dtype=dtype, seed=1)
    bias = made(outputs, dtype=dtype, seed=2) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    packed = operations.pack(weight.clone())
    assert torch.equal(operations.unpack(packed), weight)
    for out_dtype in (None, torch.float32):
        got = operations.linear(x, packed, bias, out_dtype)
        assert got.dtype == (out_dtype or dtype)
        tolerance = TOLERANCES[dtype] if out_dtype is None else 1e-4
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * inputs**0.5)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [*((dtype, kind) for dtype in TOLERANCES for kind in (None, "int8")), (torch.bfloat16, "int4")],
    ids=str,
)
@pytest.mark.parametrize("inputs", [512, 200])
def test_a_row_is_the_same_in_any_company(
    teams: list[Team], dtype: torch.dtype, inputs: int, quantization: Quantization | None
) -> None:
    x, weight = made(200, inputs, dtype=dtype), made(320, inputs, dtype=dtype, seed=1)
    results = []
    for team in teams:
        operations = NativeOperations(team)
        packed = operations.pack(weight.clone(), quantization)
        assert "panels" in packed.layout
        whole = operations.linear(x, packed, None).clone()
        for num_rows in range(1, 7):
            some = operations.linear(x[7 : 7 + num_rows], packed, None)
            assert torch.equal(some, whole[7 : 7 + num_rows])
        alone = [operations.linear(x[row : row + 1], packed, None).clone() for row in range(0, 200, 7)]
        assert torch.equal(torch.cat(alone), whole[::7])
        results.append(whole)
    assert torch.equal(*results)


CODINGS = [(4, "linear"), (4, "e2m1"), (4, "normal"), (8, "linear"), (8, "e4m3"), (8, "normal")]


def made_of_codes(
    outputs: int, inputs: int, bits: int, table: str, group: int, *, has_offsets: bool, scales_dtype: torch.dtype
) -> CodedWeight:
    generator, num_codes = torch.Generator().manual_seed(0), 1 << bits
    codes = torch.randint(0, num_codes, (outputs, inputs), generator=generator, dtype=torch.uint8)
    normal_values = torch.erfinv(torch.linspace(-0.99, 0.99, num_codes))
    values = {
        "linear": None,
        "e2m1": torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
        "e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0),
        "normal": normal_values,
    }[table]
    step = 2 / num_codes if values is None else 1 / float(values.max())
    scales, offsets = (step * made(outputs, -(-inputs // group), seed=seed).to(scales_dtype).float() for seed in (1, 2))
    return CodedWeight(codes, bits, values, scales, offsets if has_offsets else None, group)


@pytest.mark.parametrize(("bits", "table"), CODINGS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "group", "has_offsets", "scales_dtype"),
    [
        (32, 1, 16, True, torch.float32),
        (200, 7, 32, False, torch.float16),
        (200, 130, 200, True, torch.float16),
        (336, 123, 128, True, torch.bfloat16),
        (96, 64, 1000, False, torch.float32),
    ],
)
def test_products_with_codes_are_those_of_what_they_stand_for_in_any_company(
    teams: list[Team],
    bits: int,
    table: str,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    group: int,
    has_offsets: bool,
    scales_dtype: torch.dtype,
) -> None:
    weight = made_of_codes(outputs, inputs, bits, table, group, has_offsets=has_offsets, scales_dtype=scales_dtype)
    x, bias, dense = made(200, inputs, dtype=dtype), made(outputs, dtype=dtype, seed=3), weight.dense()
    exact = x.double() @ dense.double().T
    results = []
    for team in teams:
        operations = NativeOperations(team)
        packed = operations.pack(weight, None, dtype)
        assert packed.layout == "coded-panels"
        assert torch.equal(operations.unpack(packed), dense)
        rounded = operations.linear(x, packed, bias)
        assert rounded.dtype == dtype
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            rounded.double(), exact + bias.double(), rtol=tolerance, atol=tolerance * inputs**0.5
        )
        whole = operations.linear(x, packed, None, torch.float32).clone()
        torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-6 * inputs)
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 30):
            some = operations.linear(x[7 : 7 + num_rows], packed, None, torch.float32)
            assert torch.equal(some, whole[7 : 7 + num_rows]), num_rows
        results.append(whole)
        ids = torch.tensor([0, outputs - 1, outputs // 2], dtype=torch.int32)
        assert torch.equal(operations.embed(ids, packed), dense[ids.long()].to(dtype))
    assert torch.equal(*results)


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(("bits", "table"), CODINGS)
def test_codes_go_from_plain_torch_to_panels_and_back(team: Team, bits: int, table: str, has_offsets: bool) -> None:
    weight = made_of_codes(70, 64, bits, table, 32, has_offsets=has_offsets, scales_dtype=torch.bfloat16)
    before, operations = plain.pack(weight, None, torch.float16), NativeOperations(team)
    taken = operations.pack(plain.unpack_codes(before), None, torch.float16)
    assert taken.layout == "coded-panels"
    back = plain.pack(operations.unpack_codes(taken), None, torch.float16)
    assert back.scales is not None
    assert before.scales is not None
    assert torch.equal(back.values, before.values)
    assert torch.equal(back.scales, before.scales)


def test_codes_of_which_there_are_no_whole_words_are_multiplied_by_plain_torch(team: Team) -> None:
    weight = made_of_codes(7, 36, 4, "linear", 16, has_offsets=False, scales_dtype=torch.bfloat16)
    operations, x = NativeOperations(team), made(3, 36)
    packed = operations.pack(weight)
    assert packed.layout == "coded"
    torch.testing.assert_close(operations.linear(x, packed, None), x @ weight.dense().T)
    assert torch.equal(operations.unpack_codes(packed)[slice(7)].codes, weight.codes)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("inputs", "outputs"), [(4, 1), (100, 130), (256, 64)])
def test_quantised_products(
    team: Team, dtype: torch.dtype, inputs: int, outputs: int, quantization: Quantization
) -> None:
    operations = NativeOperations(team)
    weight, bias = made(outputs, inputs, dtype=dtype, seed=1), made(outputs, dtype=dtype, seed=2)
    packed, oracle = operations.pack(weight.clone(), quantization), plain.pack(weight.clone(), quantization)
    assert torch.equal(operations.unpack(packed), plain.unpack(oracle))
    for num_rows, given, out_dtype in product((0, 1, 9, 20), (None, bias), (None, torch.float32)):
        x = made(num_rows, inputs, dtype=dtype)
        if num_rows > 9:  # int8 already, so that no tie is rounded otherwise
            x = x.mul(40).round().clamp(-127, 127)
            x[:, 0] = 127
        got, expected = operations.linear(x, packed, given, out_dtype), plain.linear(x, oracle, given, out_dtype)
        assert got.shape == (num_rows, outputs)
        torch.testing.assert_close(got, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_embedding_reads_rows_of_a_packed_weight(team: Team, dtype: torch.dtype) -> None:
    operations = NativeOperations(team)
    weight = made(131, 24, dtype=dtype)
    ids = torch.tensor([0, 130, 63, 64, 64], dtype=torch.int32)
    assert torch.equal(operations.embed(ids, operations.pack(weight.clone())), weight[ids.long()])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_embedding_reads_rows_of_an_int8_weight(team: Team, dtype: torch.dtype) -> None:
    operations = NativeOperations(team)
    weight = made(131, 24, dtype=dtype)
    ids = torch.tensor([0, 130, 63, 64, 64], dtype=torch.int32)
    expected = plain.embed(ids, plain.pack(weight, "int8"))
    packed = operations.pack(weight, "int8")
    assert torch.equal(operations.embed(ids, packed), expected)
    assert expected.dtype == dtype
    results: list[torch.Tensor] = []

    def work() -> None:
        results.append(operations.linear(operations.embed(ids, packed), packed, None, torch.float32))

    program = team.capture(work)
    ids.copy_(ids.flip(0))
    program.replay()
    replayed = results[0].clone()
    work()
    assert torch.equal(replayed, results[1])
    assert torch.equal(operations.embed(ids, packed), expected.flip(0))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_plain_torch_has_quantised_is_taken_over_without_a_further_error(
    team: Team, quantization: Quantization
) -> None:
    operations = NativeOperations(team)
    before = plain.pack(made(130, 256, dtype=torch.bfloat16), quantization)
    taken = operations.pack(plain.unpack(before), quantization, torch.bfloat16)
    assert "panels" in taken.layout
    assert torch.equal(operations.unpack(taken), plain.unpack(before))
    back = plain.pack(operations.unpack(taken), quantization, torch.bfloat16)
    assert back.dtype == taken.dtype == torch.bfloat16
    assert torch.equal(plain.unpack(back), plain.unpack(before))


class Made(TorchDispatchMode):
    """Bytes of the tensors that are made within, of those that are larger than a block in float32, about."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[int] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and not operation._schema.is_mutable:
            found = (each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
            self.large += [each.nbytes for each in found if each.nbytes > 5 * BLOCK_NUMBERS]
        return result


@pytest.mark.parametrize("quantization", [*nightly("int8"), "int4"])
@pytest.mark.parametrize("inputs", [*nightly(512), 520])
def test_a_large_weight_is_packed_and_unpacked_in_blocks(team: Team, quantization: Quantization, inputs: int) -> None:
    linear = Linear(inputs, 8200, bias=False, dtype=torch.bfloat16, quantization=quantization)
    linear.weight.copy_(made(8200, inputs))
    values, scales = quantize(linear.weight, quantization)
    group = inputs if quantization == "int8" else INT4_GROUP
    expected = values * scales.float().repeat_interleave(group, dim=1)[:, :inputs]
    ways: tuple[Any, ...] = (plain, NativeOperations(team), plain)
    for operations in ways:
        with Made() as packing:
            linear.pack(operations)
        assert packing.large == [linear.weight.nbytes]
        with Made() as unpacking:
            dense = linear.dense()
        assert unpacking.large == [dense.nbytes]
        assert torch.equal(dense, expected)
    with Made() as multiplying:
        plain.linear(made(3, inputs, dtype=torch.bfloat16), linear.packed, None)
    assert not multiplying.large


def test_a_program_computes_again_what_was_captured(team: Team) -> None:
    operations = NativeOperations(team)
    x, packed = made(3, 64), operations.pack(made(128, 64, seed=1))
    second = operations.pack(made(64, 128, seed=2))
    results: list[Any] = []

    def work() -> None:
        results.append(operations.linear(operations.linear(x, packed, None), second, None))

    work()
    expected = results.pop().clone()
    program = team.capture(work)
    results[0].zero_()
    program.replay()
    assert torch.equal(results[0], expected)


def test_what_torch_computes_cannot_be_captured(team: Team) -> None:
    operations = NativeOperations(team)
    x, packed = made(1, 3, dtype=torch.bfloat16), operations.pack(made(5, 3, dtype=torch.bfloat16))
    with pytest.raises(InternalError, match="linear"), torch.inference_mode():
        team.capture(lambda: operations.linear(x, packed, None))  # 3 inputs are no whole words
    assert operations.linear(x, packed, None).shape == (1, 5)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.t().reshape(-1),
        lambda x: x.half(),
        lambda x: x.add_(1),
        lambda x: x.new_zeros(3),
        lambda x: x.sum().item(),
        lambda x: plain.rms_norm(x, x[0], 1e-5),
    ],
)
def test_anything_of_torchs_but_views_and_uninitialised_tensors_cannot_be_captured(
    team: Team, work: Callable[[torch.Tensor], Any]
) -> None:
    with torch.inference_mode():
        x = made(4, 6)
        before = x.clone()
        with pytest.raises(InternalError, match="torch's aten"):
            team.capture(lambda: work(x))
        assert torch.equal(x, before)
        team.capture(
            lambda: [x.flatten(1), *x.chunk(2), x.view(torch.int32), x[1:, :3], torch.empty_like(x), x.float()]
        )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_int8_products_of_what_is_no_number_are_none(team: Team, dtype: torch.dtype) -> None:
    operations = NativeOperations(team)
    packed = operations.pack(made(70, 40, dtype=dtype), "int8")
    x = made(3, 40, dtype=dtype)
    x[0, 17], x[2, 39] = torch.nan, torch.inf
    assert operations.linear(x, packed, None).isnan().all(dim=1).tolist() == [True, False, True]
