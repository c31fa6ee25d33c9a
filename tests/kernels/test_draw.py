"""Draws by kernels against the plain oracle, whose own are in tests/sampler: the same tokens, whatever filters and
logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kernels.harness import native
from nightly import nightly
from sampler.batch import POISON, draw, make_rows, random_logits
from torch import Tensor

from aioengine.kernels.operations import plain_torch
from aioengine.kernels.sample_rows import SampleRow, Status, param_of
from aioengine.kernels.torch import draws as reference
from aioengine.kernels.torch.draws import NOISE_SPAN

draw_file = pytest.importorskip("aioengine.kernels.triton.draw")
noise = pytest.importorskip("aioengine.kernels.triton.noise")
thresholds = pytest.importorskip("aioengine.kernels.triton.thresholds")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR_TIE = 1e-5
"""Scores so near may come out in another order: logarithms differ in the last bit. Never seen on a CPU."""


def check(
    logits: Tensor, samples: Tensor, masks: Tensor | None = None, is_greedy: bool = False
) -> tuple[list[int], list[int]]:
    """Kernels against the oracle; returns tokens and status."""
    by = partial(draw, logits, samples, masks, is_greedy=is_greedy, device=DEVICE)
    expected, expected_status = by(operations=plain_torch)
    for kernels in (draw_file, *([native] if DEVICE == "cpu" else [])):
        token_ids, status = by(operations=kernels)
        assert status.tolist() == expected_status.tolist()
        for nth in (token_ids != expected).nonzero()[:, 0].tolist():
            score = scores(logits, samples[nth])
            drawn, wanted = int(token_ids[nth]), int(expected[nth])
            assert abs(score[drawn] - score[wanted]) < NEAR_TIE, f"sample {nth}: {drawn} for {wanted}"
    return token_ids.tolist(), status.tolist()


def scores(logits: Tensor, sample: Tensor) -> Tensor:
    """Float64 [V]."""
    temperature = float(param_of(sample, "temperature"))
    if temperature == 0:
        return logits[sample[SampleRow.LOGITS_ROW]].double()
    noise = reference.gumbel(reference.noise_keys(sample[None])[:, None], torch.arange(logits.shape[1]))
    return logits[sample[SampleRow.LOGITS_ROW]].double() / temperature + noise[0]


def mixed_rows(count: int, seed: int) -> Tensor:
    """Greedy and hot ones, with any filters and none."""
    rng = np.random.default_rng(seed)
    return make_rows(
        count,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0], count),
        top_k=rng.choice([0, 0, 1, 5, 50, 600], count),
        top_p=rng.choice([1, 1, 0.001, 0.5, 0.95, 0.999], count),
        min_p=rng.choice([0, 0, 0.01, 0.5, 1.0], count),
        seed=rng.integers(-(2**63), 2**63, count),
        choice=rng.integers(0, 4, count),
        positions=rng.integers(0, 100_000, count),
    )


def ties(*shape: int, seed: int) -> Tensor:
    """Logits of a few values, zeros of both signs among them."""
    return random_logits(*shape, seed=seed).round() * torch.tensor([1.0, -1.0]).repeat(shape[-1])[: shape[-1]]


# The oracle


@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
@pytest.mark.parametrize("vocab", [7, 1000, *nightly(1, 64, 123, 4099)])
def test_the_oracle_draws_the_highest_score_of_what_filters_keep(vocab: int, seed: int) -> None:
    rows = mixed_rows(60, seed)
    for logits in (
        random_logits(60, vocab, seed=seed),
        random_logits(60, vocab, seed=seed, spread=8.0) + 100,
        random_logits(60, vocab, seed=seed, spread=0.02),
        ties(60, vocab, seed=seed),
    ):
        token_ids, status = draw(logits, rows)
        assert not status.any()
        temperature, top = param_of(rows, "temperature"), logits.amax(dim=1)
        lowest = reference.threshold(logits, torch.full((60,), -torch.inf), top, temperature.clamp(min=1e-9), rows)
        for nth, token in enumerate(token_ids.tolist()):
            score = scores(logits, rows[nth])
            if temperature[nth] > 0:
                score[logits[nth] < lowest[nth]] = -torch.inf
            assert score[token] >= score.max() - NEAR_TIE * (1 + abs(float(score.max()))), f"sample {nth}"
            assert temperature[nth] > 0 or token == int(logits[nth].argmax())


# The kernels


@pytest.mark.parametrize(("vocab", "seed"), [(123, 2), *nightly((1, 0), (7, 1), (1000, 3))])
def test_any_rows_with_filters_and_without(vocab: int, seed: int) -> None:
    plain = make_rows(7, temperature=[0, 1, 0.2, 2, 1, 0, 1], seed=[0, -1, 2**40, 5, 5, 5, 5], positions=np.arange(7))
    check(random_logits(7, vocab, seed=vocab), plain)
    check(random_logits(9, vocab, seed=seed), mixed_rows(9, seed))


def test_greedy_ones_are_the_lowest_of_the_highest() -> None:
    logits = ties(4, 1100, seed=1)
    token_ids, _ = check(logits, make_rows(4, temperature=0.0), is_greedy=True)
    assert token_ids == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.nightly
def test_more_in_reach_than_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes narrow the reach first. Of a GPU's sizes that takes 4,096 logits in reach."""
    monkeypatch.setattr(thresholds, "MAX_GATHERED", 64)
    monkeypatch.setattr(thresholds, "TILE_BLOCKS", 2)
    kinds = [
        random_logits(2, 700, seed=1, spread=0.05),
        torch.full((2, 700), 0.25),
        ties(2, 700, seed=2),
        random_logits(2, 700, seed=3, spread=0.5).index_fill(1, torch.tensor([433]), 9.0),
        random_logits(2, 700, seed=4) - 500,
    ]
    columns = {"top_k": [0, 300, 0, 650], "top_p": [0.9, 1, 0.99, 0.95], "min_p": [0, 0, 0.001, 0]}
    rows = make_rows(10, seed=8, **{name: (values * 3)[:10] for name, values in columns.items()})
    check(torch.cat(kinds), rows)


