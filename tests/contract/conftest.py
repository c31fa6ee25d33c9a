"""Engines of every way, closed at the end whatever became of them; the tests say what is the same of all.

A file's tests share a loop, and engines where they change nothing for good: ``engine`` is one that all of them use, one
after the other, and ``reference`` the same in process. `make_engine` makes one for a test alone.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract.ways import BOTH_LOOPS, WAYS, Opener, has_load
from nightly import few
from waiting import Tasks, until

from aioengine import Engine

MakeEngine = Callable[..., Coroutine[Any, Any, Engine]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other loop of each way to the nightly run, in tests with `BOTH_LOOPS`."""
    for item in items:
        marker = item.get_closest_marker("asyncio")
        if marker is not None and marker.kwargs == BOTH_LOOPS.kwargs and isinstance(item, pytest.Function):
            is_on_uvloop, way = "uvloop" in item.callspec.id, item.callspec.params.get("way")
            if way is not None and is_on_uvloop != (way != "in_process"):
                item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session", autouse=True)
def children_find_the_fakes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module", params=few(["in_process", "child"], of=WAYS))
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def device() -> str:
    """Over which the shared engines of a file run: a function of `contract.fakes`."""
    return "make"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(way: str, device: str) -> AsyncIterator[Engine]:
    opener = Opener(way)
    yield await opener.open(device)
    await opener.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(device: str) -> AsyncIterator[Engine]:
    """An engine in process, to compare with."""
    opener = Opener("in_process")
    yield await opener.open(device)
    await opener.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: Engine) -> AsyncIterator[Engine]:
    """The shared one, at rest, which a test has to leave at rest."""
    yield shared
    await until(has_load(shared, running=0, waiting=0))
    assert not await shared.is_sleeping()


@pytest_asyncio.fixture(loop_scope="module")
async def opener(way: str) -> AsyncIterator[Opener]:
    made = Opener(way)
    yield made
    await made.aclose()


@pytest.fixture
def make_engine(opener: Opener) -> MakeEngine:
    """``await make_engine(device, **config)``: one that is closed at the end."""
    return opener.open


@pytest_asyncio.fixture(loop_scope="module")
async def make_local() -> AsyncIterator[MakeEngine]:
    """The same in process, to compare with."""
    made = Opener("in_process")
    yield made.open
    await made.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def tasks() -> AsyncIterator[Tasks]:
    made = Tasks()
    yield made
    made.cancel()
    await made.end()
