"""`python -m aioengine` is the command `aioengine`."""

from aioengine.cli import main

main()
