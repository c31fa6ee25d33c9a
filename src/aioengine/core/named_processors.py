"""Logits processors that requests name: made where the device is, of arguments that travel as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aioengine.errors import ConfigError, InvalidRequest
from aioengine.scheduler.handles import LogitsProcessor
from aioengine.validation import load_by_path

MakeProcessor = Callable[..., LogitsProcessor | None]
"""Makes the processor of one request, of its arguments; None: that request needs none. Called on the engine's loop, or
in a thread. Requests that are given the same object are processed together."""


def load_processors(paths: tuple[str, ...]) -> dict[str, MakeProcessor]:
    """Import each ``module:function``; returns them by ``function``.

    Raises:
        ConfigError: one cannot be imported, or cannot be called.
    """
    made = {path.partition(":")[2]: load_by_path(path, "logits_processors") for path in paths}
    for name, make in made.items():
        if not callable(make):
            raise ConfigError(f"logits_processors: {name} is a {type(make).__name__}; a function is needed")
    return made


def make_processors(known: Mapping[str, MakeProcessor], extra_args: Mapping[str, Any]) -> tuple[LogitsProcessor, ...]:
    """The processors of one request.

    Raises:
        InvalidRequest: one of them refuses its arguments, or is not known.
    """
    processors = []
    for name, arguments in extra_args.items():
        try:
            make = known[name]
            processor = make(**arguments) if isinstance(arguments, dict) else make(arguments)
            if not (processor is None or callable(processor)):
                raise TypeError(f"it made a {type(processor).__name__}, which cannot be called")
        except Exception as error:  # code of the user's own may raise anything
            message = f"extra_args: the logits processor {name} cannot be made: {type(error).__name__}: {error}"
            raise InvalidRequest(message, param="extra_args") from error
        if processor is not None:
            processors.append(processor)
    return tuple(processors)
