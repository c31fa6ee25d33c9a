"""A Python file whose public functions are tools, and calling them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import click
import msgspec

from aioengine.tool_calls.calls import ToolCall, read_tools

MODULE = "aioengine_tools"
"""The module name of an imported file of tools."""


class ToolFile:
    """The tools of a file.

    Attributes:
        tools: for the engine.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.tools = read_tools(list(functions.values()))
        self._functions = functions

    @classmethod
    def load(cls, path: Path) -> ToolFile:
        """Import the file, and take the functions that it defines under names without an underscore before them.

        Raises:
            click.UsageError: it cannot be imported, or has none.
            InvalidRequest: no schema can be made of one.
        """
        spec = importlib.util.spec_from_file_location(MODULE, path)
        if spec is None or spec.loader is None:
            raise click.UsageError(f"--tools {path}: a Python file is needed, whose name ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = module  # annotations are looked up there
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever the file raises
            raise click.UsageError(f"--tools {path}: {type(error).__name__}: {error}") from error
        found = {
            name: function
            for name, function in vars(module).items()
            if inspect.isfunction(function) and function.__module__ == MODULE and not name.startswith("_")
        }
        if not found:
            raise click.UsageError(f"--tools {path}: it defines no function without an underscore before its name")
        return cls(found)

    async def call(self, call: ToolCall) -> str:
        """Do what a call asks for, in a thread where the function is none of asyncio's; returns its result as text.

        What goes wrong is a text, too, for the model to read. Cancelling leaves a thread alone.
        """
        try:
            arguments: dict[str, Any] = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
            function = self._functions[call.name]
            if inspect.iscoroutinefunction(function):
                result = await function(**arguments)
            else:
                result = await anyio.to_thread.run_sync(lambda: function(**arguments), abandon_on_cancel=True)
            return result if isinstance(result, str) else msgspec.json.encode(result).decode()
        except Exception as error:  # the function's own, of its arguments, or of what it returns
            return f"error: {type(error).__name__}: {error}"
