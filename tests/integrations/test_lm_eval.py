"""The evaluation harness over the engine says what it says over transformers, request by request.

The harness pulls in pyarrow, scikit-learn and their like, and is no part of ``aioengine[dev]``: these tests are
`make nightly`'s, which wants ``pip install -e '.[dev,nightly]'``, and fail where that is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import aioengine

FOLDER = Path(__file__).parent
MODEL = Path(aioengine.__file__).parent / "models" / "demo"
TIMEOUT_S = 900.0
NEEDED = "pip install -e '.[dev,nightly]'"


def run(*command: str) -> None:
    """Run Python with the harness, offline."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.fail(f"the evaluation harness is missing: {NEEDED}")
    paths = [str(FOLDER.parents[1] / "recipes"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]


def answers_of(model: str, file: Path, **arguments: Any) -> dict[str, Any]:
    given = {"pretrained": str(MODEL), "dtype": "float32", "max_length": 256, **arguments}
    told = ",".join(f"{name}={value}" for name, value in given.items())
    run(str(FOLDER / "harness_run.py"), model, told, str(file))
    answers: dict[str, Any] = json.loads(file.read_text())
    return answers


def assert_same(ours: Any, theirs: Any) -> None:
    """Texts, flags and counts equal; log-likelihoods to a thousandth."""
    if isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-3)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, Mapping):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    else:
        assert ours == theirs


@pytest.mark.nightly
def test_every_answer_is_that_of_the_harness_own_model(tmp_path: Path) -> None:
    theirs = answers_of("hf", tmp_path / "theirs.json")
    ours = answers_of("aioengine", tmp_path / "ours.json")
    for task in theirs:
        assert_same(ours[task], theirs[task])
    metrics = {task: told["metrics"] for task, told in ours.items()}
    assert 0.5 < metrics["demo_animals"]["acc,none"] < 1.0, "nothing is shown by a task that is all right or all wrong"
    assert 0.5 < metrics["demo_sums"]["exact_match,none"] < 1.0
    flags = {flag for choices in ours["demo_animals"]["answers"] for ((_, flag),) in choices}
    assert flags == {True, False}


@pytest.mark.nightly
def test_the_harness_command_knows_the_model(tmp_path: Path) -> None:
    run(
        *("-m", "aioengine.integrations.lm_eval", "run", "--model", "aioengine"),
        *("--model_args", f"pretrained={MODEL},dtype=float32", "--tasks", "demo_sums", "--apply_chat_template"),
        *("--include_path", str(FOLDER / "harness_tasks"), "--output_path", str(tmp_path), "--limit", "20"),
    )
    (results,) = tmp_path.rglob("results*.json")
    assert json.loads(results.read_text())["results"]["demo_sums"]["exact_match,none"] == 1.0


def test_without_the_harness_an_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from aioengine import ConfigError\n"
        "try: import aioengine.integrations.lm_eval\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'aioengine[lm_eval]'" in done.stdout
