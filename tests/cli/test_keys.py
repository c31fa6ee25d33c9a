"""`aioengine keys` makes what a server and its clients need, and says where each file belongs."""

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from zmq.utils import z85

from aioengine.cli.commands import cli
from aioengine.errors import ConfigError
from aioengine.transport.security import ClientKeys, ServerKeys


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["keys", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_without_a_name_there_is_one_client_no_secret_is_shown_and_no_key_is_ever_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    output = run(str(folder))
    server, client = ServerKeys.load(folder), ClientKeys.load(folder)
    assert client.server == server.pair.public
    assert server.clients == {z85.decode(client.pair.public)}
    assert f"wrote {folder}/server.key_secret (secret)\n" in output
    assert f"wrote {folder}/server.key\n" in output
    assert f"keep {folder}/server.key_secret and {folder}/clients/*.key." in output
    assert "Where client runs: copy server.key and clients/client.key_secret" in output
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert server.pair.secret.decode() not in output
    assert client.pair.secret.decode() not in output
    with pytest.raises(ConfigError, match="never overwritten"):
        run(str(folder))
    assert ClientKeys.load(folder) == client


def test_clients_can_be_added_later(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    run(str(folder), "--client", "alice", "--client", "bob")
    before = ServerKeys.load(folder)
    output = run(str(folder), "--client", "carol")
    after = ServerKeys.load(folder)
    assert after.clients == {
        z85.decode(ClientKeys.load(folder, name).pair.public) for name in ("alice", "bob", "carol")
    }
    assert after.pair == before.pair
    assert before.clients <= after.clients
    assert "server.key_secret (secret)" not in output
    assert "alice" not in output
