"""What the exit code of a command says."""

from __future__ import annotations

import signal

from aioengine.errors import AioEngineError, ConfigError, InvalidRequest

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


def exit_code_of(error: AioEngineError) -> int:
    """Wrong arguments, or what failed though they were right."""
    return EXIT_USAGE if isinstance(error, InvalidRequest | ConfigError) else EXIT_FAILURE
