"""MODELS.md is what its command makes, its numbers are those of the models, and its tests are there."""

from __future__ import annotations

import re
from pathlib import Path

import models_table
import pytest

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_command_makes() -> None:
    assert (ROOT / "MODELS.md").read_text() == "\n".join(models_table.lines()) + "\n"


@pytest.mark.parametrize("architecture", models_table.KNOWN)
def test_a_known_model_has_the_parameters_that_it_is_published_with(architecture: str) -> None:
    _, billions, config = models_table.KNOWN[architecture]
    assert models_table.sizes(architecture, config)[0] / 1e9 == pytest.approx(billions, abs=0.01)


def test_the_tests_that_it_names_are_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "MODELS.md").read_text()))
    assert len(named) > 5
    for file, test in named:
        assert f"def {test}" in (ROOT / file).read_text()
