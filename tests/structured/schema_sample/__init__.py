"""A sample of JSON Schemas, of the keywords alone and of what programs send, each with examples for and against it."""

from __future__ import annotations

from collections import Counter

from structured.schema_sample import (
    arrays,
    combinations,
    formats,
    models,
    objects,
    programs,
    references,
    scalars,
    spelling,
    tools,
)
from structured.schema_sample.case import SchemaCase

SAMPLE: tuple[SchemaCase, ...] = (
    *scalars.CASES,
    *formats.CASES,
    *arrays.CASES,
    *objects.CASES,
    *combinations.CASES,
    *references.CASES,
    *spelling.CASES,
    *models.CASES,
    *tools.CASES,
    *programs.CASES,
)

# How many entries have each tag.
COUNTS: Counter[str] = Counter(tag for case in SAMPLE for tag in case.tags)

__all__ = ["COUNTS", "SAMPLE", "SchemaCase"]
