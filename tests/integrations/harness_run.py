"""Runs the tasks of `harness_tasks` on one model, and writes what each request brought as JSON; a program of its own,
since the harness and what it imports warn of much.

    python tests/integrations/harness_run.py MODEL MODEL_ARGS FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

import aioengine.integrations.lm_eval  # noqa: F401 - its name is known to the harness from now on

TASKS = Path(__file__).parent / "harness_tasks"
CHATS = ["demo_sums"]
TEXTS = ["demo_animals", "demo_stories", "demo_sayings"]


def run(model: str, model_args: str) -> dict[str, Any]:
    """By task: its metrics, and the answers to its requests."""
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    told: dict[str, Any] = {}
    for names, is_chat in ((TEXTS, False), (CHATS, True)):
        results = lm_eval.simple_evaluate(
            model=model,
            model_args=model_args,
            tasks=names,
            task_manager=manager,
            apply_chat_template=is_chat,
            batch_size=4,
            device="cpu",
            bootstrap_iters=0,
        )
        for name in names:
            metrics = {key: value for key, value in results["results"][name].items() if isinstance(value, int | float)}
            samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
            told[name] = {"metrics": metrics, "answers": [sample["resps"] for sample in samples]}
    return told


if __name__ == "__main__":
    _, model, model_args, file = sys.argv
    Path(file).write_text(json.dumps(run(model, model_args)))
