"""MODELS.md is what its command makes, its numbers are those of the models, and its tests are there."""

from __future__ import annotations

import re
from pathlib import Path

import models_table
import pytest
from checkpoints import FAMILIES

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_command_makes() -> None:
    assert (ROOT / "MODELS.md").read_text() == "\n".join(models_table.lines()) + "\n"


@pytest.mark.parametrize("family", models_table.KNOWN)
def test_a_known_model_has_the_parameters_that_it_is_published_with(family: str) -> None:
    _, billions, config = models_table.KNOWN[family]
    num_parameters = models_table.info_of(FAMILIES[family].architecture, config).num_parameters
    assert f"{num_parameters / 1e9:.{len(billions.partition('.')[2])}f}" == billions


def test_the_tests_that_it_names_are_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "MODELS.md").read_text()))
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}" in (ROOT / file).read_text()
