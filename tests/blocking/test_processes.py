"""Blocking objects over an engine in a process of its own: nothing of them is different."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioengine import EngineDead, LLMEngine, ProcessOptions, SamplingParams

TESTS = Path(__file__).parents[1]
CHILD = ProcessOptions(executor="contract.fakes:make_slow", plugins=("contract.fakes",))
PROMPTS = [[5, 6, number] for number in range(10, 40)]


@pytest.fixture(autouse=True)
def children_find_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")


def run_to_the_end(engine: LLMEngine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_this_process_loads_no_torch() -> None:
    code = (
        "import sys; from aioengine import LLM, ProcessOptions\n"
        "llm = LLM(process=ProcessOptions(executor='contract.fakes:make'))\n"
        "llm.generate([[5, 6]], max_tokens=3); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_a_dead_process_is_told_of_once() -> None:
    with LLMEngine(process=CHILD) as engine:
        engine.add_request("one", PROMPTS[0], SamplingParams(max_tokens=4000, ignore_eos=True, seed=7))
        engine.step()
        (child,) = [child for child in psutil.Process().children() if "--handshake" in child.cmdline()]
        child.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            run_to_the_end(engine)
        assert engine.step() == []
