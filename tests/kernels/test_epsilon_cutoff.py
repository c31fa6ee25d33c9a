"""The epsilon cutoff: transformers' on a CPU, the oracle's in the kernels, and known to HTTP and the command line."""

from __future__ import annotations

import click
import msgspec
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from kernels.rule_batch import DEVICE
from kernels.test_draw import check, samples_of
from sampler.batch import chi_square_is_plausible, make_rows, random_logits

from aioengine import Engine
from aioengine.cli.options import given, options_of
from aioengine.kernels.sampling import thresholds
from aioengine.kernels.torch import sampling as oracle
from aioengine.sampler import sample
from aioengine.sampling_params import SamplingParams
from aioengine.server.schema import CompletionRequest
from doubles.fake_accelerator import FakeAccelerator
from doubles.gpu_executor import start_gpu_executor


@pytest.mark.parametrize("epsilon", [1e-4, 0.01, 0.1, 0.9])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draws_are_from_what_transformers_keeps(epsilon: float, temperature: float) -> None:
    logits, count = random_logits(1, 300, seed=1), 4000
    kept = transformers.EpsilonLogitsWarper(epsilon)(torch.empty(0), logits / temperature).softmax(-1)[0]
    rows = make_rows(count, temperature=temperature, epsilon_cutoff=epsilon, positions=np.arange(count))
    counts = np.bincount(sample(logits.expand(count, -1), rows).token_ids, minlength=300)
    assert chi_square_is_plausible(counts, kept.double().numpy())


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_kernels_keep_what_the_oracle_keeps(top_p: float) -> None:
    logits = random_logits(6, 3000, seed=2)
    columns = {
        "epsilon_cutoff": [0, 1e-5, 1e-3, 0.01, 0.1, 0.9],
        "top_k": [0, 0, 100, 0, 3, 0],
        "min_p": [0, 0, 0, 0.01, 0, 0],
    }
    rows = make_rows(6, temperature=1.5, top_p=top_p, **columns)
    check(logits, samples_of(rows))
    samples = samples_of(rows)
    floors = thresholds.find_floors(logits.to(DEVICE), samples.to(DEVICE), None).floors.cpu()
    expected = oracle.threshold(logits, logits.amax(dim=1), torch.full((6,), 1.5), samples)[:, 0]
    num_kept = (logits >= floors[:, None]).sum(dim=1)[1:], (logits >= expected[:, None]).sum(dim=1)[1:]
    assert torch.equal(*num_kept)


def test_http_and_the_command_line_know_it() -> None:
    body = msgspec.json.decode(b'{"epsilon_cutoff": 0.25}', type=CompletionRequest)
    assert body.sampling()["epsilon_cutoff"] == 0.25
    taken: dict[str, float] = {}

    @click.command
    @options_of(SamplingParams)
    def command(**flags: float) -> None:
        taken.update(given(SamplingParams, flags))

    assert CliRunner().invoke(command, ["--epsilon-cutoff", "0.5"]).exit_code == 0
    assert taken == {"epsilon_cutoff": 0.5}
    assert CliRunner().invoke(command, ["--epsilon-cutoff", "1"]).exit_code == 2


@pytest.mark.parametrize("has_gpu", [False, True])
async def test_an_engine_draws_with_it(has_gpu: bool) -> None:
    """So high that only the likeliest token is left, or those that tie with it, on a CPU and on a GPU."""
    fields = {"max_model_len": 64, "max_num_seqs": 2}
    executor = await start_gpu_executor(FakeAccelerator(), **fields) if has_gpu else None
    async with Engine(executor=executor, **fields) as engine:
        likeliest = await engine.generate("Once upon a time", temperature=2, seed=3, top_k=1, max_tokens=8)
        drawn = await engine.generate("Once upon a time", temperature=2, seed=3, epsilon_cutoff=0.999, max_tokens=8)
        free = await engine.generate("Once upon a time", temperature=2, seed=3, max_tokens=8)
    assert drawn.text == likeliest.text != free.text
