"""What is left behind by a step that failed: enough for a person to understand it, and nobody's prompt."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec

from aioengine.config import EngineConfig
from aioengine.errors import traceback_of
from aioengine.scheduler.plan import StepPlan
from aioengine.scheduler.scheduler import SchedulerStats


def describe_failure(
    error: BaseException, *, plan: StepPlan | None, stats: SchedulerStats, config: EngineConfig
) -> str:
    """The error, the plan that met it, the scheduler's counters and the config, as indented JSON.

    It holds lengths, rows and sampling parameters, and no token id of any prompt or output.
    """
    report = {
        "error": traceback_of(error),
        "plan": plan.describe() if plan is not None else None,
        "stats": msgspec.structs.asdict(stats),
        "config": msgspec.structs.asdict(config),
    }
    return json.dumps(report, indent=2, default=str)


def write_dump(folder: Path, text: str) -> Path:
    """Write a report as a file of its own into ``folder``, which is made if it is missing; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"aioengine-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**9:09d}.json"
    path.write_text(text)
    return path
