"""The picture in ARCHITECTURE.md, held by a test: each room imports from itself and from the floors below it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import aioengine

ROOT = Path(aioengine.__file__).parent

FLOORS = """
    __init__ __main__
    cli compat integrations
    blocking server testing
    engine
    frontend
    cluster
    transport
    executor
    core
    text
    models
    sampler
    scheduler
    kernels
    outputs
    config sampling_params
    structured tool_calls
    vllm_names
    processes schemas validation
    errors
""".strip().splitlines()
"""From the top down. Rooms on one floor do not know each other."""

NEVER = {
    "scheduler": {"torch", "asyncio", "anyio", "zmq", "time", "random", "threading"},
    "transport": {"torch"},
    "cluster": {"torch"},
    "core": {"torch", "zmq"},
    "server": {"torch", "zmq"},
    "models": {"asyncio", "anyio", "zmq"},
    "sampler": {"asyncio", "anyio", "zmq"},
    "kernels": {"asyncio", "anyio", "zmq"},
}

SCHEDULER_MAY_IMPORT = {"aioengine", "numpy", "msgspec"} | set(sys.stdlib_module_names)

FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever it stands in it: those for types alone included."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            module = node.module or ""
            # A name that is imported may itself be a module: `from aioengine import engine`.
            inner = [f"{module}.{alias.name}" for alias in node.names]
            yield from [name for name in inner if is_module(name)] or [module]
        elif isinstance(node, ast.Call) and any(
            ast.unparse(part).endswith("import_module") for part in (node.func, *node.args)
        ):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def is_module(name: str) -> bool:
    if not name.startswith("aioengine."):
        return False
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_from_its_own_room_and_from_floors_below(path: Path) -> None:
    room = room_of(path)
    for name in imports_of(path):
        top, *inner = name.split(".")
        target = inner[0] if inner else "engine"  # the package's own names are those of the engine and of what is above
        if top == "aioengine" and target != room:
            assert FLOOR_OF[target] > FLOOR_OF[room], f"{room} is not above {target}: {name}"
        assert top not in NEVER.get(room, set()), f"{room} never imports {top}"
        assert room != "scheduler" or top in SCHEDULER_MAY_IMPORT, f"scheduler never imports {top}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    imported = {name_of(path): set(filter(is_module, imports_of(path))) for path in modules()}
    below = {name: names for name, names in imported.items() if name != "aioengine"}
    while leaves := {name for name, names in below.items() if not names & below.keys()}:
        below = {name: names for name, names in below.items() if name not in leaves}
    assert not below, "these import each other, or what does"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_class_name_stands_for_one_class() -> None:
    nodes = [node for path in modules() for node in ast.walk(parsed(path))]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert {name: count for name, count in Counter(names).items() if count > 1} == {}


def test_every_room_has_a_floor_and_is_there() -> None:
    assert {room_of(path) for path in modules()} == FLOOR_OF.keys()


def test_rooms_are_few_and_know_few_others() -> None:
    """An arrow leads from a room to another one that it imports from."""
    names = [(room_of(path), name.split(".")) for path in modules() for name in imports_of(path)]
    arrows = {(room, parts[1] if parts[1:] else "engine") for room, parts in names if parts[0] == "aioengine"}
    assert len(FLOOR_OF) <= 30
    assert sum(room != target for room, target in arrows) <= 200


def test_a_module_imported_by_name_from_its_package_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "sneaky.py"
    source.write_text(
        "from aioengine import engine, SamplingParams\nfrom aioengine.executor import torch_executor\n"
        "run(importlib.import_module, 'aioengine.executor.cuda')"
    )
    assert set(imports_of(source)) == {
        "aioengine.engine", "aioengine.executor.torch_executor", "aioengine.executor.cuda",
    }  # fmt: skip


def test_no_comment_speaks_of_things_as_of_people() -> None:
    riddle = re.compile(r"\b(nobody|somebody|whoever|who)\b", re.I)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in modules()
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if riddle.search(line)
    ]
    assert found == []


def test_no_tensor_gets_the_default_dtype() -> None:
    """What it is belongs to the process, and transformers changes it in all threads while it builds a model.

    ``torch.arange`` of whole numbers has int64 in any case.
    """
    makers = ("zeros", "ones", "empty", "full", "tensor", "as_tensor", "scalar_tensor", "rand", "randn", "eye")
    makers += ("linspace", "logspace")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{maker}" for maker in makers}
        and not any(keyword.arg in ("dtype", "out") for keyword in node.keywords)
    ]
    assert found == []


def test_importing_the_package_loads_no_torch_and_no_transformers() -> None:
    heavy = (
        "torch",
        "transformers",
        "tokenizers",
        "rich",
        "uvloop",
        "click",
        "zmq",
        "starlette",
        "uvicorn",
        "aiohttp",
        "openai",
    )
    code = f"import sys, aioengine; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_place_creates_tasks() -> None:
    callers = [
        str(path.relative_to(ROOT))
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".create_task", "ensure_future"))
    ]
    assert callers == ["frontend/runtime.py"]
