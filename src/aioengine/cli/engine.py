"""`aioengine engine`: an engine in a process of its own, for other processes; `aioengine keys`: keys for both sides."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from aioengine.cli.command import given, is_interrupted, one_model, options_of, run
from aioengine.cluster.host import EngineHost
from aioengine.cluster.messages import MAX_REPLICAS
from aioengine.config import EngineConfig
from aioengine.transport.child import AGAIN
from aioengine.transport.joining import JOIN_TIMEOUT_S, Endpoint
from aioengine.transport.security import CLIENTS, PUBLIC, SECRET, SERVER, ClientKeys, ServerKeys, make_keys
from aioengine.transport.server import EngineServer
from aioengine.transport.serving import serve_engine

T = TypeVar("T")

DEFAULT_CLIENT = "client"
JOIN_FLAGS = ("join_keys", "join_timeout_s", "replicas_local", "start_rank")


@click.command()
@click.argument("arguments", nargs=-1, metavar="[MODEL] [ADDRESS]")
@click.option("--keys", metavar="FOLDER", help="keys of this engine and its clients, made by `aioengine keys`")
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="import this first; repeatable")
@click.option("--join", metavar="ADDRESS", help="be a replica of a front end elsewhere, which listens there")
@click.option("--join-keys", metavar="FOLDER", help="this machine's keys as a client of that front end")
@click.option(
    "--join-timeout-s",
    type=click.FloatRange(1.0, 86400.0),
    help=f"seconds to wait for the front end, at first and when it is lost [default: {JOIN_TIMEOUT_S:g}]",
)
@click.option(
    "--replicas-local",
    type=click.IntRange(1, MAX_REPLICAS),
    help="join with so many engines, a process each, which are started again when they die [default: this process]",
)
@click.option(
    "--start-rank", type=click.IntRange(0, MAX_REPLICAS - 1), help="of the first of them [default: any that is free]"
)
@options_of(EngineConfig)
def engine(
    arguments: tuple[str, ...], keys: str | None, plugins: tuple[str, ...], join: str | None, **flags: Any
) -> None:
    """Serve MODEL (absent: the bundled one) at ADDRESS, for `Engine.connect(ADDRESS)`, until Ctrl-C or SIGTERM.

    ADDRESS is ipc:///path/of/a.sock, in a folder that only you can enter, or tcp://127.0.0.1:PORT; others need --keys.

    With --join it serves the model of a front end as one of its replicas, until that ends, with the front end's config
    but for what is given here; ADDRESS may be left out.
    """
    addresses = [each for each in arguments if "://" in each]
    models = [each for each in arguments if each not in addresses]
    if len(addresses) > 1 or len(models) > 1:
        raise click.UsageError("give one ADDRESS, ipc://... or tcp://..., and at most one MODEL")
    address = addresses[0] if addresses else None
    flags["model"] = one_model(models[0] if models else None, flags["model"])
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if plugins:
        sys.path.insert(0, os.getcwd())  # an installed command does not look there by itself
    fields = given(EngineConfig, flags)
    config = EngineConfig(**fields)  # with --join, too: a bad config is refused now
    if join is not None:
        if keys is not None:
            raise click.UsageError("with --join the engine serves by its --join-keys: leave out --keys")
        _join(join, flags, {"address": address, "own_fields": fields, "plugins": plugins})
        return
    if alone := [name for name in JOIN_FLAGS if flags[name] is not None]:
        raise click.UsageError(f"--{alone[0].replace('_', '-')} is for --join: give both, or neither")
    if address is None:
        raise click.UsageError("give the ADDRESS to serve at, or --join")
    server_keys = ServerKeys.load(keys) if keys is not None else None
    _run(serve_engine([], address=address, config=config, keys=server_keys, plugins=plugins, on_serving=_say_where))


def _join(join: str, flags: dict[str, Any], served: dict[str, Any]) -> None:
    """Join a front end as one replica, or with several; exit with `AGAIN` if it asks for another one in this place."""
    keys, timeout_s, num_engines, rank = (flags[name] for name in JOIN_FLAGS)
    if keys is not None and join.startswith("ipc://"):
        raise click.UsageError(f"--join-keys are for tcp: at {join} only you can join: leave them out")
    rank = -1 if rank is None else rank
    if (last := rank + (num_engines or 1) - 1) >= MAX_REPLICAS:
        raise click.UsageError(
            f"--start-rank {rank} and --replicas-local {num_engines} take ranks up to {last}; the last that there can "
            f"be is {MAX_REPLICAS - 1}: give a lower one of them"
        )
    front_end = Endpoint(join, rank, "", False, None, JOIN_TIMEOUT_S if timeout_s is None else timeout_s)
    client_keys = ClientKeys.load(keys) if keys is not None else None
    if num_engines is not None:
        _run(EngineHost(front_end, keys, num_engines=num_engines, **served).run())
        return
    goodbye = _run(serve_engine([front_end._replace(keys=client_keys)], on_serving=_say_where, **served))
    if goodbye is not None and goodbye.is_wanted_again:
        sys.exit(AGAIN)


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that ends at SIGTERM and SIGINT.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
    """
    outcome = run(main)
    if is_interrupted():
        raise KeyboardInterrupt
    return outcome


def _say_where(server: EngineServer) -> None:
    """Print the address to stdout, for a program that started this process and waits for the line."""
    click.echo(f"serving at {server.address}")


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
