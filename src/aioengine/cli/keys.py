"""`aioengine keys`: who may reach an engine from other machines."""

from __future__ import annotations

from pathlib import Path

import click

from aioengine.transport.security import CLIENTS, PUBLIC, SECRET, SERVER, make_keys

DEFAULT_CLIENT = "client"


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
