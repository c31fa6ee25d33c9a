"""The command `aioengine`: flags are the fields of the config structs, results go to stdout, all else to stderr."""

from aioengine.cli.main import main

__all__ = ["main"]
