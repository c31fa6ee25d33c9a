"""On a CPU a request's numbers do not depend, to the last bit, on what else an engine or a process computes."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from nightly import few

from aioengine import Engine, LogitsRow, RequestOutput
from aioengine.kernels.native.team import Program

MODELS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 of float32": {"dtype": "float32", "quantization": "int8"},
}
INT8_CACHE = {"kv_cache_dtype": "int8"}
CASES = few([("int4", True)], of=[(name, is_int8) for name in MODELS for is_int8 in (False, True)])
LENGTHS = (1, 200, 17, 64, 3, 65, 128, 40)
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "seed": 5}


def make_requests() -> list[dict[str, Any]]:
    """Eight, each of another length; every second one sampled; some with rules, some long."""
    rng = random.Random(1)
    requests = []
    for number, length in enumerate(LENGTHS):
        request = {"prompt": rng.choices(range(300, 2000), k=length), "max_tokens": 24 + 3 * number, "logprobs": 2}
        request |= SAMPLED if number % 2 else {"temperature": 0.0}
        if number % 3 == 2:
            request |= {"repetition_penalty": 1.2, "logit_bias": {400: 3.0}, "prompt_logprobs": 1}
        requests.append({**request, "ignore_eos": True})
    return requests


def starting(num_threads: int = 2, **fields: Any) -> Engine:
    """Without a prefix cache, and with steps for all prompts: what is cut otherwise is summed otherwise."""
    return Engine(
        device="cpu", kv_cache_memory_bytes=2**24, max_model_len=320, enable_prefix_caching=False,
        num_threads=num_threads, show_progress=False, **fields,
    )  # fmt: skip


def numbers(output: RequestOutput) -> Any:
    (choice,) = output.outputs
    return choice.token_ids, choice.logprobs, output.prompt_logprobs


async def alone(engine: Engine, requests: list[dict[str, Any]]) -> list[Any]:
    return [numbers(await engine.generate(**request)) for request in requests]


async def together(engine: Engine, requests: list[dict[str, Any]]) -> list[Any]:
    return [numbers(each) for each in await asyncio.gather(*(engine.generate(**request) for request in requests))]


@pytest.mark.parametrize(("name", "has_int8_cache"), CASES)
async def test_a_request_alone_and_among_seven_others(name: str, has_int8_cache: bool) -> None:
    async with starting(**MODELS[name], **(INT8_CACHE if has_int8_cache else {})) as engine:
        expected = await alone(engine, make_requests())
        assert await together(engine, make_requests()) == expected
        # Those that come later meet the others at other places, and are in other rows.
        assert await together(engine, make_requests()[::-1]) == expected[::-1]


@pytest.mark.parametrize("family", few(["gpt-oss"], of=["mixtral", "qwen2-moe", "qwen3-moe", "olmoe"]))
async def test_experts_serve_each_token_as_if_it_was_alone(tmp_path: Path, family: str) -> None:
    sizes = {"vocab_size": 2000, "max_position_embeddings": 320}
    folder = make_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **sizes)
    async with starting(model=str(folder)) as engine:
        expected = await alone(engine, make_requests())
        assert await together(engine, make_requests()) == expected


@pytest.mark.nightly
async def test_two_engines_of_one_process_at_once() -> None:
    requests = make_requests()
    async with (
        starting(dtype="bfloat16", num_threads=3) as first,
        starting(dtype="float32", quantization="int8", num_threads=1) as second,
    ):
        expected = await alone(first, requests), await alone(second, requests)
        assert expected[0] != expected[1]
        for _ in range(2):
            found = await asyncio.gather(together(first, requests), together(second, requests))
            assert tuple(found) == expected


@pytest.mark.nightly
async def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    expected = None
    for num_threads in (1, 2, 5):
        async with starting(dtype="bfloat16", num_threads=num_threads) as engine:
            found = await together(engine, make_requests())
        expected = expected or found
        assert found == expected


async def test_logits_processors_beside_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with one is not a program; those before and after it are, over the same rows."""
    replayed, replay = [], Program.replay
    monkeypatch.setattr(Program, "replay", lambda self: (replayed.append(1), replay(self))[1])

    def never_even(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
        logits[:, ::2] = -torch.inf

    plain, ruled = make_requests()[3], {**make_requests()[0], "max_tokens": 9, "logits_processors": [never_even]}
    plain["max_tokens"] = 80
    async with starting(dtype="bfloat16") as engine:
        expected = await alone(engine, [plain, ruled])
        assert all(token_id % 2 for token_id in expected[1][0])
        before = len(replayed)
        async with engine.stream(**plain) as stream:
            for _ in range(3):
                async for _ in stream:
                    if len(replayed) > before + 2:
                        break
                assert numbers(await engine.generate(**ruled)) == expected[1]
                before = len(replayed)
            assert numbers(await stream.finish()) == expected[0]
            assert len(replayed) > before


FORKING = """
import asyncio, os, sys, multiprocessing
from aioengine import LLM, Engine

def talk(engine):
    return engine.generate("Once upon a time", temperature=0, max_tokens=16)

def fork(end):
    child = os.fork()
    if not child:
        end(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

async def within_a_loop():
    async with Engine(kv_cache_memory_bytes=2**24, max_model_len=256, num_threads=3) as engine:
        before = await talk(engine)
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
        process.start()
        process.join()
        assert (fork(os._exit), process.exitcode) == (7, 7)
        assert (await talk(engine)).outputs[0].token_ids == before.outputs[0].token_ids

asyncio.run(within_a_loop())
llm = LLM(kv_cache_memory_bytes=2**24, max_model_len=256, num_threads=3)
before = talk(llm)
assert fork(sys.exit) == 7
assert talk(llm)[0].outputs[0].token_ids == before[0].outputs[0].token_ids
print("done")
"""


@pytest.mark.nightly
def test_children_that_are_forked_beside_helper_threads_end_and_disturb_nothing() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", FORKING], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
