"""What zod 4.6 writes is enforced (`z.toJSONSchema`), but for patterns with look-arounds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from nightly import seeds
from structured.walks import ExactValidator, compile_schema, walk

ZOD = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())


@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("name", ZOD)
def test_an_answer_fits_a_schema_of_zods(name: str, seed: int) -> None:
    grammar = compile_schema(ZOD[name], whitespace=seed % 2 == 1)
    walked = walk(grammar, random.Random(f"{name} {seed}"), num_free_tokens=30, max_tokens=600)
    if walked.has_ended:  # a text of several patterns may need words that chance does not write
        assert ExactValidator(ZOD[name]).faults(walked.text) == [], walked.text
