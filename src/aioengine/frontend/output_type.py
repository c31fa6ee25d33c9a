"""A type that an answer is asked for: its JSON schema constrains the text, which is read back as a value of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from aioengine.errors import InvalidRequest, OutputNotParsed
from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.sampling_params import SamplingKeywords, SamplingParams
from aioengine.structured.constraints import Json, as_constraint, schema_of
from aioengine.validation import shorten


class OutputType:
    """Reads answers as values of a type.

    Args:
        kind: a type, such as a pydantic model, a dataclass, a msgspec struct, ``list[Item]``; or a JSON schema, whose
            values are plain lists and dicts.
    Attributes:
        constraint: what its JSON must be.
    Raises:
        InvalidRequest: it has no JSON schema.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        constraint = as_constraint(kind) if isinstance(kind, dict) else Json(_schema_of(kind))
        assert isinstance(constraint, Json)
        self.constraint = constraint
        self._decode = msgspec.json.decode if isinstance(kind, dict) else _decoder_of(kind)

    def constrain(
        self, params: SamplingParams | None, sampling: SamplingKeywords
    ) -> tuple[SamplingParams | None, SamplingKeywords]:
        """The parameters of a call, or its keywords, with the constraint.

        Raises:
            InvalidRequest: they have one already.
        """
        if getattr(params, "structured", None) is not None or sampling.get("structured") is not None:
            raise InvalidRequest("output_type is a constraint itself: leave structured out", param="output_type")
        if isinstance(params, SamplingParams):
            return params.clone(structured=self.constraint), sampling
        return params, {**sampling, "structured": self.constraint}

    def parse(self, output: RequestOutput) -> RequestOutput:
        """The output with ``parsed`` in each choice that calls no tool; not on the loop where its texts are long.

        Raises:
            OutputNotParsed: a choice is no value of the type, such as one that was cut at ``max_tokens``.
        """
        choices = [self._parsed(output, choice) for choice in output.outputs]
        return msgspec.structs.replace(output, outputs=choices)

    def _parsed(self, output: RequestOutput, choice: CompletionOutput) -> CompletionOutput:
        if choice.finish_reason != "stop":
            cut = f"it was cut after {len(choice.token_ids)} tokens (finish_reason {choice.finish_reason!r})"
            hint = "; give a larger max_tokens" if choice.finish_reason == "length" else ""
            raise OutputNotParsed(f"the answer is no {shorten(self._kind)}: {cut}{hint}", choice.text, output)
        if choice.tool_calls:
            return choice
        try:
            value = self._decode(choice.text)
        except Exception as error:  # pydantic's, msgspec's, and what the type's own validators raise
            problem = f"the answer is no {shorten(self._kind)}: {type(error).__name__}: {error}"
            raise OutputNotParsed(problem, choice.text, output) from error
        return msgspec.structs.replace(choice, parsed=value)


def _schema_of(kind: Any) -> dict[str, Any]:
    try:
        return _schema_once(kind)
    except TypeError:  # it has no hash
        return schema_of(kind)


_schema_once = functools.lru_cache(maxsize=128)(schema_of)


def _decoder_of(kind: Any) -> Callable[[str], Any]:
    """As `schema_of` finds the schema: pydantic's models by pydantic, others by msgspec where it knows them."""
    if callable(getattr(kind, "model_validate_json", None)):
        validate: Callable[[str], Any] = kind.model_validate_json
        return validate
    try:
        msgspec.json.schema(kind)
    except TypeError:
        import pydantic

        return pydantic.TypeAdapter(kind).validate_json
    return functools.partial(msgspec.json.decode, type=kind)
