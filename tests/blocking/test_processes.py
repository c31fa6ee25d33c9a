"""The blocking faces over an engine in a process of its own: nothing of them is different."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from contract import fakes

from aioengine import LLM, EngineConfig, EngineDead, InvalidRequest, LLMEngine, ProcessOptions, SamplingParams

TESTS = Path(__file__).parents[1]
CHILD = ProcessOptions(executor="contract.fakes:make_slow", plugins=("contract.fakes",))
SEEDED = SamplingParams(max_tokens=20, seed=7)
PROMPTS = [[5, 6, number] for number in range(10, 40)]


@pytest.fixture(scope="module", autouse=True)
def children_find_the_device() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [before])])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(process=CHILD) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(process=CHILD) as engine:
        yield engine


def token_ids(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run_to_the_end(engine: LLMEngine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_outputs_are_those_of_this_process(llm: LLM) -> None:
    with LLM(executor=fakes.make(EngineConfig())) as here:
        assert token_ids(llm.generate(PROMPTS, SEEDED)) == token_ids(here.generate(PROMPTS, SEEDED))


def test_steps_bring_all_that_was_asked(engine: LLMEngine) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=10, n=2, seed=number))
    finished = {output.request_id: output for output in run_to_the_end(engine) if output.finished}
    assert sorted(finished) == sorted(map(str, range(len(PROMPTS))))
    assert all(len(choice.token_ids) == 10 for output in finished.values() for choice in output.outputs)


def test_sleep_wake_up_and_the_numbers_are_the_engines(engine: LLMEngine) -> None:
    assert not engine.is_sleeping()
    engine.sleep(1)
    assert engine.is_sleeping()
    engine.wake_up()
    assert not engine.is_sleeping()
    engine.check_health()
    assert engine.reset_prefix_cache()
    assert any(metric.name == "generation_tokens" for metric in engine.get_metrics())
    with pytest.raises(InvalidRequest, match="cannot travel"):
        engine.apply_model(lambda model: None)


def test_this_process_loads_no_torch(llm: LLM) -> None:
    llm.generate(PROMPTS[:1], SEEDED)
    # Other tests of this process may have loaded it; a fresh interpreter tells.
    code = (
        "import sys; from aioengine import LLM, ProcessOptions\n"
        "llm = LLM(process=ProcessOptions(executor='contract.fakes:make'))\n"
        "llm.generate([[5, 6]], max_tokens=3); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_a_dead_process_is_told_of_once() -> None:
    with LLMEngine(process=CHILD) as engine:
        before = {child.pid for child in psutil.Process().children()}
        engine.add_request("one", PROMPTS[0], SamplingParams(max_tokens=4000, ignore_eos=True, seed=7))
        engine.step()
        (child,) = [child for child in psutil.Process().children() if "--handshake" in child.cmdline()][-1:]
        assert child.pid in before
        child.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            run_to_the_end(engine)
        assert engine.step() == []
