"""Products with packed weights: the protocol's contract, of every implementation that runs here."""

from types import ModuleType

import pytest
import torch
from kernels.harness import (
    ALL,
    BOTH,
    DEVICE,
    FLOAT8,
    TOLERANCES,
    assert_same,
    int32,
    make_conversions_right,
    normal,
    quiet_numpy,
    triton,
)
from nightly import few, nightly, seeds
from torch import Tensor

from aioengine.kernels.operations import plain_torch as reference
from aioengine.kernels.packed_weight import CodedWeight, Quantization, row_blocks
from aioengine.kernels.torch import quantized
from aioengine.kernels.torch.quantized import INT4_GROUP, dequantize, quantize, quantize_rows

pytestmark = quiet_numpy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def right_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    make_conversions_right(monkeypatch)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(5, 3), (96, 64), (130, 200)])
def test_a_product_is_that_of_the_dense_weight(
    ops: ModuleType, dtype: torch.dtype, num_rows: int, out_features: int, in_features: int
) -> None:
    x, weight = normal(num_rows, in_features, dtype=dtype), normal(out_features, in_features, dtype=dtype, seed=1)
    bias = normal(out_features, dtype=dtype, seed=2)
    dense = weight.clone()
    packed = ops.pack(weight)
    assert (packed.shape, packed.dtype, packed.scales) == ((out_features, in_features), dtype, None)
    assert packed.nbytes == dense.nbytes
    exact = x.double() @ dense.double().T
    tolerance = TOLERANCES[dtype]
    for given, out_dtype in ((bias, None), (None, None), (None, torch.float32)):
        product = ops.linear(x, packed, given, out_dtype)
        assert product.dtype == (out_dtype or dtype)
        expected = exact + given.double() if given is not None else exact
        torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_products_of_16_bits_are_right_on_processors_that_have_none(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int
) -> None:
    monkeypatch.setitem(quantized.HAS_PRODUCTS, dtype, False)
    x, weight, bias = (
        normal(num_rows, 40, dtype=dtype),
        normal(1030, 40, dtype=dtype, seed=1),
        normal(1030, dtype=dtype),
    )
    product = reference.linear(x, reference.pack(weight), bias, torch.float32)
    assert product.shape == (num_rows, 1030)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(product.double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 40**0.5)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_unpacked_weight_is_what_was_packed_and_its_rows_are_embeddings(ops: ModuleType, dtype: torch.dtype) -> None:
    weight = normal(50, 24, dtype=dtype)
    dense = weight.clone()
    packed = ops.pack(weight)
    assert torch.equal(ops.unpack(packed), dense)
    token_ids = int32([0, 49, 7, 7])
    rows = ops.embed(token_ids, packed)
    assert torch.equal(rows, dense[token_ids.long()])
    rows.zero_()  # the residual stream is added to in place
    assert torch.equal(ops.unpack(packed), dense)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_may_be_int8(ops: ModuleType, dtype: torch.dtype) -> None:
    packed = ops.pack(normal(50, 24, dtype=dtype), "int8")
    token_ids = int32([0, 49, 7, 7])
    rows = ops.embed(token_ids, packed)
    assert rows.dtype == dtype
    assert torch.equal(rows, ops.unpack(packed)[token_ids.long()].to(dtype))


@BOTH
def test_changes_in_place_of_a_weight_in_rows_count(ops: ModuleType) -> None:
    weight = normal(6, 4)
    packed = ops.pack(weight)
    assert packed.layout == "rows"
    weight.zero_()
    assert ops.linear(normal(2, 4), packed, None).eq(0).all()
    assert ops.embed(int32([3]), packed).eq(0).all()
    assert packed.values.device.type == DEVICE


# Quantised

QUANTIZATIONS: list[Quantization] = ["int8", "int4"]
SHAPES = [(5, 3), (96, 64), (130, 200), (33, 257)]


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """Of Student's distribution with four degrees of freedom, as trained weights are at worst."""
    tails = normal(4, *shape, seed=seed + 1).square().mean(0).sqrt()
    return normal(*shape, seed=seed) / tails


