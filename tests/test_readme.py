"""What README and the pages of docs/ say runs as it stands, on the bundled model in place of a downloaded one.

Blocks of ``python`` that import something are programs of their own; the others are cells of their page's notebook. One
whose first line is a path is that file. In blocks of ``sh`` and ``console`` each command is run, ``> `` before what is
typed into it, with what it prints below; "…" stands for the rest of a line. Blocks of ``text`` are pictures.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nightly import few

import aioengine
from aioengine import Engine
from aioengine.testing import FakeExecutor

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FROM_VLLM = ROOT / "docs" / "from-vllm.md"
WITH_LINKS = [
    *PAGES,
    ROOT / "ARCHITECTURE.md",
    *ROOT.glob("docs/internals/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("examples/*.md"),
]

BUNDLED = "http://127.0.0.1:8000"
"""Where the pages' server is; the tests' is at another port."""
DEADLINE_S = 90
IM_END = 2
"""A token that ends the demo model's output."""
NIGHTLY = {"cpu.md", "operating.md", "processes.md", "scaling.md", "without-asyncio.md"}
"""Pages whose commands are run by `make nightly` alone: four seconds each, compiling kernels half a minute, and tests
of the commands run their like."""


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def files_of(page: Path) -> dict[str, str]:
    """The blocks that are files, by their path."""
    return {match[1]: block for block in blocks_of(page, "python") if (match := re.match(r"# (\S+/\S+\.py)\n", block))}


def programs_of(page: Path) -> list[str]:
    files = files_of(page).values()
    return [block for block in blocks_of(page, "python") if "import" in block and block not in files]


def cells_of(page: Path) -> list[str]:
    return [block for block in blocks_of(page, "python") if "import" not in block]


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Each command, its lines joined, with what stands below it up to the next."""
    in_shells = [
        (line.partition("  #")[0].rstrip(), "") for block in blocks_of(page, "sh") for line in block.splitlines()
    ]
    return in_shells + [
        (command.replace("\\\n", " "), below)
        for block in blocks_of(page, "console")
        for command, below in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)
    ]


def by_name(page: Path) -> str:
    return page.name


# What is on the pages


def test_the_pages_have_programs_files_cells_and_commands() -> None:
    assert sum(len(programs_of(page)) for page in PAGES) == 19
    assert sum(len(cells_of(page)) for page in PAGES) >= 11
    assert sum(len(commands_of(page)) for page in PAGES) >= 9
    assert [path for page in PAGES for path in files_of(page)] == ["my_app/workers.py"]


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_no_block_is_of_another_language(page: Path) -> None:
    languages = re.findall(r"^```(.*)\n(?:(?!```).*\n)*```$", page.read_text(), flags=re.MULTILINE)
    assert set(languages) <= {"python", "sh", "console", "text"}
    assert all(set("┌│") & set(picture) for picture in blocks_of(page, "text"))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_prose_fits_its_lines(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def anchors_of(page: Path) -> set[str]:
    """The names that a page's headings have on the web."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)(.*?)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), target


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_scripts_and_tests_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"\b(?:benchmarks|tests|examples)/[\w/]+\.(?:py|ipynb)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_page_is_linked_from_readme() -> None:
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in README.read_text()] == []


def test_the_figures_are_those_of_the_benchmarks() -> None:
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    (table,) = re.findall(r"^\| what \| figure \|\n(.*?)\n\n", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    figures = re.findall(r"\d[\d,.–]*(?= (?:µs|ms|s|tokens))", table)
    assert len(figures) >= 8
    assert [figure for figure in figures if figure not in measured] == []


def test_the_test_command_is_the_one_of_ci() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] in dict(commands_of(README))


