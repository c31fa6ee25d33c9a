"""What `aioengine engine` refuses before it does anything, and how it ends."""

import contextlib
import os
import signal

import anyio
import click
import pytest
from click.testing import CliRunner

from aioengine.cli.engine import engine
from aioengine.processes.own_process import asked_by_signals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one ADDRESS"),
        (("a",), "give one ADDRESS"),
        (("ipc:///x", "--block-size", "0"), "block_size=0"),
        (("ipc:///x", "ipc:///y"), "give one ADDRESS"),
        (("a", "ipc:///x", "b"), "at most one MODEL"),
        (("a", "ipc:///x", "--model", "b"), "the argument names the model 'a', and --model 'b'"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(engine, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split()), result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_an_interrupt_of_the_command_and_sigterm_is_not(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def serve(*_: object, **__: object) -> None:
        with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()

    monkeypatch.setattr("aioengine.cli.engine.serve_engine", serve)
    with pytest.raises(click.Abort) if number is signal.SIGINT else contextlib.nullcontext():
        engine.main(["ipc:///x"], standalone_mode=False)
