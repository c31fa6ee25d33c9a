"""One entry of the sample: a schema with texts that fit it and texts that do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class SchemaCase:
    """A JSON Schema and what is known of it.

    Attributes:
        name: unique in the sample.
        tags: the features that the schema uses.
        schema: the parsed schema: a mapping or a boolean. Draft 2020-12 unless its ``$schema`` says otherwise.
        valid: parsed instances that the schema admits, keys in the order of the schema's ``properties``.
        invalid: parsed instances that it does not admit. Empty only where everything is admitted.
    """

    name: str
    tags: frozenset[str]
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"SchemaCase({self.name})"


def case(name: str, tags: str, schema: Any, valid: list[Any], invalid: list[Any]) -> SchemaCase:
    """The entry, from tags that are parted by spaces."""
    return SchemaCase(
        name=name, tags=frozenset(tags.split()), schema=schema, valid=tuple(valid), invalid=tuple(invalid)
    )
