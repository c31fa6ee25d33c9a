"""Functions that requests and control calls may name: those that the engine's own process knows, and no others.

Requests name logits processors, which are made where the device is, of arguments that travel as data. Control calls
name worker functions:

```python
@worker_function("count_weights")
def count_weights(worker: Worker) -> int:
    return sum(parameter.numel() for parameter in worker.model.parameters())

await engine.collective_rpc("count_weights")
```

An engine in a process of its own knows the functions of the modules that were imported there.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, InvalidRequest
from aioengine.scheduler.plan import LogitsProcessor
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


F = TypeVar("F", bound=Callable[..., Any])

_functions: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Worker:
    """The first argument of a registered function.

    Attributes:
        rank, world_size: which of how many hold a part of the model; 0 of 1 for now.
        model: that part; None while its weights are asleep at level 2.
        config: the engine's.
    """

    rank: int
    world_size: int
    model: Any
    config: EngineConfig


@overload
def worker_function(name: F, /) -> F: ...


@overload
def worker_function(name: str | None = None) -> Callable[[F], F]: ...


def worker_function(name: Any = None) -> Any:
    """Register a function, by ``name`` or by its module and qualified name; with or without brackets.

    It is called as ``function(worker, *args, **kwargs)`` in the device thread, between two steps: what it takes, all
    requests wait for. Over a wire its arguments and its result are what msgpack can carry.

    Raises:
        ConfigError: another function has that name. One that is defined again, in a notebook's cell or by a module
            that is loaded again, replaces it.
    """
    if callable(name):
        return _register(name, None)
    return lambda function: _register(function, name)


def registered(name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        InvalidRequest: there is none; the message has the names that come near.
    """
    if name in _functions:
        return _functions[name]
    known = difflib.get_close_matches(name, _functions, cutoff=0.5) or sorted(_functions)[:5]
    raise InvalidRequest(
        f"no function {name!r} is registered in the engine's process (there are: {', '.join(known) or 'none'}): "
        "register it there with aioengine.worker_function, in a module that is imported before the call",
        param="name",
    )


def _register(function: F, name: str | None) -> F:
    own_name = f"{function.__module__}.{function.__qualname__}"
    key = own_name if name is None else name
    held = _functions.setdefault(key, function)
    if held is not function:
        # Two functions that a function has made have one name, and may differ.
        if f"{held.__module__}.{held.__qualname__}" != own_name or "<" in own_name:
            raise ConfigError(
                f"the worker function {key!r} is {held.__module__}.{held.__qualname__} already: give {own_name} "
                "another name"
            )
        _functions[key] = function
    return function
