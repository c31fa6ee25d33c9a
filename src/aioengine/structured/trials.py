"""Grammars that may take long are compiled in a process first, which is killed where they do."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from aioengine.errors import EngineOverloaded, InternalError, InvalidRequest
from aioengine.structured.constraints import Constraint, Either, Grammar, Json, StructuralTags
from aioengine.structured.grammar import STACK_BYTES
from aioengine.structured.json_schema import is_number, listed, mapped, subschemas

logger = logging.getLogger("aioengine")

LARGE_BYTES = 16 * 1024
"""A larger constraint is tried first. Smaller ones stay within llguidance's own limits: 0.4 s, and some MB."""

MAX_MULTIPLES = 5000
"""The sum of all ``multipleOf`` in a schema; llguidance takes 10 to 15 µs for each of these."""

MAX_COPIES = 1000
"""Properties beside options, times options; llguidance takes 0.1 to 0.4 ms for each."""

_CHOICES = frozenset({"enum", "anyOf", "oneOf", "allOf", "$ref", "pattern", "format"})
"""Keywords whose options, or states, llguidance goes through in pairs, where two of them hold together."""

CPU_S = 2
WALL_S = 20.0
"""For a machine whose cores are busy."""
MEMORY_BYTES = 2**30

_CHILD = Path(__file__).with_name("trial.py")


def is_to_be_tried(constraint: Constraint) -> bool:
    """Whether compiling it may take long: a large constraint; a schema whose options multiply; a caller's grammar, of
    which a few lines may take minutes."""
    options = constraint.options if isinstance(constraint, Either) else (constraint,)
    if len(constraint.content) > LARGE_BYTES:
        return True
    is_foreign = any(isinstance(option, Grammar) and not option.is_forcing for option in options)
    schemas: list[Any] = [option.schema for option in options if isinstance(option, Json)]
    schemas += [tag.schema for option in options if isinstance(option, StructuralTags) for tag in option.tags]
    return is_foreign or any(map(multiplies, schemas))


def multiplies(schema: Any) -> bool:
    """Whether compiling a schema may take long, however small it is."""
    nodes = list(subschemas(schema))
    multiples = [node["multipleOf"] for node in nodes if is_number(node.get("multipleOf"))]
    num_options = sum(len(listed(node, "anyOf")) + len(listed(node, "oneOf")) for node in nodes)
    num_copied = 0
    for node in nodes:
        parts = [part for part in listed(node, "allOf") if isinstance(part, dict)]
        num_choices = len(_CHOICES.intersection(node) - {"allOf"}) + sum(
            not _CHOICES.isdisjoint(part) for part in parts
        )
        if num_choices > 1:
            return True
        if num_choices:
            num_copied += sum(len(mapped(part, "properties")) for part in (node, *parts))
    return sum(map(abs, multiples)) > MAX_MULTIPLES or num_options * num_copied > MAX_COPIES


def try_compiling(text: str, num_tokens: int, limits: dict[str, Any]) -> None:
    """Compile a grammar in a process, and make its first masks; from any thread.

    Args:
        text: as llguidance takes it.
        num_tokens: of the vocabulary.
    Raises:
        InvalidRequest: it takes more than `CPU_S`, `WALL_S` or `MEMORY_BYTES`.
        EngineOverloaded: there was no process to be had.
        InternalError: the process could not do its work.
    """
    sizes = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES, "stack_bytes": STACK_BYTES}
    given = json.dumps({"text": text, "num_tokens": num_tokens, "limits": limits, **sizes})
    command = [sys.executable, "-P", str(_CHILD)]
    try:
        code = subprocess.run(command, input=given, stdout=subprocess.DEVNULL, text=True, timeout=WALL_S).returncode
    except subprocess.TimeoutExpired:
        code = -signal.SIGKILL
    except OSError as error:
        raise EngineOverloaded(f"no process to compile the grammar in: {error}", retry_after_s=1.0) from error
    if code > 0:
        raise InternalError("the process in which grammars are tried does not work; its stderr says why")
    if code < 0:
        logger.info("a grammar was given up by %s", signal.Signals(-code).name)
        told = f"structured: it takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB to compile; give a simpler one"
        raise InvalidRequest(told, param="structured")
