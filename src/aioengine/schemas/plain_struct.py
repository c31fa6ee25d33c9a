"""What the engine's answers are made of, so that web frameworks and ``json.dumps`` can take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec


class PlainStruct(msgspec.Struct, frozen=True):
    """A struct of plain values, lists, dicts and such structs.

    FastAPI takes one as it is, with ``-> RequestOutput`` as its type or without, and Litestar does, too. `to_dict` is
    for what takes plain values alone: ``json.dumps``, Starlette's ``JSONResponse``, aiohttp's ``json_response``.
    """

    def to_dict(self) -> dict[str, Any]:
        """All fields, those of the structs inside included, as plain values; token ids that are keys stay ints."""
        plain: dict[str, Any] = _to_builtins(self)
        return plain

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Fields and values, so that ``dict(output)`` works as with pydantic's models: FastAPI asks for that."""
        return ((name, getattr(self, name)) for name in self.__struct_fields__)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        """What pydantic asks of a type that is not its own; a core schema is a dict, so that pydantic is not imported.

        A value that is one already is taken as it is; JSON of its fields becomes one.
        """
        fields = {
            field.name: {
                "type": "typed-dict-field",
                "schema": handler.generate_schema(field.type),
                "required": field.required,
            }
            for field in msgspec.structs.fields(cls)
        }
        plain = {"type": "typed-dict", "cls_name": cls.__name__, "fields": fields}

        def take(value: Any, to_fields: Callable[[Any], dict[str, Any]]) -> PlainStruct:
            return value if isinstance(value, cls) else msgspec.convert(to_fields(value), cls)

        return {
            "type": "function-wrap",
            "function": {"type": "no-info", "function": take},
            "schema": plain,
            "serialization": {"type": "function-plain", "function": _to_builtins, "return_schema": plain},
        }


def _to_builtins(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=_open)


def _open(value: Any) -> Any:
    """Of a parsed answer that is a value of pydantic's."""
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} has no plain form")
