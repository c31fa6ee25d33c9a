"""The notebook, in a real Jupyter kernel: from top to bottom, again in the same kernel, and interrupted."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import nbformat
import psutil
import pytest
import pytest_asyncio
from examples.conftest import EXAMPLES, until
from nbclient import NotebookClient

PATH = EXAMPLES / "notebook.ipynb"
TIMEOUT_S = 120

ENDLESS = """
while True:
    async with engine.stream("Once upon a time", max_tokens=900, ignore_eos=True) as stream:
        async for delta in stream:
            print(delta.text, end="", flush=True)
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")
"""One kernel is for all tests: it takes seconds to start."""


class Kernel:
    """The notebook's kernel, and what its cells have shown there."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client

    async def run(self, source: str) -> str:
        """Run a cell; what it shows.

        Raises:
            CellExecutionError: it raised.
        """
        return text_of(await self._execute(nbformat.v4.new_code_cell(source)))

    async def run_all(self, sources: list[str]) -> list[str]:
        return [await self.run(source) for source in sources]

    async def interrupt(self, source: str) -> str:
        """Run a cell that does not end, and interrupt it when it has shown something; the name of its error."""
        cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["raises-exception"]})
        interrupted = False

        async def watch() -> None:
            nonlocal interrupted
            await until(lambda: text_of(cell) != "")
            await self._client.km.interrupt_kernel()
            interrupted = True

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await self._execute(cell)
        assert interrupted
        return next(output["ename"] for output in cell["outputs"] if output["output_type"] == "error")

    async def _execute(self, cell: Any) -> Any:
        self._client.nb.cells.append(cell)
        return await self._client.async_execute_cell(cell, len(self._client.nb.cells) - 1)


def text_of(cell: Any) -> str:
    """What a cell shows, without what it says of itself on stderr."""
    return "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for output in cell["outputs"]
        if output.get("name") != "stderr"
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def kernel(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kernel]:
    """A kernel of the interpreter that runs the tests, with nothing of this machine's settings."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder))
        patch.setenv("NO_PROXY", "127.0.0.1")
        client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3", timeout=TIMEOUT_S)
        client.shutdown_kernel = "immediate"  # asked to end, a kernel takes three seconds
        async with client.async_setup_kernel(cwd=str(folder)):
            pid = client.km.provisioner.pid
            yield Kernel(client)
        assert not psutil.pid_exists(pid)


def cells() -> list[str]:
    """The sources of the notebook's cells of code."""
    return [cell["source"] for cell in nbformat.read(PATH, as_version=4).cells if cell["cell_type"] == "code"]


def cells_with(*texts: str) -> list[str]:
    """Those that hold one of the texts, in their order."""
    return [source for source in cells() if any(text in source for text in texts)]


async def run_all_cells(kernel: Kernel) -> list[str]:
    """What each cell shows."""
    first = await kernel.run_all(cells())
    shown = dict(zip(cells(), first, strict=True))
    (described, greedy) = (next(shown[cell] for cell in cells_with(text)) for text in ("max_num_seqs=32", "float32"))
    assert "bfloat16" in described
    assert "float32" in greedy
    (gathered,) = (shown[cell] for cell in cells_with("gather(*(engine.generate([{"))
    assert "'5 + 5 = 10.'" in gathered
    for story in (shown[cell] for cell in cells_with("engine.stream(fox", "messages=fox")):
        assert len(story) > 200
    (stats,) = (shown[cell] for cell in cells_with("stats.finished"))
    assert stats.startswith("(0, 0, {")
    assert "'abort': 8" in stats
    assert "<Figure" in "".join(first)
    return first


@pytest.mark.nightly
async def test_all_cells_twice_in_one_kernel(kernel: Kernel) -> None:
    first, second = await run_all_cells(kernel), await kernel.run_all(cells())
    assert [bool(text) for text in second] == [bool(text) for text in first]


@pytest.mark.nightly
async def test_an_interrupted_cell_leaves_the_engine_and_the_server_well(kernel: Kernel) -> None:
    start, *_ = cells()
    names, serve, client, stop = cells_with("fox = [", "start_server(", "AsyncOpenAI(", "server.aclose()")
    await kernel.run_all([start, "import asyncio", names, serve])
    assert await kernel.interrupt(ENDLESS) in ("KeyboardInterrupt", "CancelledError")
    assert await kernel.run("stats = engine.stats(); stats.running, stats.waiting, stats.finished['abort']") == (
        "(0, 0, 1)"
    )
    assert (await kernel.run("(await engine.generate('Once upon a time', max_tokens=5)).text")) != ""
    assert len(await kernel.run(client)) > 200
    await kernel.run(stop)


async def test_it_is_saved_without_outputs_and_without_a_machine() -> None:
    text = PATH.read_text()
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert cell["metadata"] == {}
    assert sorted(notebook["metadata"]) == ["kernelspec", "language_info"]
    assert re.search(r"/home/|/Users/|/tmp/|/root/|/mnt/|[A-Z]:\\", text) is None
