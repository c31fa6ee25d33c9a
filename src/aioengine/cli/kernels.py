"""`aioengine check` and `aioengine compile`: kernels against plain torch; native kernels ahead of the first start."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from aioengine.cli.command import EXIT_FAILURE, open_console
from aioengine.kernels.native.parts import DTYPES, compile_seconds, parts_of

if TYPE_CHECKING:
    from rich.table import Table

    from aioengine.kernels.kernel_check import Checked


@click.command()
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or cuda:1; auto: the GPU if there is one")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="of activations")
@click.option("--operation", "operations", multiple=True, help="repeatable  [default: all that have kernels]")
def check(device: str, dtype: str, operations: tuple[str, ...]) -> int:
    """Compare each kernel of a device with plain torch: Triton's on a GPU, native ones on a CPU.

    Runs each on small and odd shapes and on a model's, in a process of its own, and prints its error, in shares of what
    is tolerated, and times: the kernel's, plain torch's, and what the bytes that it must read and write take in a copy.

    Exit codes: 0 all kernels work, 1 one does not, or the device cannot be checked, 2 there is no such device.
    """
    from aioengine.executor.cuda import find_cuda
    from aioengine.kernels.kernel_check import CheckWork, run_checks
    from aioengine.kernels.operations import NAMES

    if unknown := set(operations).difference(NAMES):
        problem = f"{', '.join(sorted(unknown))}: there are {', '.join(NAMES)}"
        raise click.BadParameter(problem, param_hint="--operation")
    found = find_cuda(device)
    if found is None and not compile_missing(parts_of(dtype, "int4")):
        return EXIT_FAILURE
    work = CheckWork(device=str(found or "cpu"), dtype=dtype, operations=operations, is_timed=True)
    rows = []
    try:
        for row in run_checks(work):
            rows.append(row)
            click.echo(f"\r{len(rows)} checked", nl=False, err=True)
    except (RuntimeError, OSError) as error:
        click.echo(f"\naioengine: kernels cannot be checked: {error}", err=True)
        return EXIT_FAILURE
    click.echo(err=True)
    open_console().print(_table(rows))
    failed = sorted({row.operation for row in rows if row.problem})
    click.echo(f"failed: {', '.join(failed)}" if failed else f"all {len(rows)} cases are right")
    return EXIT_FAILURE if failed else 0


def _table(rows: list[Checked]) -> Table:
    from rich.table import Table

    table = Table("kernel", "shape")
    for column in ("error", "kernel, µs", "plain torch, µs", "bytes, µs"):
        table.add_column(column, justify="right")
    for row in rows:
        error = "" if row.error is None else f"{row.error:.2f}"
        times = [f"{1e6 * each:.1f}" if each else "" for each in (row.kernel_s, row.plain_s, row.bytes_s)]
        size = f"{row.size}  [red]{row.problem}[/red]" if row.problem else row.size
        table.add_row(row.operation, size, error, *times)
    return table


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
