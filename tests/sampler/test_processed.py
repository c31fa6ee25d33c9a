"""Processed log-probabilities: those of what is drawn by, against its definition in float64, beside raw ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sampler.batch import (
    POISON,
    Asking,
    Rows,
    asking,
    changed_logits,
    random_logits,
    sample_for,
)

from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.native_operations import NativeOperations
from aioengine.kernels.native.team import Team
from aioengine.kernels.operations import Operations
from aioengine.kernels.operations import plain_torch as plain_torch
from aioengine.sampler import processed
from aioengine.sampler.outputs import DeviceOutputs
from aioengine.scheduler.plan import StepLogprobs
from doubles.fake_graph import Recorder, as_launches


@pytest.fixture(scope="module", params=["torch", "native"])
def operations(request: pytest.FixtureRequest) -> Iterator[Operations]:
    if request.param == "torch":
        yield plain_torch
        return
    team = Team(compile_library(), 2)
    yield NativeOperations(team)
    team.close()


def expected_logprobs(logits: torch.Tensor, request: Asking) -> np.ndarray:
    """float64 [vocab]."""
    s, x = request.sampling, logits.double().numpy()
    if s.logprobs_mode == "processed":
        x = changed_logits(logits.numpy(), request)
        if s.temperature > 0:
            x = filtered((x - x.max()) / s.temperature, s.top_k, s.top_p, s.min_p)
    return x - np.logaddexp.reduce(x)


def filtered(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Logits of which the highest is 0, -inf where a filter keeps no token."""
    order = np.argsort(-x)
    kept = [token for token in order if not min_p or x[token] >= np.log(min_p)][: top_k or None]
    if top_p < 1:
        mass = np.exp(x[kept]).cumsum()
        kept = [token for token, before in zip(kept, [0, *mass], strict=False) if before < top_p * mass[-1]]
    return np.where(np.isin(np.arange(len(x)), kept), x, -np.inf)


def assert_are_those_of(
    lines: StepLogprobs | None, token_ids: np.ndarray, logits: torch.Tensor, requests: list[Asking]
) -> None:
    """Each request has one token."""
    assert lines is not None
    asked = [row for row, request in enumerate(requests) if request.sampling.logprobs >= 0]
    assert lines.index.tolist() == asked
    for line, row in enumerate(asked):
        request = requests[row]
        expected, label = expected_logprobs(logits[row], request), f"row {row}"
        token, (num_top, vocab) = token_ids[row], (request.sampling.logprobs, logits.shape[1])
        np.testing.assert_allclose(lines.logprobs[line], expected[token], rtol=2e-6, atol=2e-4, err_msg=label)
        assert lines.ranks[line] == 1 + (expected > expected[token]).sum(), label
        assert expected[token] > -np.inf, label
        top_ids = lines.top_ids[line, : min(num_top, vocab)]
        assert len(set(top_ids.tolist())) == len(top_ids), label
        np.testing.assert_allclose(
            lines.top_logprobs[line, : len(top_ids)], expected[top_ids], rtol=2e-6, atol=2e-4, err_msg=label
        )
        likeliest = np.sort(expected)[::-1][: len(top_ids)]
        np.testing.assert_allclose(expected[top_ids], likeliest, rtol=2e-6, atol=2e-4, err_msg=label)
        if not len(lines.extra_offsets):
            assert not request.sampling.logprob_token_ids
            continue
        extra = slice(*lines.extra_offsets[line : line + 2].tolist())
        extra_ids = lines.extra_ids[extra]
        assert extra_ids.tolist() == list(request.sampling.logprob_token_ids)
        np.testing.assert_allclose(
            lines.extra_logprobs[extra], expected[extra_ids], rtol=2e-6, atol=2e-4, err_msg=label
        )
        assert lines.extra_ranks[extra].tolist() == [1 + (expected > value).sum() for value in expected[extra_ids]]


def flip(logits: torch.Tensor, rows: object) -> torch.Tensor:
    return logits.flip(-1)


