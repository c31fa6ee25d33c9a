"""`aioengine engine`: an engine in a process of its own, for other processes; `aioengine keys`: keys for both sides."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from aioengine.cli.command import add_flags, choose_model, is_interrupted, read_flags, run
from aioengine.config import EngineConfig
from aioengine.transport.engine_process import serve_engine
from aioengine.transport.handshake import Init
from aioengine.transport.security import CLIENTS, PUBLIC, SECRET, SERVER, ServerKeys, make_keys
from aioengine.transport.wire import PROTOCOL_VERSION

DEFAULT_CLIENT = "client"


@click.command()
@click.argument("arguments", nargs=-1, metavar="[MODEL] [ADDRESS]")
@click.option("--keys", metavar="FOLDER", help="keys of this engine and its clients, made by `aioengine keys`")
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="import this first; repeatable")
@add_flags(EngineConfig)
def engine(arguments: tuple[str, ...], keys: str | None, plugins: tuple[str, ...], **flags: Any) -> None:
    """Serve MODEL (absent: the bundled one) at ADDRESS until Ctrl-C or SIGTERM.

    Programs use it by `Engine.connect(ADDRESS)`, or as one of several by `replicas=[ADDRESS, ...]`.

    ADDRESS is ipc:///path/of/a.sock, in a folder that only you can enter, or tcp://127.0.0.1:PORT; others need --keys.
    """
    addresses = [each for each in arguments if "://" in each]
    models = [each for each in arguments if each not in addresses]
    if len(addresses) != 1 or len(models) > 1:
        raise click.UsageError("give one ADDRESS, ipc://... or tcp://..., and at most one MODEL")
    flags["model"] = choose_model(models[0] if models else None, flags["model"])
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if plugins:
        sys.path.insert(0, os.getcwd())  # an installed command does not look there by itself
    config = EngineConfig(**read_flags(EngineConfig, flags))
    server_keys = ServerKeys.load(keys) if keys is not None else None
    init = Init(PROTOCOL_VERSION, addresses[0], config, plugins)
    # A program that started this process waits for the line on stdout.
    run(serve_engine(init, server_keys, on_serving=lambda server: click.echo(f"serving at {server.address}")))
    if is_interrupted():
        raise KeyboardInterrupt


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--client", "clients", multiple=True, metavar="NAME", help=f"of a client; repeatable [default: {DEFAULT_CLIENT}]"
)
def keys(folder: Path, clients: tuple[str, ...]) -> None:
    """Make keys for serving beyond this machine, in FOLDER: the server's, and one for each client.

    Run again with another --client to admit one more. No key is ever overwritten.
    """
    names = clients or (DEFAULT_CLIENT,)
    for path in make_keys(folder, names):
        click.echo(f"wrote {path}{' (secret)' if path.name.endswith(SECRET) else ''}")
    click.echo()
    click.echo(f"Where the engine runs: keep {folder / f'{SERVER}{SECRET}'} and {folder / CLIENTS}/*{PUBLIC}.")
    for name in dict.fromkeys(names):
        secret = Path(CLIENTS, f"{name}{SECRET}")
        click.echo(
            f"Where {name} runs: copy {SERVER}{PUBLIC} and {secret} of this folder, with the same names, into one"
        )
        click.echo(f"  that only its user can enter (mkdir -m 700); then delete {folder / secret} here.")
    click.echo("An engine that runs admits new clients when it is started again.")
