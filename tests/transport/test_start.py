"""Engines that start in processes of their own: shake hands with one or two, or fail and say why. Real processes."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
import zmq
from nightly import nightly
from transport.life_scripts.watching import DEADLINE_S, Script

from aioengine import Engine, ProcessOptions
from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, ConfigError, EngineDead, ModelLoadError
from aioengine.models.folder import DEMO_MODEL
from aioengine.processes.child import Child
from aioengine.transport.channel import Channel, Context
from aioengine.transport.child import TOKEN
from aioengine.transport.handshake import HandshakeState, Init, Welcome, welcome
from aioengine.transport.security import ZAP_ENDPOINT, ServerKeys
from aioengine.transport.wire import PROTOCOL_VERSION

pytestmark = pytest.mark.usefixtures("no_stray_process", "runtime", "quiet_log")

DEVICE = "transport.life_scripts.devices"


class Hall(NamedTuple):
    """Where engines are waited for: a `Welcome` and its socket."""

    channel: Channel
    address: str
    machine: Welcome
    exits: deque[tuple[int, str]]

    async def wait(self) -> None:
        with anyio.fail_after(DEADLINE_S):
            await welcome(self.channel, self.machine, time.monotonic, exits=self.exits)


@contextlib.asynccontextmanager
async def hall(
    context: Context, address: str, serve: str | None, *, is_parent: bool = False, num_engines: int = 1,
    keys: ServerKeys | None = None,
) -> AsyncIterator[Hall]:  # fmt: skip
    """``serve``: where the engines are to serve."""
    machine = Welcome(
        num_local=num_engines * is_parent, num_remote=num_engines * (not is_parent),
        make_init=lambda index: Init(
            PROTOCOL_VERSION, index, num_engines, serve, EngineConfig(max_num_seqs=33), executor=f"{DEVICE}:told"
        ),
        token="f00d", now=time.monotonic(), start_timeout_s=DEADLINE_S,
    )  # fmt: skip
    socket = context.socket(zmq.ROUTER)
    async with anyio.create_task_group() as tasks:
        if keys is not None:
            tasks.start_soon(admit, context, keys)
            keys.apply_server(socket)
        with closing(Channel(socket)) as channel:
            socket.bind(address)
            yield Hall(channel, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), machine, deque())
        tasks.cancel_scope.cancel()


async def admit(context: Context, keys: ServerKeys) -> None:
    with closing(Channel(context.socket(zmq.ROUTER))) as zap:
        zap.socket.bind(ZAP_ENDPOINT)
        await keys.admit(zap)


@contextlib.asynccontextmanager
async def child_of(host: Hall, *more: str, index: int = 0, token: str = "f00d") -> AsyncIterator[Child]:
    """A child that shakes hands there, and whose exit is known there."""

    def on_exit() -> None:
        host.exits.append((index, child.describe_exit()))
        host.channel.wake()

    child = Child(
        f"engine {index}",
        "aioengine.transport.child",
        *("--handshake", host.address, "--index", str(index), *more),
        env={TOKEN: token},
        terminate_s=DEADLINE_S,
        on_exit=on_exit,
    )
    async with aclosing(child):
        yield child


async def asks(address: str) -> None:
    """The engine there does its work."""
    async with aclosing(await Engine.connect(address)) as engine:
        assert engine.config.max_num_seqs == 33
        output = await engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
        assert len(output.outputs[0].token_ids) == 3


def ready_at(host: Hall) -> list[str]:
    """Where the engines serve, by their indices; what they offer is theirs."""
    addresses = []
    for engine in host.machine.engines:
        assert engine.state is HandshakeState.READY
        assert engine.ready is not None
        assert (engine.ready.info.num_blocks, engine.ready.info.max_model_len) == (4096, 2048)
        assert engine.ready.supported_tasks == ("generate",)
        addresses.append(engine.ready.address)
    return addresses


# One handshake or two


class Way(NamedTuple):
    """To a front end that several engines share."""

    address: str
    server_keys: ServerKeys | None = None
    folder: tuple[str, ...] = ()
    """Of the keys, if there are some."""


@pytest.fixture(params=[*nightly("ipc", "tcp"), "tcp with keys"])
def way(request: pytest.FixtureRequest, runtime: Path, tmp_path: Path) -> Way:
    if request.param == "ipc":
        return Way(f"ipc://{runtime}/shared")
    if request.param == "tcp":
        return Way("tcp://127.0.0.1:*")
    folder = str(tmp_path / "keys")
    subprocess.run([sys.executable, "-m", "aioengine", "keys", folder], check=True, capture_output=True)
    return Way("tcp://127.0.0.1:*", ServerKeys.load(folder), (folder,))


async def test_a_child_shakes_hands_with_its_parent_and_with_whom_it_shares(
    way: Way, runtime: Path, context: Context
) -> None:
    async with (
        hall(context, way.address, "ipc:///not/this/one", keys=way.server_keys) as shared,
        hall(context, f"ipc://{runtime}/start", f"ipc://{runtime}/engine", is_parent=True) as parent,
        child_of(parent, "--shared", shared.address, *(("--keys", *way.folder) if way.folder else ())),
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shared.wait)
            tasks.start_soon(parent.wait)
        assert ready_at(shared) == ready_at(parent) == [f"ipc://{runtime}/engine"]
        assert [engine.is_local for engine in (*shared.machine.engines, *parent.machine.engines)] == [False, True]
        await asks(f"ipc://{runtime}/engine")


async def test_two_engine_commands_join_a_front_end(way: Way, runtime: Path, context: Context) -> None:
    addresses = [f"ipc://{runtime}/engine.{index}" for index in range(2)]
    flags = ("--plugin", "transport.life_scripts.no_torch", "--max-num-seqs", "33")
    keys = ("--join-keys", *way.folder) if way.folder else ()
    async with hall(context, way.address, None, num_engines=2, keys=way.server_keys) as shared:
        scripts = [
            Script("aioengine", "engine", address, "--join", shared.address, *keys, *flags) for address in addresses
        ]
        await shared.wait()
        assert sorted(ready_at(shared)) == addresses
        for address in addresses:
            await asks(address)
        for script in scripts:
            script.process.terminate()
            assert await anyio.to_thread.run_sync(script.end) == 0
    assert not [name for name in os.listdir(runtime) if name.startswith("engine")]


async def test_a_child_that_is_turned_away_says_so_and_ends(runtime: Path, context: Context) -> None:
    async with (
        hall(context, f"ipc://{runtime}/start", f"ipc://{runtime}/engine", is_parent=True) as host,
        child_of(host, token="beef") as child,
    ):
        with pytest.raises(EngineDead, match=r"EngineDead: this engine was turned away: the token is another one"):
            await host.wait()
        assert child.returncode == 1
        assert host.machine.num_refused == 2  # its HELLO, and its last words


# Last words


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [
        ("not_loading", ModelLoadError, "shard 3 of 7 is damaged"),
        *nightly(("raising", EngineDead, "ZeroDivisionError: no device to divide by")),
        *nightly(("exiting", EngineDead, r"engine 0 \(pid \d+\) exited with code 3.*")),
        ("speaking", EngineDead, r"engine 0 \(pid \d+\) exited with code 1; its last words: the driver is too old .*"),
        ("crashing", EngineDead, r"engine 0 .* was killed by SIGSEGV; its last words: Fatal Python error: Segm.*"),
        *nightly(
            (
                "cramped",
                ConfigError,
                "the KV cache has 2 blocks of 16 tokens, and one sequence of max_model_len=2048 may need 128: .*",
            )
        ),
        ("not_there", ConfigError, f"executor='{DEVICE}:not_there' cannot be imported .* has no attribute 'not_there'"),
    ],
)
async def test_a_child_that_cannot_start_says_why(
    device: str, error: type[AioEngineError], said: str, runtime: Path
) -> None:
    with pytest.raises(error) as caught:
        await Engine.start(process=ProcessOptions(executor=f"{DEVICE}:{device}"))
    assert type(caught.value) is error
    assert re.fullmatch(said, str(caught.value)), str(caught.value)
    assert os.listdir(runtime) == []


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("transport.life_scripts.bad_plugin", "ValueError: this plugin was made for another version"),
        *nightly(("no_such_plugin", "ModuleNotFoundError: No module named 'no_such_plugin'")),
    ],
)
async def test_a_plugin_that_cannot_be_imported(plugin: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await Engine.start(process=ProcessOptions(executor=f"{DEVICE}:told", plugins=(plugin,)))
    assert str(caught.value) == f"{plugin} cannot be imported in the engine's process: {said}"


@pytest.fixture
def model_without_weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


async def test_a_folder_without_a_model_is_found_out_before_there_is_a_child(tmp_path: Path, runtime: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no folder .*/nothing"):
        await Engine.start(tmp_path / "nothing", process=True)
    assert os.listdir(runtime) == []


@pytest.mark.nightly
async def test_what_torch_finds_wrong_in_the_child_is_told_here(model_without_weights: Path, runtime: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"safetensors"):
        await Engine.start(model_without_weights, process=True)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes"):
        await Engine.start(process=True, kv_cache_memory_bytes=1)
    assert not [name for name in os.listdir(runtime) if name.startswith("aioengine")]  # torch has its own there
