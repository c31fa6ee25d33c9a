"""`aioengine compile`: the native kernels for this processor, ahead of the first start; for images and installs."""

from __future__ import annotations

import logging

import click

from aioengine.cli.command import EXIT_FAILURE
from aioengine.kernels.native.kernels.parts import DTYPES, QUANTIZATIONS, compile_seconds, parts_of


@click.command(name="compile")
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="repeatable  [default: all]")
@click.option(
    "--quantization", type=click.Choice(QUANTIZATIONS), multiple=True,
    help="int8 and int4 are made at load, coded are checkpoints that are quantised; repeatable  [default: all, or "
    "none where a --dtype is given]",
)  # fmt: skip
def compile_command(dtypes: tuple[str, ...], quantization: tuple[str, ...]) -> int:
    """Compile the native kernels for this machine's processor, as far as they are not there yet.

    The first start compiles what it needs in the background; after this one it need not. Prints the files, which may be
    copied to machines with an equal processor.

    Exit codes: 0 all is there, 1 it could not be compiled, or not be kept.
    """
    from aioengine.kernels.native.compilation import compile_library
    from aioengine.kernels.native.library import library_path, read_part

    logging.basicConfig(format="aioengine: %(message)s", level=logging.WARNING)
    asked = quantization or (() if dtypes else QUANTIZATIONS)
    parts = [part for dtype in dtypes or DTYPES for each in (None, *asked) for part in parts_of(dtype, each)]
    for part in dict.fromkeys(parts):
        if read_part(part) is None:
            click.echo(f"compiling {part}, about {compile_seconds([part])} s", err=True)
            compile_library([part])
            if read_part(part) is None:
                click.echo("aioengine: the folder cannot be written to, so that nothing is kept", err=True)
                return EXIT_FAILURE
        click.echo(library_path(part))
    return 0
