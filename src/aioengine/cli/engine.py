"""`aioengine engine`: an engine in a process of its own, for other processes to connect to."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from aioengine.cli.loop import run
from aioengine.cli.options import given, options_of
from aioengine.config import EngineConfig
from aioengine.transport.security import ClientKeys, ServerKeys
from aioengine.transport.server import EngineServer
from aioengine.transport.serving import Endpoint, serve_engine


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
    hosts = []
    if join is not None:
        hosts = [Endpoint(join, is_local=False, keys=ClientKeys.load(join_keys) if join_keys is not None else None)]
    elif join_keys is not None:
        raise click.UsageError("--join-keys is for --join: give both, or neither")
    run(serve_engine(hosts, address=address, config=config, keys=server_keys, plugins=plugins, on_serving=_say_where))


def _say_where(server: EngineServer) -> None:
    """On stdout, for whoever started this and waits for the line."""
    click.echo(f"serving at {server.address}")
