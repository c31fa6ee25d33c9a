"""The order of it all: what a step of the sampler consists of, and which logits it leaves as they are."""

import inspect

import numpy as np
import pytest
import torch
from sampler.batch import Asking, Rows, asking, random_logits, sample_for

from aioengine.kernels.operations import plain_torch as operations
from aioengine.sampler.outputs import DeviceOutputs
from doubles.fake_graph import Recorder, as_launches

VOCAB = 123


def of_all_kinds() -> list[Asking]:
    return [
        asking([1], [2, 3], frequency_penalty=1.0, bad_words=((2, 3, 4), (5,)), logprobs=2),
        asking([1], [2, 3], temperature=1.0, presence_penalty=1.0, logit_bias=((7, 3.0),)),
        asking(temperature=1.0, top_p=0.9, logprobs=0),
        asking(allowed_token_ids=(3, 4)),
        asking(temperature=0.7, min_tokens=3, stop_ids=(2,), logprobs=5),
    ]


@pytest.mark.parametrize("members", [(0, 1, 2, 3, 4), (2,), (1, 2), (3,), (0,)], ids=str)
def test_a_step_consists_of_operations_alone(members: tuple[int, ...]) -> None:
    """Work of torch's own would run once, while a graph of native operations is recorded, and not again."""
    requests = of_all_kinds()
    rows = Rows([requests[member] for member in members], VOCAB, operations=as_launches(operations, has_each=True))
    logits, recorder = random_logits(len(members), VOCAB, seed=1), Recorder()
    out = DeviceOutputs(torch.zeros(rows.step.sizes.num_words, dtype=torch.int32), rows.step.sizes)
    recorder.run(lambda: rows.launch(logits, out))
    assert recorder.launches
    for launch in recorder.launches:
        assert inspect.ismethod(launch.function), f"{launch.function} is not an operation"


def test_only_rows_with_rules_and_logprobs_are_copied_and_log_probabilities_are_of_them_as_they_were() -> None:
    requests = of_all_kinds()
    logits = random_logits(5, VOCAB, seed=2)
    rows = Rows(requests, VOCAB)
    assert rows.samples.kept.tolist() == [0, 4, -1, -1, -1]
    sampled = sample_for(requests, logits)
    assert [torch.equal(made, was) for made, was in zip(sampled.logits, logits, strict=True)] == [1, 0, 1, 0, 1]
    assert sampled.logprobs is not None
    assert sampled.logprobs.index.tolist() == [0, 2, 4]
    expected = torch.log_softmax(logits, dim=-1)[[0, 2, 4], sampled.token_ids[[0, 2, 4]]]
    np.testing.assert_allclose(sampled.logprobs.logprobs, expected, atol=1e-5)


def test_more_choices_than_rows_report_each_its_own() -> None:
    logits = random_logits(2, VOCAB, seed=3)
    family = asking([4], temperature=1.5, num_choices=40, repetition_penalty=1.5, logprobs=1, logprob_token_ids=(4,))
    sampled = sample_for([asking(temperature=1.0), family], logits)
    assert sampled.counts.tolist() == [1, 40]
    lines, tokens = sampled.logprobs, sampled.token_ids[1:]
    assert lines is not None
    assert lines.index.tolist() == list(range(1, 41))
    assert len(set(tokens.tolist())) > 10
    expected = torch.log_softmax(logits[1], dim=-1).numpy()
    np.testing.assert_allclose(lines.logprobs, expected[tokens], atol=1e-5)
    np.testing.assert_allclose(lines.extra_logprobs, np.full(40, expected[4]), atol=1e-5)
    assert lines.ranks.tolist() == [1 + int((expected > expected[token]).sum()) for token in tokens]
