"""Engines over tcp with keys: who has some is served, outputs and all, and nobody else is."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from contract import fakes
from transport.life_scripts.serving import served

from aioengine import ConfigError, Engine, EngineConfig, EngineDead
from aioengine.transport.security import ServerKeys, make_keys
from aioengine.transport.server import EngineServer

Serving = AbstractAsyncContextManager[EngineServer]

on_both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["bob", "eve"])
    make_keys(tmp_path / "others", ["bob"])
    return tmp_path / "keys"


@pytest.fixture
def serving(keys: Path) -> Serving:
    """An engine that knows bob and eve."""
    config = EngineConfig(log_stats_interval_s=0.0)
    return served("tcp://127.0.0.1:0", fakes.make(config), keys=ServerKeys.load(keys), log_stats_interval_s=0.0)


@on_both_loops
async def test_each_client_is_served_by_its_own_keys(keys: Path, serving: Serving, tmp_path: Path) -> None:
    async with serving as server:
        address = server.address
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
async def test_who_has_no_keys_or_others_is_not_served(keys: Path, serving: Serving, tmp_path: Path) -> None:
    async with serving as server:
        address = server.address
        with pytest.raises(EngineDead, match="or it needs keys"):
            await Engine.connect(address)
        with pytest.raises(EngineDead, match="or not with these keys"):
            await Engine.connect(address, keys=tmp_path / "others", timeout_s=5)
        with pytest.raises(ConfigError, match="bob, eve"):
            await Engine.connect(address, keys=keys)
        async with await Engine.connect(address, keys=keys, client="eve") as eve:
            assert (await eve.generate([5], max_tokens=2)).finished
