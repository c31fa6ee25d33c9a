"""Engines over tcp with keys: who has some is served, outputs and all, and nobody else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import pytest_asyncio
from contract import fakes

from aioengine import ConfigError, Engine, EngineConfig, EngineDead
from aioengine.core.protocol import CoreHooks
from aioengine.executor.in_process import InProcess
from aioengine.text.worker import TextWorker
from aioengine.transport.security import ServerKeys, make_keys
from aioengine.transport.server import EngineServer

on_both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["bob", "eve"])
    make_keys(tmp_path / "others", ["bob"])
    return tmp_path / "keys"


@pytest_asyncio.fixture
async def address(keys: Path) -> AsyncIterator[str]:
    """Of an engine that knows bob and eve."""
    workers = TextWorker(), TextWorker()
    config = EngineConfig(log_stats_interval_s=0.0)
    backend = InProcess(config, fakes.make(config), CoreHooks(*workers, lambda: None, lambda: 0))
    files = await backend.find_model()
    await backend.open()
    loaded = await asyncio.to_thread(ServerKeys.load, keys)
    server = EngineServer(backend.core, "tcp://127.0.0.1:0", model_path=files.path, keys=loaded)
    await server.open()
    scope = anyio.CancelScope()

    async def serve() -> None:
        with scope:
            await server.serve()

    task = asyncio.get_running_loop().create_task(serve())
    yield server.address
    scope.cancel()
    await task
    await backend.aclose()
    for worker in workers:
        await worker.aclose()


@on_both_loops
async def test_each_client_is_served_by_its_own_keys(keys: Path, address: str, tmp_path: Path) -> None:
    async with (
        await Engine.connect(address, keys=keys, client="bob") as bob,
        await Engine.connect(address, keys=keys, client="eve") as eve,
    ):
        outputs = [await engine.generate([5, 6, 7], seed=1, max_tokens=300) for engine in (bob, eve, bob)]
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert await bob.save_sharded_state(tmp_path / "saved"), "with keys files may be named, too"
    async with await Engine.connect(address, keys=keys, client="bob") as again:
        assert (await again.generate([5], max_tokens=2)).finished


@on_both_loops
async def test_who_has_no_keys_or_others_is_not_served(keys: Path, address: str, tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="or it needs keys"):
        await Engine.connect(address)
    with pytest.raises(EngineDead, match="or not with these keys"):
        await Engine.connect(address, keys=tmp_path / "others", timeout_s=5)
    with pytest.raises(ConfigError, match="bob, eve"):
        await Engine.connect(address, keys=keys)
    async with await Engine.connect(address, keys=keys, client="eve") as eve:
        assert (await eve.generate([5], max_tokens=2)).finished
