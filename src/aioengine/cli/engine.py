"""`aioengine engine`: an engine in a process of its own, for other processes; `aioengine keys`: keys for both sides."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from aioengine.cli.command import given, options_of, run
from aioengine.config import EngineConfig
from aioengine.transport.joining import Endpoint
from aioengine.transport.security import CLIENTS, PUBLIC, SECRET, SERVER, ClientKeys, ServerKeys, make_keys
from aioengine.transport.server import EngineServer
from aioengine.transport.serving import serve_engine

DEFAULT_CLIENT = "client"


@click.command()
@click.argument("address")
@click.option("--keys", metavar="FOLDER", help="keys of this engine and its clients, made by `aioengine keys`")
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="import this first; repeatable")
@click.option("--join", metavar="ADDRESS", help="say HELLO to a front end that waits for several engines")
@click.option("--join-keys", metavar="FOLDER", help="this engine's keys as a client of that front end")
@options_of(EngineConfig)
def engine(
    address: str, keys: str | None, plugins: tuple[str, ...], join: str | None, join_keys: str | None, **flags: Any
) -> None:
    """Serve a model at ADDRESS, for `Engine.connect(ADDRESS)`, until Ctrl-C or SIGTERM.

    ADDRESS is ipc:///path/of/a.sock, in a folder that only you can enter, or tcp://127.0.0.1:PORT; others need --keys.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if plugins:
        sys.path.insert(0, os.getcwd())  # an installed command does not look there by itself
    config = EngineConfig(**given(EngineConfig, flags))
    server_keys = ServerKeys.load(keys) if keys is not None else None
    endpoints = []
    if join is not None:
        client_keys = ClientKeys.load(join_keys) if join_keys is not None else None
        endpoints = [Endpoint(join, is_local=False, keys=client_keys)]
    elif join_keys is not None:
        raise click.UsageError("--join-keys is for --join: give both, or neither")
    run(
        serve_engine(
            endpoints, address=address, config=config, keys=server_keys, plugins=plugins, on_serving=_say_where
        )
    )


def _say_where(server: EngineServer) -> None:
    """On stdout, for the program that started this and waits for the line."""
    click.echo(f"serving at {server.address}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--client", "clients", multiple=True, metavar="NAME", help=f"For whom; repeatable. [{DEFAULT_CLIENT}]")
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