@pytest.mark.parametrize(("top_k", "top_p"), [(77, 0.5), *nightly((1, 0.001), (128, 0.999), (299, 0.9))])
def test_thresholds_are_exact(top_k: int, top_p: float) -> None:
    """Of a temperature at which all that is kept has a chance."""
    logits = random_logits(3, 300, seed=top_k)
    rows = make_rows(3, temperature=2.0, top_k=[top_k, 0, top_k], top_p=[1, top_p, top_p])
    samples = rows.to(DEVICE)
    floors = thresholds.find_floors(logits.to(DEVICE), samples, None)[1].cpu()
    top, temperature = logits.amax(dim=1), torch.full((3,), 2.0)
    everything = torch.full((3,), -torch.inf)
    expected = reference.threshold(logits, everything, top, temperature, samples.cpu())
    assert floors.tolist() == expected.maximum(top - temperature * NOISE_SPAN).tolist()


@pytest.mark.parametrize("has_filters", [False, True])
def test_masks(has_filters: bool) -> None:
    vocab, count = 123, 6
    bits = torch.rand(3, 4 * 32, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.5], [0.02], [0.0]])
    bits[:, vocab:] = True  # beyond the vocabulary: of no meaning
    words = (bits.view(3, 4, 32).long() << torch.arange(32)).sum(dim=2)
    masks = (words - (words >> 31 << 32)).int()
    columns = {"temperature": [0, 1, 1, 1, 1, 1], "top_k": [0, 0, 50, 3, 0, 5], "top_p": [1, 1, 1, 0.9, 0.99, 1]}
    columns = columns if has_filters else {"temperature": [0, 1, 1, 1, 2, 1]}
    samples = make_rows(count, mask=[0, 1, 1, -1, 0, 2], **columns)
    token_ids, status = check(random_logits(count, vocab, seed=9), samples, masks)
    assert all(bits[samples[sample, SampleRow.MASK], token_ids[sample]] for sample in (0, 1, 2, 4))
    assert status == [Status.SAMPLED] * 5 + [Status.NOTHING_LEFT]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's: a float's range and back
@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_values_that_are_no_ordinary_numbers(filters: dict[str, Any]) -> None:
    """A NaN fails the sample, wherever it stands and of whichever sign; +inf is certain; -inf never is chosen."""
    logits = random_logits(7, 300, seed=4)
    logits[0, 299] = torch.nan
    logits[1, 150] = -torch.tensor(torch.nan)
    logits[1, 3] = torch.inf
    logits[2, [200, 290]] = torch.inf
    logits[3] = -torch.inf
    logits[4, :299] = -torch.inf
    logits[5] = torch.finfo(torch.float32).min
    rows = make_rows(7, temperature=[1, 1, 1, 1, 2, 1, 0], **filters)
    token_ids, status = check(logits, rows)
    failed = [Status.NOT_A_NUMBER, Status.NOT_A_NUMBER, Status.SAMPLED, Status.NOTHING_LEFT]
    assert status == [*failed, *[Status.SAMPLED] * 3]
    assert token_ids[:5] == [0, 0, 200, 0, 299]


def test_choices_share_a_line_and_padding_is_passed_over() -> None:
    columns = {"choice": [0, 1, 2, 0, 0, 1], "top_k": [40, 40, 40, 0, 0, 0], "seed": 6}
    samples = make_rows(6, logits_row=[1, 1, 1, -1, 0, 0], **columns)
    samples[3, SampleRow.LOGITS_ROW + 1 :] = POISON
    token_ids, _ = check(random_logits(2, 123, seed=6, spread=0.5), samples)
    assert len(set(token_ids[:3])) > 1


def test_parts_of_a_row_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in one part is what it is in eight."""
    logits = random_logits(3, 4001, seed=5, spread=1.0)
    samples = make_rows(3, temperature=[0, 1, 1], seed=12)
    assert draw_file.split(3, 4001) == (8, 1)
    in_eight = check(logits, samples)
    monkeypatch.setattr(draw_file, "PROGRAMS", 6)
    assert draw_file.split(3, 4001) == (2, 4)
    assert check(logits, samples) == in_eight


def test_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """In larger pieces than a GPU's, for the interpreter's sake."""
    monkeypatch.setattr(draw_file, "PIECE_WORDS", 1024)
    monkeypatch.setattr(thresholds, "SCANNED_WORDS", 4096)
    monkeypatch.setattr(thresholds, "TILE_BLOCKS", 1024)
    rows = make_rows(4, temperature=[1, 0.7, 1.5, 0], top_k=[0, 50, 0, 0], top_p=[1, 1, 0.9, 1], seed=77)
    logits = random_logits(4, 151_936, seed=10)
    check(logits, rows)


def test_very_cold_samples() -> None:
    rows = make_rows(4, temperature=[1e-3, 1e-20, 1e-40, 1e-40], top_p=[1, 1, 1, 0.5])
    logits = random_logits(4, 123, seed=11) + 1000
    assert check(logits, rows)[0] == logits.argmax(dim=1).tolist()


def test_constants_are_the_samplers() -> None:
    assert noise.NOISE_SPAN.value == NOISE_SPAN
