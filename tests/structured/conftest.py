"""Grammars over the bundled model's vocabulary, and engines in which they are right whatever happens around them."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from aioengine.models.folder import DEMO_MODEL, ModelFolder
from aioengine.structured.constraints import Constraint, as_constraint
from aioengine.structured.grammar import CompiledGrammar
from aioengine.structured.guidance import Vocabulary

ANIMAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "white"]}, "maxItems": 3},
        "can_fly": {"type": "boolean"},
    },
    "required": ["animal", "legs", "colours", "can_fly"],
    "additionalProperties": False,
}

NUM_TOKENS = 2048


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@functools.cache
def ending_ids() -> tuple[int, ...]:
    return ModelFolder.read(DEMO_MODEL).eos_token_ids


@functools.cache
def vocabulary(num_tokens: int = NUM_TOKENS) -> Vocabulary:
    return Vocabulary(tokenizer().to_str(), num_tokens, ending_ids(), lambda *_: None)  # a process for each takes 0.2 s


def compile_grammar(given: Any) -> CompiledGrammar:
    """Of a constraint, or of what `as_constraint` takes."""
    constraint: Constraint = as_constraint(given)
    return vocabulary().compile(constraint)


def decode(token_ids: list[int]) -> str:
    return tokenizer().decode([token_id for token_id in token_ids if token_id not in ending_ids()])


def check_json(text: str, schema: Any) -> Any:
    """The value of a text that the schema must admit."""
    value = json.loads(text)
    jsonschema.validate(value, schema)
    return value
