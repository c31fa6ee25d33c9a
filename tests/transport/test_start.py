"""Engines that start in processes of their own, or fail and report the reason. Real processes."""

import errno
import hmac
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import zmq
from nightly import few, nightly

from aioengine import AioEngineError, ConfigError, Engine, EngineClosed, EngineDead, ProcessOptions
from aioengine.config import EngineConfig
from aioengine.core.protocol import CoreHooks
from aioengine.errors import ModelLoadError
from aioengine.models.folder import DEMO_MODEL
from aioengine.processes.worker_threads import TextWorker
from aioengine.transport import addresses, engine_process
from aioengine.transport.addresses import PrivateFolder
from aioengine.transport.backends import InChild
from aioengine.transport.handshake import Init
from aioengine.transport.wire import PROTOCOL_VERSION

pytestmark = pytest.mark.usefixtures("no_stray_process", "runtime", "quiet_log")

DEVICE = "transport.life_scripts.devices"


async def test_a_child_that_is_turned_away_logs_the_reason_and_ends(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: False)  # as if the token were another one
    with pytest.raises(EngineDead, match=r"EngineDead: this engine was turned away: the token is another one"):
        await Engine.start(process=ProcessOptions(executor=f"{DEVICE}:told"))
    assert os.listdir(runtime) == []


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


# Starts that fail


OPTIONS = ProcessOptions(executor="transport.life_scripts.devices:steady")
DEADLINE_S = 20.0


async def start_and_serve() -> None:
    async with await Engine.start(process=OPTIONS) as engine:
        await engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True)


def open_files() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/dev/fd/{fd}")}


async def test_what_is_closed_may_be_closed_again_when_its_worker_has_ended() -> None:
    """So the closing of an engine is begun again where the loop's end cuts it short."""
    worker = TextWorker()
    engine = InChild(EngineConfig(), OPTIONS, CoreHooks(worker, worker, on_capacity=lambda: None))
    await engine.find_model()
    await engine.aclose()
    await worker.aclose()
    await engine.aclose()


# File descriptors


@pytest.mark.nightly
@pytest.mark.parametrize("counts", [[0, 1, 3, 10, 30, 47, 64], [*range(80)]], ids=["some", "all"])
def test_a_start_with_few_file_descriptors_works_or_says_so_at_once(counts: list[int]) -> None:
    script = [sys.executable, "-m", "transport.life_scripts.few_descriptors", *map(str, counts)]
    lines = subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout.splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == [200, *counts]
    for line in lines:
        _, took_s, num_left, outcome = line.split("\t")
        assert int(num_left) == 0, line
        assert float(took_s) < 5, line
        assert outcome == "served" or outcome.startswith("ConfigError: no file descriptors left"), line
    assert lines[1].split("\t")[3].endswith("raise the limit (ulimit -n)")
    assert lines[0].endswith("served")
    assert lines[-1].endswith("served")


# System calls


def fail(number: int) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return failing


def refuse(*_: object, **__: object) -> Any:
    raise zmq.ZMQError(errno.EMFILE)


def replace_nth(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, replacement: Any) -> None:
    """Call ``replacement`` instead of ``owner.name`` the ``nth`` time."""
    original, num_calls = getattr(owner, name), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return (replacement if num_calls == nth else original)(*args, **options)

    monkeypatch.setattr(owner, name, counted)


FAILURES: dict[str, tuple[Any, str, int, Any]] = {
    "the folder is listed": (os, "listdir", 2, fail(errno.EMFILE)),
    "the lock is a descriptor too many": (addresses.fcntl, "flock", 1, fail(errno.EMFILE)),
    "the first socket": (zmq.Context, "socket", 1, refuse),
    "the start socket is bound": (zmq.Socket, "bind", 1, refuse),
    "a process": (subprocess, "Popen", 1, fail(errno.EAGAIN)),
    "a pidfd": (os, "pidfd_open", 1, fail(errno.EMFILE)),
    "the socket for requests": (zmq.Context, "socket", 2, refuse),
    "its monitor": (zmq.Context, "socket", 3, refuse),
    "it connects": (zmq.Socket, "connect", 2, refuse),
}


@pytest.mark.parametrize("what", few(["the first socket", "a process", "it connects"], of=FAILURES))
async def test_whatever_cannot_be_had_ends_the_start_and_leaves_nothing(
    what: str, monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    before = open_files()
    with anyio.fail_after(DEADLINE_S), monkeypatch.context() as patch:
        replace_nth(patch, *FAILURES[what])
        try:
            await start_and_serve()
        except AioEngineError as error:
            assert isinstance(error, ConfigError | EngineDead)  # noqa: PT017
    assert os.listdir(runtime) == []
    assert open_files() <= before


async def test_an_engine_whose_device_does_not_close_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    clinging = Init(version=PROTOCOL_VERSION, config=EngineConfig(), executor="transport.life_scripts.devices:clinging")
    monkeypatch.setattr(engine_process, "CLOSE_DEADLINE_S", 0.1)
    with anyio.fail_after(DEADLINE_S), anyio.CancelScope() as scope:
        await engine_process.serve_engine(clinging, on_serving=lambda _: scope.cancel())
    assert os.listdir(runtime) == []


async def test_a_text_thread_that_hangs_keeps_neither_the_process_nor_its_files(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    monkeypatch.setattr("aioengine.frontend.runtime.CLOSE_DEADLINE_S", 0.3)
    is_over = threading.Event()
    with anyio.fail_after(DEADLINE_S):
        engine = await Engine.start(process=OPTIONS)
        (child,) = psutil.Process().children()
        hanging = engine._runtime.worker.begin(is_over.wait)
        await engine.aclose()
        assert not child.is_running()
        assert os.listdir(runtime) == []
        is_over.set()
        with pytest.raises(EngineClosed):
            await hanging


# Folders


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
async def test_a_folder_that_cannot_be_written_to(number: int, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    with monkeypatch.context() as patch, anyio.fail_after(DEADLINE_S):
        patch.setattr(tempfile, "mkdtemp", fail(number))
        with pytest.raises(ConfigError, match=rf"{os.strerror(number)}.*set TMPDIR"):
            await start_and_serve()
    with monkeypatch.context() as patch, anyio.fail_after(DEADLINE_S):
        replace_nth(patch, zmq.Socket, "bind", 1, lambda *_: (_ for _ in ()).throw(zmq.ZMQError(number)))
        with pytest.raises(ConfigError, match=rf"cannot serve at ipc://.*{os.strerror(number)}"):
            await start_and_serve()
    assert os.listdir(runtime) == []


@pytest.mark.parametrize("is_missing", [*nightly(True), False])
async def test_a_folder_that_is_missing_or_too_long_is_passed_over(
    is_missing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("x" * 100)
    if not is_missing:
        folder.mkdir()
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    await start_and_serve()


@pytest.mark.parametrize("moment", ["made", "locked", "named"])
def test_a_folder_is_not_swept_away_while_it_is_made(
    moment: str, monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    """Another engine that starts at any moment does not take it for one that a killed process has left."""

    def then_sweep(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            addresses._sweep(str(runtime))
            return result

        return call

    place, name = {"made": (tempfile, "mkdtemp"), "locked": (addresses.fcntl, "flock"), "named": (os, "rename")}[moment]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, then_sweep(getattr(place, name)))
        patch.setattr(addresses, "_parents", lambda: iter([str(runtime)]))
        before = open_files()
        private = PrivateFolder()
    assert os.listdir(runtime) == [os.path.basename(private.path)]
    private.remove()
    assert open_files() <= before
    assert os.listdir(runtime) == []
