"""ARCHITECTURE.md against the code: the files it names, the floors, and the worked request."""

from __future__ import annotations

import ast
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
PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]
PAGE = "\n".join(page.read_text() for page in PAGES)
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


def test_a_rooms_docstring_names_its_modules_and_no_others() -> None:
    rooms = {file.parent: ast.get_docstring(ast.parse(file.read_text())) for file in SOURCE.glob("*/__init__.py")}
    assert {room.name for room in rooms} >= {"frontend", "core", "scheduler", "executor", "models", "kernels"}
    for room, text in rooms.items():
        assert text, f"{room.name} says what lives in it"
        named = re.findall(r"`([a-z0-9_]+)`", text)
        assert {file.stem for file in room.glob("*.py")} - {"__init__", *named} == set(), room.name
        for module in named:
            assert (room / f"{module}.py").is_file() or list(room.glob(f"*/{module}.py")), f"{room.name}: {module}"


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
