"""Answers of a given type: its JSON schema constrains the text, which is read back as a value of the type."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from aioengine.errors import InvalidRequest, OutputNotParsed
from aioengine.frontend.call_options import CallKeywords
from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.schemas.type_schema import TypeSchema, describe, is_type, no_schema
from aioengine.structured.constraints import Constraint, Json
from aioengine.validation import shorten, typed


class OutputType:
    """Reads answers as values of a type.

    Args:
        kind: a type, such as a pydantic model, a dataclass, a msgspec struct, ``list[Item]``; or a JSON schema, whose
            values are plain lists and dicts.
    Attributes:
        constraint: of the answer's text.
    Raises:
        InvalidRequest: ``kind`` has no JSON schema.
    """

    def __init__(self, kind: Any) -> None:
        self._name = kind.__name__ if isinstance(kind, type) else shorten(kind)
        schema, self._decode = _describe(kind)
        self.constraint = Json(schema)

    def constrain(
        self, params: SamplingParams | None, options: CallKeywords
    ) -> tuple[SamplingParams | None, CallKeywords]:
        """A call's parameters and keywords, with the constraint added to one of them.

        Raises:
            InvalidRequest: they have a constraint already, or ask for no text.
        """
        if getattr(params, "detokenize", True) is False or options.get("detokenize") is False:
            raise InvalidRequest("output_type is read from the text: leave out detokenize=False", param="output_type")
        if getattr(params, "structured", None) is not None or options.get("structured") is not None:
            raise InvalidRequest("output_type is a constraint itself: leave structured out", param="output_type")
        if isinstance(params, SamplingParams):
            return params.clone(structured=self.constraint), options
        return params, {**options, "structured": self.constraint}

    def parse(self, output: RequestOutput) -> RequestOutput:
        """The output with ``parsed`` set in each choice that calls no tool. For long texts, not on the event loop.

        Raises:
            OutputNotParsed: a choice is no value of the type, such as one that was cut at ``max_tokens``.
        """
        choices, errors = list(output.outputs), list[OutputNotParsed]()
        for place, choice in enumerate(choices):
            try:
                choices[place] = self._parsed(choice)
            except OutputNotParsed as error:
                errors = errors or [error]
        output = msgspec.structs.replace(output, outputs=choices)
        if errors:
            errors[0].output, errors[0].outputs = output, [output]
            raise errors.pop()  # its traceback has this frame, which must not have the error
        return output

    def _parsed(self, choice: CompletionOutput) -> CompletionOutput:
        if choice.finish_reason != "stop":
            cut = f"it was cut after {len(choice.token_ids)} tokens (finish_reason {choice.finish_reason!r})"
            hint = "; give a larger max_tokens" if choice.finish_reason == "length" else ""
            raise OutputNotParsed(f"the answer is no {self._name}: {cut}{hint}", choice.text)
        if choice.tool_calls:
            return choice
        try:
            value = self._decode(choice.text)
        except Exception as error:  # of pydantic, of msgspec, or of the type's own validators
            reason, cut = choice.stop_reason, ""
            if reason is not None:
                cut = f"it was cut at the stop {'string' if isinstance(reason, str) else 'token'} {reason!r}; "
            problem = f"the answer is no {self._name}: {cut}{type(error).__name__}: {error}"
            raise OutputNotParsed(problem, choice.text) from error
        return msgspec.structs.replace(choice, parsed=value)


def rename_param(error: InvalidRequest) -> InvalidRequest:
    """An error of the constraint, under the name that the caller used."""
    if error.param != "structured":
        return error
    return InvalidRequest(error.renamed("output_type"), param="output_type")  # without its hint, which is for schemas


def _describe(kind: Any) -> TypeSchema:
    """The JSON schema of a type, and its decoder.

    Raises:
        InvalidRequest: ``kind`` is no type, or has no JSON schema.
    """
    if isinstance(kind, Constraint):
        raise _refused(f"{shorten(kind)} is a constraint, and no type: give it as structured=...")
    if isinstance(kind, dict):
        if not kind:
            raise _refused("an empty schema says nothing of the answer; give a type, or a schema that does")
        return TypeSchema(kind, msgspec.json.decode)
    if not is_type(kind):
        raise _refused(f"it is {typed(kind)}, and no type; give one, such as a dataclass, or a JSON schema as a dict")
    try:
        try:
            hash(kind)
        except TypeError:
            return describe(kind)
        return _described(kind)
    except Exception as error:  # a class of the caller's own may raise anything while its schema is made
        raise _refused(no_schema(kind, error)) from None


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"output_type: {message}", param="output_type")


_described = functools.lru_cache(maxsize=128)(describe)