def random_request(random: np.random.Generator, vocab: int) -> Asking:
    def ids(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab, random.integers(least, most + 1)).tolist())

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if random.random() < 0.4 else otherwise

    output = list(ids(12))
    temperature = random.choice([0.0, 0.05, 0.5, 1.0, 2.0])
    logprobs = int(random.choice([-1, 0, 3, 20, vocab]))
    return asking(
        ids(9, 1),
        output,
        temperature=float(temperature),
        seed=int(random.integers(1 << 40)),
        top_k=maybe(int(random.integers(1, vocab + 3)), 0),
        top_p=maybe(float(np.float32(random.uniform(0.02, 1))), 1.0),
        min_p=maybe(float(np.float32(random.uniform(0, 0.5))), 0.0),
        presence_penalty=maybe(float(np.float32(random.uniform(-2, 2))), 0.0),
        frequency_penalty=maybe(float(np.float32(random.uniform(-2, 2))), 0.0),
        repetition_penalty=maybe(float(np.float32(random.uniform(0.5, 3))), 1.0),
        logit_bias=maybe(tuple((token, float(np.float32(random.uniform(-9, 9)))) for token in set(ids(5))), ()),
        allowed_token_ids=maybe(tuple(random.choice(vocab, vocab - vocab // 3, replace=False).tolist()), ()),
        bad_words=maybe((ids(1, 1), (*output[-1:], int(random.integers(vocab)))), ()),
        min_tokens=maybe(40, 0),
        stop_ids=ids(2),
        logits_processors=maybe((flip,), ()),
        logprobs=logprobs,
        logprobs_mode=str(random.choice(["raw", "processed"])),
        logprob_token_ids=maybe(ids(4), ()) if logprobs >= 0 else (),
    )


@pytest.mark.parametrize("vocab", [7, 123, 5003])
@pytest.mark.parametrize("seed", range(12))
def test_rows_of_both_modes_with_any_rules(
    operations: Operations, vocab: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1000 * vocab + seed)
    monkeypatch.setattr(processed, "CHUNK_ELEMENTS", int(random.choice([1, 3 * vocab, 2**21])))
    requests = [random_request(random, vocab) for _ in range(random.integers(1, 9))]
    if not any(request.sampling.logprobs >= 0 for request in requests):
        requests.append(asking(logprobs=2, logprobs_mode="processed"))
    logits = random_logits(len(requests), vocab, seed=seed, spread=3.0)
    rows = Rows(requests, vocab, seed, operations)
    is_processed = [r.sampling.logprobs >= 0 and r.sampling.logprobs_mode == "processed" for r in requests]
    assert rows.step.features.num_processed == 1 << (sum(is_processed) - 1).bit_length() if any(is_processed) else True
    sampled = rows.sample(logits.clone())
    assert not sampled.failures
    assert_are_those_of(sampled.logprobs, sampled.token_ids, logits, requests)


def test_a_mode_draws_the_tokens_that_the_other_does() -> None:
    random = np.random.default_rng(3)
    requests = [random_request(random, 123) for _ in range(40)]
    logits = random_logits(40, 123, seed=4)
    tokens = [
        sample_for(
            [asking(r.prompt, r.output, **{**fields_of(r), "logprobs": 1, "logprobs_mode": mode}) for r in requests],
            logits,
        ).token_ids.tolist()
        for mode in ("raw", "processed")
    ]
    assert tokens[0] == tokens[1]


def fields_of(request: Asking) -> dict[str, Any]:
    return {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}


def test_all_choices_of_a_row_tell_of_the_same_distribution() -> None:
    logits = random_logits(2, 123, seed=3)
    family = asking(
        [4], temperature=1.5, top_k=9, num_choices=40, repetition_penalty=1.5, logprobs=12, logprobs_mode="processed",
        logprob_token_ids=(4,),
    )  # fmt: skip
    sampled = sample_for([asking(temperature=1.0, logprobs=1), family], logits)
    lines, tokens = sampled.logprobs, sampled.token_ids[1:]
    assert lines is not None
    assert len(set(tokens.tolist())) > 5
    expected = expected_logprobs(logits[1], family)
    np.testing.assert_allclose(lines.logprobs[1:], expected[tokens], atol=1e-5)
    np.testing.assert_allclose(lines.extra_logprobs, np.full(40, expected[4]), atol=1e-5)
    np.testing.assert_allclose(np.exp(lines.top_logprobs[1:, :9]).sum(axis=1), np.ones(40), atol=1e-5)
    assert (lines.top_logprobs[1:, 9:12] == -np.inf).all()
    raw = torch.log_softmax(logits[0], dim=-1)[sampled.token_ids[0]]
    np.testing.assert_allclose(lines.logprobs[0], raw, atol=1e-5)


def test_what_was_drawn_is_kept_though_the_filters_sum_in_another_order() -> None:
    logits = torch.zeros(2, 8)
    logits[:, :4] = torch.tensor([3.0, 2.0, 1.0, 0.5])
    requests = [asking(temperature=1.0, top_k=2, logprobs=2, logprobs_mode="processed") for _ in range(2)]
    samples = Rows(requests, 8).samples.samples
    into = torch.full((2, 8), torch.nan)
    drawn, each = torch.tensor([0, 3], dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    processed.process_logits(logits, samples, each, None, drawn, into, has_filters=True)
    assert into.tolist() == [
        [0.0, -1.0, *[-torch.inf] * 6],
        [0.0, -1.0, -2.0, -2.5, *[-torch.inf] * 4],
    ]


def test_logits_of_infinity_and_cold_temperatures_are_no_surprise() -> None:
    logits = random_logits(3, 20, seed=1)
    logits[0, 7], logits[1, 3] = torch.inf, -torch.inf
    cold = asking(temperature=1e-30, top_p=0.5, logprobs=20, logprobs_mode="processed")
    sampled = sample_for([cold, cold, cold], logits)
    lines = sampled.logprobs
    assert lines is not None
    assert lines.top_ids[:, 0].tolist() == sampled.token_ids.tolist() == logits.argmax(dim=1).tolist()
    assert lines.top_logprobs[1:].tolist() == [[0.0] + [-np.inf] * 19] * 2


def test_a_step_without_such_rows_runs_what_it_did() -> None:
    requests = [asking(logprobs=2), asking(temperature=1.0, top_p=0.5, logprobs_mode="processed")]
    assert Rows(requests, 50).step.features.num_processed == 0, "no row wants them"


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_graph_brings_what_the_step_does(count: int) -> None:
    """Each launch is of sizes alone, and nothing waits for the device: the recorder refuses what does."""
    requests = [
        asking([1], [2, 2], temperature=0.7, top_p=0.8, frequency_penalty=0.5, logprobs=5, logprobs_mode="processed"),
        asking([1], [2, 3], repetition_penalty=2.0, logprobs=5),
        asking(temperature=1.0, allowed_token_ids=(3, 4, 9), min_p=0.1, logprobs=5, logprobs_mode="processed"),
        asking(temperature=0.5, top_k=3, logprobs=5, logprobs_mode="processed"),
    ][:count]
    rows = Rows(requests, 123, operations=as_launches(plain_torch))
    logits, recorder = random_logits(count, 123, seed=9), Recorder()
    given, words = logits.clone(), torch.full((rows.step.sizes.num_words,), POISON, dtype=torch.int32)
    recorder.run(lambda: rows.launch(given, DeviceOutputs(words, rows.step.sizes)))
    assert (words == POISON).all(), "it is recorded, and nothing is left of that"
    for _ in range(2):
        given.copy_(logits)
        for launch in recorder.launches:
            launch.again()
        sampled = rows.read(given, words, {})
        assert_are_those_of(sampled.logprobs, sampled.token_ids, logits, requests)
