"""Products with packed weights: the protocol's contract, of every implementation that runs here."""

from types import ModuleType

import pytest
import torch
from kernels.harness import BOTH, DEVICE, TOLERANCES, int32, normal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
def test_changes_in_place_of_a_weight_in_rows_count(ops: ModuleType) -> None:
    weight = normal(6, 4)
    packed = ops.pack(weight)
    assert packed.layout == "rows"
    weight.zero_()
    assert ops.linear(normal(2, 4), packed, None).eq(0).all()
    assert ops.embed(int32([3]), packed).eq(0).all()
    assert packed.values.device.type == DEVICE
