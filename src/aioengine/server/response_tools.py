"""The tools of ``/v1/responses``: what clients send, as functions for the model, and its calls as clients know them.

A model calls functions by one name, with a JSON object. Clients such as Codex also group functions in a namespace, have
custom tools, whose input is free text, and offer tools that OpenAI's servers would run, which are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from aioengine.server.errors import invalid_value

HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell", "shell", "apply_patch",
    "computer", "tool_search", "programmatic_tool_calling",
)  # fmt: skip
"""Types of tools that a server would run; dates and "_preview" may follow."""
INPUT = "input"
"""The one argument that a custom tool has as a function."""


class ClientTool(NamedTuple):
    """A tool as its client names it. A custom one has free text for its input."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function(self) -> str:
        """The name of its function."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name

    def fields(self, arguments: str) -> dict[str, str]:
        """The fields of a call's item beside its ids and its status."""
        names = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        return names | ({"input": input_of(arguments)} if self.is_custom else {"arguments": arguments})


class ResponseTools(NamedTuple):
    """A request's tools.

    Attributes:
        functions: for the model, as the engine takes them; None: there are none.
        choice: the ``tool_choice``, in the names of these.
        by_function: each tool by the name of its function.
    """

    functions: list[dict[str, Any]] | None = None
    choice: Any = None
    by_function: dict[str, ClientTool] = {}  # noqa: RUF012  # never written to


def read_response_tools(tools: list[Any] | None, choice: Any, leave_out: Callable[[str], None]) -> ResponseTools:
    """The tools of a request.

    Args:
        leave_out: called with the type of each tool that is left out.
    Raises:
        ApiError: a namespace holds no list of tools.
    """
    if tools is None:
        return ResponseTools(None, _own_choice(choice))
    functions: list[Any] = []
    known: dict[str, ClientTool] = {}

    def add(tool: Any, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        hosted = next((name for name in HOSTED if isinstance(kind, str) and kind.startswith(name)), None)
        if hosted is not None:
            leave_out(hosted)
        elif kind == "namespace" and namespace is None:
            if not isinstance(tool.get("name"), str) or not isinstance(tool.get("tools"), list):
                raise invalid_value("tools", "tools has a namespace without a name or a list of tools")
            for inner in tool["tools"]:
                add(inner, tool["name"])
        elif kind in ("function", "custom") and isinstance(tool.get("name"), str) and "custom" not in tool:
            named = ClientTool(tool["name"], namespace, kind == "custom")
            known[named.function] = named
            functions.append(_of_custom(tool, named) if named.is_custom else {**tool, "name": named.function})
        else:  # the engine refuses it, with a reason
            functions.append(tool)

    for tool in tools:
        add(tool, None)
    return ResponseTools(functions, _own_choice(choice), known)


def _of_custom(tool: dict[str, Any], named: ClientTool) -> dict[str, Any]:
    """A custom tool as a function; the grammar of its input goes into the description, and constrains nothing."""
    said = [tool.get("description")]
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        said.append(f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}")
    about = {"type": "string", "description": "The tool's whole input, as plain text"}
    schema = {"type": "object", "properties": {INPUT: about}, "required": [INPUT], "additionalProperties": False}
    description = "\n\n".join(text for text in said if isinstance(text, str))
    return {"type": "function", "name": named.function, "description": description, "parameters": schema}


def _own_choice(choice: Any) -> Any:
    """A ``tool_choice`` that names tools, in the names of their functions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        kept = [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in ("function", "custom")]
        return {**choice, "tools": [_own_choice(tool) for tool in kept]}
    if choice.get("type") in ("function", "custom") and isinstance(choice.get("name"), str):
        return {"type": "function", "name": ClientTool(choice["name"], choice.get("namespace")).function}
    return choice


def arguments_of(text: str) -> str:
    """A custom tool's input as its function's arguments."""
    return msgspec.json.encode({INPUT: text}).decode()


def input_of(arguments: str) -> str:
    """The text that `arguments_of` was given; other arguments are returned as they are."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return arguments
    return given[INPUT] if isinstance(given.get(INPUT), str) else arguments
