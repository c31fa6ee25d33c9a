"""ARCHITECTURE.md against the code: the files it names, the floors, and the worked request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_floors
import worked_request

from aioengine import sampling_params
from aioengine.config import EngineConfig
from aioengine.executor.step_words import SECTIONS
from aioengine.kernels.sample_rows import SampleRow

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
SOURCE = ROOT / "src" / "aioengine"


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_the_picture_of_the_floors_is_the_one_that_is_tested() -> None:
    assert [line.strip() for line in block("floors").splitlines()] == [line.strip() for line in test_floors.FLOORS]


def test_the_worked_request_is_what_the_scheduler_does() -> None:
    assert block("worked") == "\n".join(worked_request.lines()) + "\n"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_/]+\.(?:py|html))`", PAGE))))
def test_a_file_that_the_page_names_is_there(name: str) -> None:
    assert (SOURCE / name).is_file() or (ROOT / name).is_file() or list(SOURCE.glob(f"*/{name}"))


def test_a_module_that_a_table_gives_to_a_room_is_there() -> None:
    rooms = re.findall(r"^\| `([a-z]+)/` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert {room for room, _ in rooms} >= {"frontend", "core", "scheduler", "executor", "models", "kernels"}
    for room, text in rooms:
        for module in re.findall(r"`([a-z_]+)`", text):
            folder = SOURCE / room
            assert (folder / f"{module}.py").is_file() or list(folder.glob(f"*/{module}.py")), f"{room}: {module}"


def test_the_words_of_a_step_are_counted() -> None:
    found = re.findall(r"^ ([a-z_]+) +(\d+)   \w", PAGE, flags=re.MULTILINE)
    assert {name: int(words) for name, words in found} == SECTIONS._asdict()
    assert len(SampleRow) == 9
    assert "nine words (row of logits" in PAGE


def test_the_limits_of_lists_are_those_of_the_parameters() -> None:
    page = (ROOT / "docs" / "sampling.md").read_text()
    limits = re.search(r"^Lists have limits: (.*?)\.$", page, flags=re.MULTILINE | re.DOTALL)
    assert limits is not None
    names = ("STOP_STRINGS", "BAD_WORDS", "TEXT_CHARS", "BAD_WORDS_CHARS", "LOGIT_BIAS", "LOGPROB_TOKEN_IDS")
    config = EngineConfig()
    known = [*(getattr(sampling_params, f"MAX_{name}") for name in names), config.max_n, config.max_logprobs]
    assert [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", limits[1])] == known
