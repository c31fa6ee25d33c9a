"""`aioengine compile`: the native kernels for this processor, ahead of the first start; for images and installs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import click

from aioengine.cli.command import EXIT_FAILURE
from aioengine.kernels.native.parts import DTYPES, compile_seconds, parts_of


@click.command(name="compile")
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="repeatable  [default: all]")
def compile_command(dtypes: tuple[str, ...]) -> int:
    """Compile the native kernels for this machine's processor, as far as they are not there yet.

    The first start compiles what it needs in the background; after this one it need not. Prints the files, which may be
    copied to machines with an equal processor.

    Exit codes: 0 all is there, 1 it could not be compiled, or not be kept.
    """
    from aioengine.kernels.native.library import library_path

    logging.basicConfig(format="aioengine: %(message)s", level=logging.WARNING)
    for part in dict.fromkeys(part for dtype in dtypes or DTYPES for part in parts_of(dtype, "int4")):  # has all
        if not compile_missing([part]):
            return EXIT_FAILURE
        click.echo(library_path(part))
    return 0


def compile_missing(parts: Iterable[str]) -> bool:
    """Compile parts of the native library that are not there, and report progress on stderr.

    Returns:
        whether they are kept now.
    Raises:
        InternalError: they could not be compiled.
    """
    from aioengine.kernels.native.compilation import compile_library
    from aioengine.kernels.native.library import read_part

    for part in parts:
        if read_part(part) is None:
            click.echo(f"compiling {part}, about {compile_seconds([part])} s", err=True)
            compile_library([part])
            if read_part(part) is None:
                click.echo("aioengine: the folder cannot be written to, so that nothing is kept", err=True)
                return False
    return True
