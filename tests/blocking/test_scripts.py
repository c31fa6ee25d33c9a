"""Plain scripts, each in a process of its own, as people write them: what they print, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nightly import few

TIMEOUT_S = 120

FAKE = """
from aioengine import LLM, LLMEngine, SamplingParams
from aioengine.testing import FakeExecutor

def fake():
    return FakeExecutor(vocab_size=2048)
"""

SAY_AND_LOAD = """
import threading
from aioengine import LLM
from aioengine.text.tokenizer import Tokenizer

load = Tokenizer.load

def say_and_load(folder):
    {say}
    return load(folder)

Tokenizer.load = say_and_load
"""

# Development mode shows what is closed too late, and by whom nothing was awaited; and on a busy machine that a turn of
# the loop took long, which is no fault of the script's.
PYTHON = [sys.executable, "-X", "dev", "-W", "error", "-u", "-c"]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
}


def run(script: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*PYTHON, script], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=ENVIRONMENT
    )
    done.stderr = without_slow_turns(done.stderr)
    return done


def without_slow_turns(errors: str) -> str:
    return re.sub(r"^Executing <.* took [0-9.]+ seconds\n", "", errors, flags=re.MULTILINE)


SCRIPTS = {
    "generates and just ends": ("""
from aioengine import LLM
llm = LLM()
print(llm.generate("Once upon a time", max_tokens=8, temperature=0)[0].text[0])
""", ",\n"),
    "ends with requests unfinished": ("""
from aioengine import LLMEngine, SamplingParams
engine = LLMEngine()
for number in range(20):
    engine.add_request(str(number), "Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))
print(len(engine.step()) > 0)
""", "True\n"),
    "keeps them in a cycle and in threads": (FAKE + """
import threading

class Keeper:
    def __init__(self):
        self.llm, self.me = LLM(executor=fake()), self

def use():
    kept.append(LLM(executor=fake()))
    print(len(kept[-1].generate([5, 6], max_tokens=3)))

kept = [Keeper()]
for thread in [threading.Thread(target=use), threading.Thread(target=use)]:
    thread.start()
    thread.join()
""", "1\n1\n"),
    "ends while daemon threads are in calls": ("""
import threading
from aioengine import EngineClosed, LLM, SamplingParams

def use(llm):
    try:
        llm.generate(["Once upon a time"] * 50, params)
    except EngineClosed:
        pass

is_running = threading.Event()
say = lambda logits, rows: is_running.set()
params = SamplingParams(max_tokens=300, ignore_eos=True, logits_processors=[say])
shared = LLM()
for llm in (shared, shared, LLM()):
    threading.Thread(target=use, args=(llm,), daemon=True).start()
is_running.wait()
""", ""),
    "ends while a daemon thread loads": (SAY_AND_LOAD.format(say="is_loading.set()") + """
is_loading = threading.Event()
threading.excepthook = lambda args: None
threading.Thread(target=LLM, daemon=True).start()
is_loading.wait()
""", ""),
    # Chats are rendered in a thread, which the interpreter's exit ends before it waits for these.
    "leaves its end to threads and waits for them": (FAKE + """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

def use(number):
    main.join()
    llm.chat([{"role": "user", "content": "Hello"}], max_tokens=3)
    num_outputs = len(llm.generate(["dog " * 20, [5, 6]], max_tokens=3))
    sys.stdout.write(f"{num_outputs}\\n")  # print would write the line's end apart, and threads mix theirs

main = threading.main_thread()
llm = LLM(executor=fake())
pool = ThreadPoolExecutor(2)
for number in range(4):
    pool.submit(llm.generate, [5, 6], max_tokens=3)
    threading.Thread(target=use, args=(number,)).start()
""", "2\n" * 4),
    "has one after the other here and in a process": (FAKE + """
from aioengine import ProcessOptions
llm = None
for is_here in (True, False, True, False):
    llm = None
    llm = LLM(executor=fake()) if is_here else LLM(process=ProcessOptions(executor="contract.fakes:make"))
    print(len(llm.generate([5, 6], max_tokens=3)))
""", "1\n" * 4),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("what", few(["generates and just ends"], of=SCRIPTS))
def test_a_script_that(what: str) -> None:
    script, output = SCRIPTS[what]
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


def test_a_script_that_fails_shows_its_own_error_alone() -> None:
    done = run(FAKE + "llm = LLM(executor=fake())\nllm.generate([5, 6], max_tokens=3)\nraise SystemExit(7)")
    assert (done.returncode, done.stderr) == (7, "")
    done = run(FAKE + "llm = LLM(executor=fake())\nllm.generate([99999])")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("aioengine.errors.InvalidRequest: prompt holds token id 99999")
    assert done.stderr.count("Traceback") == 1


def test_inside_asyncio_run_the_async_way_is_told() -> None:
    done = run("""
import asyncio
from aioengine import LLM

async def main():
    LLM()

asyncio.run(main())
""")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: LLM blocks")
    assert "await aioengine.Engine.start(...)" in last
    assert "await engine.generate(...)" in last
    assert "never awaited" not in done.stderr


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def interrupt(script: str, word: str, started: list[subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], str, str]:
    """Press Ctrl-C once the script has said the word. → the ended process, what else it printed, and its errors."""
    process = subprocess.Popen([*PYTHON, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word
    process.send_signal(signal.SIGINT)
    return process, *process.communicate(timeout=TIMEOUT_S)


# Says from within a step that the call is under way, so that a signal that is sent then meets it there.
ENDLESS = """
from aioengine import LLM, SamplingParams

said = []

def say_once(logits, rows):
    if not said:
        said.append(True)
        print("running")

params = SamplingParams(max_tokens=300, ignore_eos=True, logits_processors=[say_once])
"""


@pytest.mark.nightly
def test_a_script_may_catch_ctrl_c_and_go_on(started: list[subprocess.Popen[str]]) -> None:
    process, output, errors = interrupt(
        ENDLESS
        + """
llm = LLM()
try:
    while True:
        llm.generate(["Once upon a time"] * 50, params)
except KeyboardInterrupt:
    print(llm.stats().running, llm.stats().waiting)
print(len(llm.generate("The dog", max_tokens=3)))
""",
        "running",
        started,
    )
    assert (process.returncode, output, without_slow_turns(errors)) == (0, "0 0\n1\n", "")


ENDED_BY_CTRL_C = {
    "running": ENDLESS + "llm = LLM()\nwhile True:\n    llm.generate(['Once upon a time'] * 50, params)",
    "loading": SAY_AND_LOAD.format(say='print("loading")') + "while True:\n    LLM().close()",
}


@pytest.mark.nightly
@pytest.mark.parametrize("word", few(["running"], of=ENDED_BY_CTRL_C))
def test_ctrl_c_ends_a_script_like_any_other_also_while_the_model_is_loaded(
    word: str, started: list[subprocess.Popen[str]]
) -> None:
    process, _, errors = interrupt(ENDED_BY_CTRL_C[word], word, started)
    assert process.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
