"""All commands, and how their errors and interrupts end the process."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys

import click

import aioengine
from aioengine.cli.bench import bench
from aioengine.cli.chat import chat
from aioengine.cli.command import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, choose_exit_code
from aioengine.cli.engine import engine, keys
from aioengine.cli.generate import generate
from aioengine.cli.info import info
from aioengine.cli.kernels import check, compile_command
from aioengine.cli.serve import serve_command
from aioengine.errors import AioEngineError
from aioengine.processes.own_process import COMPILER_OUTLIVES, limit_spinning, open_standard_files
from aioengine.validation import OTHER_NAMES
from aioengine.vllm_names import NEUTRAL_CONFIG


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(aioengine.__version__, prog_name="aioengine")
def cli() -> None:
    """An LLM inference engine that lives inside an asyncio program."""


for command in (generate, chat, bench, info, engine, serve_command, compile_command, check, keys):
    cli.add_command(command)


def run_command_line() -> None:
    """Run the command line; any error that has a message for the user is one line on stderr and an exit code.

    Exit codes: 0 done, 1 the engine or the model failed, 2 wrong arguments, 130 interrupted.
    """
    open_standard_files()
    limit_spinning()
    os.environ.setdefault(COMPILER_OUTLIVES, "1")
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        status = EXIT_INTERRUPTED
    except click.ClickException as error:
        (_with_our_name(error) if isinstance(error, click.NoSuchOption) else error).show()
        status = EXIT_USAGE
    except KeyboardInterrupt:
        click.echo(err=True)
        status = EXIT_INTERRUPTED
    except AioEngineError as error:
        _complain(error)
        status = choose_exit_code(error)
    except OSError as error:
        # What is still buffered cannot be written; the interpreter would try again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader of a pipe has gone, as `| head` does
            _complain(error)
        status = EXIT_FAILURE
    # Else the interpreter's end looks for garbage among all that torch has made, for 0.4 s. Of triton's objects, which
    # come with transformers' modelling code, the end must find all, or triton prints a page about each kind of them.
    if "triton" not in sys.modules:
        gc.freeze()
    sys.exit(status if isinstance(status, int) else 0)


def _with_our_name(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with our flag, or what to do without one, where another library's name of it was given."""
    known = [] if error.ctx is None else [str(parameter.name) for parameter in error.ctx.command.params]
    name = error.option_name.lstrip("-").replace("-", "_")
    if ours := [one for one in OTHER_NAMES.get(name, ()) if one in known]:
        hint = f"did you mean {' or '.join(ours)}?"
    elif name in NEUTRAL_CONFIG:
        hint = f"{NEUTRAL_CONFIG[name].instead or 'it has no effect here'}; else leave it out"
    else:
        return error
    names = rf"\b(?:(?<=give )|(?<=mean )|(?=\w+_))({'|'.join(known)})\b(=True|=False)?"
    hint = re.sub(names, lambda found: f"--{'no-' * (found[2] == '=False')}{found[1].replace('_', '-')}", hint)
    return click.NoSuchOption(error.option_name, f"No such option {error.option_name}: {hint}", ctx=error.ctx)


def _complain(error: Exception) -> None:
    click.echo(f"aioengine: {' '.join(str(error).split())}", err=True)