def with_outlier_channels(num_rows: int, num_columns: int, factor: float) -> Tensor:
    """Activations of which one channel in a hundred is so much larger, as in trained models."""
    x = normal(num_rows, num_columns, seed=7)
    x[:, :: max(1, min(100, num_columns // 2))] *= factor
    return x


@BOTH
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", few([torch.bfloat16], of=DTYPES), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quantised_product_is_that_of_the_unpacked_weight(
    ops: ModuleType, quantization: Quantization, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, bias = normal(*shape, dtype=dtype), normal(shape[0], dtype=dtype, seed=2)
    dense = weight.clone()
    packed = ops.pack(weight, quantization)
    assert packed.shape == shape
    assert packed.scales is not None
    assert packed.values.data_ptr() != weight.data_ptr()
    assert torch.equal(weight, dense)
    unpacked = ops.unpack(packed)
    assert unpacked.dtype == torch.float32
    for num_rows in (0, 1, 9):
        x = normal(num_rows, shape[1], dtype=dtype, seed=3)
        seen = x
        if quantization == "int8":
            values, steps = quantize_rows(x)
            seen = values * steps
        expected = seen.double() @ unpacked.double().T + bias.double()
        tolerance = TOLERANCES[dtype]
        product = ops.linear(x, packed, bias)
        assert product.dtype == dtype
        torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance * shape[1] ** 0.5)
        wide = ops.linear(x, packed, None, torch.float32)
        torch.testing.assert_close(wide.double(), expected - bias.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_stay_in_their_range_and_are_nearest(quantization: Quantization, shape: tuple[int, int]) -> None:
    weight = heavy_tailed(*shape)
    values, scales = quantize(weight, quantization)
    lowest, highest = {"int8": (-127, 127), "int4": (-8, 7)}[quantization]
    assert lowest <= values.min() <= values.max() <= highest
    group = shape[1] if quantization == "int8" else INT4_GROUP
    steps = scales.float().repeat_interleave(group, dim=1)[:, : shape[1]]
    is_inside = (weight / steps > lowest) & (weight / steps < highest)
    assert ((dequantize(values, scales) - weight).abs() <= 0.5001 * steps.abs())[is_inside].all()
    assert is_inside.float().mean() > 0.9 or shape[1] < INT4_GROUP


# By the last square: steps of an eighth of a group's largest value, 127ths of a row's.
ERRORS = {"int8": (0.008, 0.02), "int4": (0.1, 0.15)}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_errors_of_weights_are_bounded(quantization: Quantization) -> None:
    for weight, bound in zip((normal(64, 1024), heavy_tailed(64, 1024)), ERRORS[quantization], strict=True):
        error = dequantize(*quantize(weight, quantization)) - weight
        assert error.norm() < bound * weight.norm()


@pytest.mark.parametrize(("factor", "bound"), [(1.0, 0.012), (10.0, 0.04), (50.0, 0.05)])
def test_errors_of_int8_products_with_outlier_channels_are_bounded(factor: float, bound: float) -> None:
    """Relative to the product; a token's step grows with its outliers, and so does the product."""
    weight, x = normal(256, 1024), with_outlier_channels(32, 1024, factor)
    product = reference.linear(x, reference.pack(weight, "int8"), None)
    exact = x @ weight.T
    assert (product - exact).norm() < bound * exact.norm()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("seed", seeds(8))
def test_an_unpacked_weight_is_packed_without_a_further_error(quantization: Quantization, seed: int) -> None:
    weight = heavy_tailed(40, 200, seed=seed) * 10.0 ** (seed % 5 - 3)
    weight[3] = 0
    weight[4, 70] = 1e-30
    weight[5, :64] = torch.arange(64, device=DEVICE) - 32.0
    once = reference.unpack(reference.pack(weight, quantization))
    twice = reference.unpack(reference.pack(once, quantization))
    assert_same(twice, once)
    assert once[3].eq(0).all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantised_weights_take_as_little_memory_as_they_should(quantization: Quantization) -> None:
    packed = reference.pack(normal(64, 1024), quantization)
    assert packed.nbytes == {"int8": 64 * (1024 + 4), "int4": 64 * (512 + 16 * 2)}[quantization]


# Codes, as checkpoints hold them

TABLES = {
    "linear": None,
    "e2m1": torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    "normal": torch.erfinv(torch.linspace(-0.99, 0.99, 16)),
    "e4m3": torch.arange(256).to(torch.uint8).view(FLOAT8).float().nan_to_num(448.0),
}
BITS = [(4, "e2m1"), (8, "linear"), *nightly((4, "linear"), (4, "normal"), (8, "e4m3"))]


def coded(
    shape: tuple[int, int], bits: int, table: str, group: int, *, has_offsets: bool, scales_dtype: torch.dtype
) -> CodedWeight:
    """Of random codes, with scales and offsets that are exact in a dtype."""
    num_rows, num_columns = shape
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values = TABLES[table]
    step = 2.0 / ((1 << bits) if values is None else float(values.max()))
    scales = step * (0.5 + normal(num_rows, -(-num_columns // group), seed=1).abs())
    offsets = normal(*scales.shape, seed=2).to(scales_dtype).float() if has_offsets else None
    table_ = values.to(DEVICE) if values is not None else None
    return CodedWeight(codes.to(DEVICE), bits, table_, scales.to(scales_dtype).float(), offsets, group)


@ALL
@pytest.mark.parametrize(("bits", "table"), BITS)
@pytest.mark.parametrize(
    ("shape", "group", "has_offsets", "dtype", "scales_dtype", "num_rows"),
    [
        ((1, 16), 16, True, torch.float32, torch.float32, 7),
        ((37, 200), 64, False, torch.bfloat16, torch.bfloat16, 1),
        ((37, 200), 1000, True, torch.float16, torch.float16, 7),
        ((70, 129), 32, True, torch.bfloat16, torch.float32, 17),
        ((7, 96), 128, False, torch.float32, torch.float16, 0),
    ],
)
def test_codes_are_kept_exactly_and_a_product_is_that_of_what_they_stand_for(
    ops: ModuleType,
    bits: int,
    table: str,
    shape: tuple[int, int],
    group: int,
    has_offsets: bool,
    dtype: torch.dtype,
    scales_dtype: torch.dtype,
    num_rows: int,
) -> None:
    weight = coded(shape, bits, table, group, has_offsets=has_offsets, scales_dtype=scales_dtype)
    dense, packed = weight.dense(), ops.pack(weight, None, dtype)
    assert (packed.shape, packed.dtype) == (shape, dtype)
    assert packed.scales is not None
    assert packed.scales.dtype == scales_dtype
    assert_same(ops.unpack(packed), dense)
    codes = torch.cat([ops.unpack_codes(packed)[rows].codes for rows in row_blocks(shape)])
    assert torch.equal(codes, weight.codes)
    token_ids = int32([shape[0] - 1, 0])
    assert_same(ops.embed(token_ids, packed), dense[token_ids.long()].to(dtype))
    x, bias = normal(num_rows, shape[1], dtype=dtype, seed=4), normal(shape[0], dtype=dtype, seed=3)
    exact, tolerance = x.double() @ dense.double().T, TOLERANCES[dtype]
    product = ops.linear(x, packed, bias)
    assert product.dtype == dtype
    torch.testing.assert_close(
        product.double(), exact + bias.double(), rtol=tolerance, atol=tolerance * shape[1] ** 0.5
    )
    wide = ops.linear(x, packed, None, torch.float32)
    # On a GPU numbers that the activations' dtype has not are rounded to it.
    is_rounded = ops is triton and table == "normal" and dtype != torch.float32
    bounds = (tolerance, tolerance * shape[1] ** 0.5) if is_rounded else (1e-5, 1e-6 * shape[1])
    torch.testing.assert_close(wide.double(), exact, rtol=bounds[0], atol=bounds[1])


def test_what_codes_stand_for_is_a_table_times_a_scale_and_an_offset() -> None:
    weight = coded((5, 40), 4, "normal", 16, has_offsets=True, scales_dtype=torch.float32)
    assert weight.table is not None
    assert weight.offsets is not None
    for row in range(5):
        for column in range(40):
            value = weight.table[int(weight.codes[row, column])] * weight.scales[row, column // 16]
            assert weight.dense()[row, column] == value + weight.offsets[row, column // 16]
    linear = coded((5, 40), 8, "linear", 64, has_offsets=False, scales_dtype=torch.float32)
    assert_same(linear.dense(), (linear.codes.float() - 128) * linear.scales)


def test_coded_rows_are_put_in_order_and_below_each_other() -> None:
    weight = coded((6, 40), 4, "normal", 16, has_offsets=True, scales_dtype=torch.float32)
    order = torch.tensor([5, 0, 3], device=DEVICE)
    assert_same(weight[order].dense(), weight.dense()[order])
    other = coded((3, 40), 4, "normal", 16, has_offsets=False, scales_dtype=torch.float16)
    joined = CodedWeight.cat([weight[1:3], other])
    assert_same(joined.dense(), torch.cat((weight.dense()[1:3], other.dense())))
    for bits, table, group in ((4, "linear", 16), (4, "normal", 24), (8, "linear", 16)):
        unlike = coded((3, 40), bits, table, group, has_offsets=False, scales_dtype=torch.float16)
        with pytest.raises(ValueError, match="cannot be one coded matrix"):
            CodedWeight.cat([weight, unlike])


@pytest.mark.parametrize(("table", "codings"), [("linear", [(4, 32), (8, 16), (4, 48)]), ("normal", [(4, 32), (4, 8)])])
def test_coded_matrices_of_several_widths_are_one_of_the_widest(table: str, codings: list[tuple[int, int]]) -> None:
    parts = [
        coded((5, 72), bits, table, group, has_offsets=bits == 4, scales_dtype=torch.float32) for bits, group in codings
    ]
    joined = CodedWeight.cat(parts)
    assert (joined.bits, joined.group) == (max(bits for bits, _ in codings), min(group for _, group in codings))
    assert_same(joined.dense(), torch.cat([part.dense() for part in parts]))
