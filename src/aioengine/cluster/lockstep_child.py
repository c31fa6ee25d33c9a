"""An engine of a group in lockstep as a child process: ``python -m aioengine.cluster.lockstep_child``.

As `transport.child`, whose arguments it has, and it steps with its group.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from aioengine.processes.own_side import die_with_parent
from aioengine.transport.child import main

if TYPE_CHECKING:
    from aioengine.core.engine_core import EngineCore
    from aioengine.core.executor_protocol import LockstepPlace


def enter_group(place: LockstepPlace, core: EngineCore) -> AbstractAsyncContextManager[None]:
    from aioengine.cluster.lockstep_group import in_lockstep  # slow; first the process is bound to its parent

    return in_lockstep(place, core)


if __name__ == "__main__":
    die_with_parent()
    code = main(enter_group)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # a reduction that waits for others cannot be ended, and gloo aborts a process that exits beside one
