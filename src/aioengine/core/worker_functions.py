"""Functions that a control call may name: those that the engine's own process has registered, and no others.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, InvalidRequest

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
