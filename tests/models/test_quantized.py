"""What quantisation costs the bundled model, which is small, so that it costs more than in larger ones."""

import math
from typing import Any

import pytest
import torch
from kernels.harness import native
from models.reference import PagedStep, load, logprobs
from nightly import nightly
from tokenizers import Tokenizer
from torch import Tensor

from aioengine.kernels.operations import plain_torch
from aioengine.models.folder import DEMO_MODEL
from demo_model.grammar import documents

NUM_DOCUMENTS = 40


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    """Token ids of texts that the model was not trained on, of its kind."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    made = documents("quantisation", NUM_DOCUMENTS)
    return [torch.tensor(tokenizer.encode(document.text).ids[:300], dtype=torch.int32) for document in made]


@pytest.fixture(scope="module")
def exact(texts: list[Tensor]) -> list[Tensor]:
    """Log-probabilities after each token, in float32 and not quantised."""
    decoder = load(DEMO_MODEL, dtype="float32")
    return [logprobs(decoder, ids) for ids in texts]


def perplexity(texts: list[Tensor], computed: list[Tensor]) -> float:
    losses = [-rows[:-1].gather(1, ids[1:, None].long()) for ids, rows in zip(texts, computed, strict=True)]
    return math.exp(torch.cat(losses).mean())


@pytest.mark.parametrize("operations", [native, *nightly(plain_torch)])
@pytest.mark.parametrize("dtype", ["float32", *nightly("bfloat16")])
@pytest.mark.parametrize(
    ("quantization", "loss", "agreement", "divergence"),
    [*nightly(("int8", 0.004, 0.975, 0.002)), ("int4", 0.03, 0.92, 0.08)],
)
def test_perplexity_and_greedy_tokens_stay(
    texts: list[Tensor],
    exact: list[Tensor],
    quantization: str,
    dtype: str,
    operations: Any,
    loss: float,
    agreement: float,
    divergence: float,
) -> None:
    decoder = load(DEMO_MODEL, quantization=quantization, dtype=dtype)
    decoder.use(operations)
    steps = [PagedStep(decoder, length=len(ids), operations=operations) for ids in texts]
    computed = [logprobs(decoder, ids, step=step) for ids, step in zip(texts, steps, strict=True)]
    assert_near(texts, computed, exact, loss, agreement, divergence)


@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32")])
def test_an_int8_cache_costs_less(texts: list[Tensor], exact: list[Tensor], dtype: str) -> None:
    decoder = load(DEMO_MODEL, dtype=dtype)
    computed = [
        logprobs(decoder, ids, step=PagedStep(decoder, length=len(ids), cache_dtype=torch.int8)) for ids in texts
    ]
    assert_near(texts, computed, exact, loss=0.001, agreement=0.985, divergence=0.0003)


def assert_near(
    texts: list[Tensor], computed: list[Tensor], exact: list[Tensor], loss: float, agreement: float, divergence: float
) -> None:
    assert abs(perplexity(texts, computed) / perplexity(texts, exact) - 1) < loss
    ours, theirs = torch.cat(computed), torch.cat(exact)
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > agreement
    assert torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="batchmean") < divergence
