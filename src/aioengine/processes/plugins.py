"""Installed packages that have something to say before an engine loads its model.

A package names a callable without arguments in the group `GROUP` of its entry points:

```toml
[project.entry-points."aioengine.plugins"]
my_plugin = "my_package:register"
```

It is called once in each process in which an engine computes, in a thread. In the environment, `ALLOWED` bounds which:
names with commas between them, or nothing for none at all.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading

from aioengine.errors import ConfigError

logger = logging.getLogger("aioengine")

GROUP = "aioengine.plugins"
ALLOWED = "AIOENGINE_PLUGINS"

_called: set[str] = set()
_turn = threading.Lock()
"""A second engine that starts waits until the plugins of the first are done."""


def call_plugins() -> None:
    """Call what this process has not called yet. What fails is logged, once.

    Raises:
        ConfigError: `ALLOWED` names one that fails, or that is not installed.
    """
    allowed = os.environ.get(ALLOWED)
    named = None if allowed is None else {name.strip() for name in allowed.split(",")} - {""}
    with _turn:
        found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
        if named is not None and (missing := named - found.keys()):
            there = ", ".join(sorted(found)) or "none"
            raise ConfigError(
                f"{ALLOWED} names {', '.join(sorted(missing))}, which no package has (there are: {there})"
            )
        for name, entry in found.items():
            if name in _called or (named is not None and name not in named):
                continue
            try:
                entry.load()()
            except (Exception, SystemExit) as error:  # another's code may raise anything
                if named is not None:
                    raise ConfigError(f"the plugin {name} ({entry.value}) failed: {error!r}") from error
                logger.exception("the plugin %s (%s) failed, and the engine goes on without it", name, entry.value)
            _called.add(name)
