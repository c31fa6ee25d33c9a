"""What `aioengine engine` refuses before it does anything, and how it ends."""

import os
import signal

import anyio
import pytest
from click.testing import CliRunner

from aioengine.cli.engine import _run, engine
from aioengine.processes.own_process import asked_by_signals

JOIN = ("--join", "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give the ADDRESS to serve at, or --join"),
        (("ipc:///x", "--join-keys", "k"), "--join-keys is for --join: give both, or neither"),
        (("ipc:///x", "--replicas-local", "2"), "--replicas-local is for --join"),
        (("ipc:///x", "--start-rank", "2"), "--start-rank is for --join"),
        (("ipc:///x", "--join-timeout-s", "5"), "--join-timeout-s is for --join"),
        ((*JOIN, "--keys", "k"), "with --join the engine serves by its --join-keys: leave out --keys"),
        ((*JOIN, "--replicas-local", "0"), "0 is not in the range 1<=x<=1024"),
        ((*JOIN, "--start-rank", "-1"), "-1 is not in the range 0<=x<=1023"),
        (
            (*JOIN, "--start-rank", "1020", "--replicas-local", "5"),
            "--start-rank 1020 and --replicas-local 5 take ranks up to 1024; the last that there can be is 1023",
        ),
        (("--join", "ipc:///x", "--join-keys", "k"), "--join-keys are for tcp"),
        ((*JOIN, "--block-size", "0"), "block_size=0"),
        (("ipc:///x", "ipc:///y"), "give one ADDRESS"),
        (("a", "ipc:///x", "b"), "at most one MODEL"),
        (("a", "ipc:///x", "--model", "b"), "the argument names the model 'a', and --model 'b'"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(engine, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(("number", "is_interrupt"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_is_an_interrupt_of_the_command_and_sigterm_is_not(number: signal.Signals, is_interrupt: bool) -> None:
    async def serve() -> None:
        with anyio.CancelScope() as scope, asked_by_signals(lambda _: scope.cancel()):
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()

    if is_interrupt:
        with pytest.raises(KeyboardInterrupt):
            _run(serve())
    else:
        _run(serve())