# Commands


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with the command ``aioengine`` in its ``bin``: this interpreter's, installed or not."""
    home = tmp_path_factory.mktemp("home")
    command = home / "bin" / "aioengine"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aioengine "$@"\n')
    command.chmod(0o755)
    return home


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(home),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # the kernels are there
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def serving(command: str, home: Path) -> Iterator[str]:
    """Runs a server, gives the line that it prints when it serves, and ends it by SIGTERM."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(home),
    ) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline()
        finally:
            server.terminate()
    assert server.returncode == 0


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    """Where ``aioengine serve`` serves the bundled model."""
    with serving("aioengine serve --port 0", home) as line:
        match = re.fullmatch(r"serving demo at (http://127.0.0.1:\d+)\n", line)
        assert match is not None, line
        yield match[1]


def run_command(command: str, below: str, home: Path) -> None:
    """Run a command, type what is typed into it, and compare what it prints, line by line."""
    typed = "".join(re.findall(r"^> (.*\n)", below, flags=re.MULTILINE))
    done = subprocess.run(
        ["bash", "-c", command],
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=home,
        env=environment(home),
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    expected = re.sub(r"^> .*\n", "", below, flags=re.MULTILINE)
    pattern = re.escape(expected).replace("…", ".*")
    assert not expected or re.fullmatch(pattern, done.stdout), done.stdout


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.nightly] if page.name in NIGHTLY else [], id=page.name)
        for page in PAGES
        if commands_of(page)
    ],
)
def test_the_commands_of_a_page_run_in_their_order(page: Path, home: Path, request: pytest.FixtureRequest) -> None:
    with contextlib.ExitStack() as servers:
        for command, below in commands_of(page):
            command, below = (text.replace("/home/tom", str(home)) for text in (command, below))
            match command.removeprefix("pip install . && ").split():
                case ["pip", *_, "make", target] | ["make", target]:  # what CI runs, this test in it
                    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
                case ["aioengine", "serve", "--port", "8000"]:
                    assert below == f"serving demo at {BUNDLED}\n"
                    request.getfixturevalue("url")  # compares that line
                case ["aioengine", "serve", *_]:
                    line = servers.enter_context(serving(f"{command} --port 0", home))
                    assert re.sub(r":\d+\n", ":8000\n", line) == below
                case ["aioengine", "engine", *_]:
                    assert servers.enter_context(serving(command, home)) == below
                case ["curl", *_]:
                    ask_with_curl(command, request.getfixturevalue("url"))
                case ["aioengine" | "mkdir", *_]:
                    run_command(command.removeprefix("pip install . && "), below, home)
                case _:
                    raise AssertionError(f"no test runs {command}")


def ask_with_curl(command: str, url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = command.replace(BUNDLED, url).replace("curl ", "curl --silent --fail ", 1)
    command = command.replace('"messages"', '"temperature": 0, "messages"')  # no token drawn by chance
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=DEADLINE_S)
    assert "15" in json.loads(done.stdout)["choices"][0]["message"]["content"], done.stderr


# Programs

ONE_AFTER_THE_OTHER = """
import json, sys
for program in json.load(sys.stdin):
    exec(compile(program, "a program of the page", "exec"), {"__name__": "__main__"})
"""


@pytest.mark.parametrize("page", few(PAGES[:1], of=[page for page in PAGES if programs_of(page)]), ids=by_name)
def test_the_programs_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, home: Path, request: pytest.FixtureRequest
) -> None:
    programs = programs_of(page)
    if any(BUNDLED in program for program in programs):
        url = request.getfixturevalue("url")
        programs = [program.replace(BUNDLED, url) for program in programs]
    files = {tmp_path / path: block for path, block in files_of(page).items()}
    for path, block in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(home),
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(files)
    assert done.stdout.count("15") >= sum("What is 8 + 7?" in program for program in programs)


def test_the_program_about_testing_runs_whatever_tokens_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyEnds(FakeExecutor):
        def __init__(self, **options: Any) -> None:
            super().__init__(sampler=lambda token_ids, sampling: IM_END, **options)

    monkeypatch.setattr("aioengine.testing.FakeExecutor", OnlyEnds)
    (program,) = (program for page in PAGES for program in programs_of(page) if "FakeExecutor(vocab" in program)
    exec(compile(program, "a page", "exec"), {})


# Cells


async def run_cells(cells: list[str], names: dict[str, Any]) -> None:
    """Run cells one after the other; ``await`` may stand outside functions."""
    for cell in cells:
        code = compile(cell, "a page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result


@pytest.mark.parametrize(
    "page", few([ROOT / "docs" / "sampling.md"], of=[page for page in PAGES if cells_of(page)]), ids=by_name
)
async def test_the_cells_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    replaced = {
        'Engine.start("Qwen/Qwen3-0.6B", max_model_len=4096, max_num_seqs=64)': "Engine.start(**small)",
        '"trace.json"': repr(str(tmp_path / "trace.json")),
        '"./checkpoint"': repr(str(tmp_path / "checkpoint")),
        ', or tensors={"model.norm.weight": tensor, ...}': "",
    }
    cells = cells_of(page)
    if not any("Engine.start(" in cell for cell in cells):
        cells = ["engine = await Engine.start(**small)", *cells]
    for old, new in replaced.items():
        cells = [cell.replace(old, new) for cell in cells]
    small = {"max_num_seqs": 64, "kv_cache_memory_bytes": 2**24}
    names: dict[str, Any] = {"asyncio": asyncio, "Engine": Engine, "small": small}
    try:
        await run_cells(cells, names)
        if any("trace.json" in cell for cell in cells):
            assert (tmp_path / "trace.json").stat().st_size > 1000
        if any("n=3" in cell for cell in cells):
            assert len(names["out"].outputs) == 3
    finally:
        await names["engine"].aclose()


# What is said of vLLM's arguments


def rows_of(page: Path, section: str) -> list[tuple[str, str]]:
    """The two columns of the table in a section."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| (`.*?) \| (.*) \|$", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("section", "make"),
    [
        ("Sampling parameters", aioengine.SamplingParams),
        ("Engine arguments", lambda **given: aioengine.Engine(**given)),
    ],
)
def test_what_is_said_of_vllms_arguments_is_so(section: str, make: Any) -> None:
    rows = rows_of(FROM_VLLM, section)
    told = [(code, here) for vllm, here in rows for code in re.findall(r"`(\w+=.*?)`", vllm)]
    assert len(told) > 15
    for code, here in told:
        given = eval(f"dict({code})")
        if here.startswith("taken"):
            make(**given)
        else:
            assert here.startswith("refused: ")
            with pytest.raises((aioengine.InvalidRequest, aioengine.ConfigError), match=next(iter(given))):
                make(**given)
