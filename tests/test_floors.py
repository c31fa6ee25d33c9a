"""The picture in ARCHITECTURE.md, held by a test: which floor may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aioengine

ROOT = Path(aioengine.__file__).parent

EVERYWHERE = {
    "errors",
    "config",
    "sampling_params",
    "request",
    "request_log",
    "outputs",
    "validation",
    "metrics",
    "plain_struct",
}
"""What every floor may use; `outputs` is for those above the core."""

MAY_IMPORT = {
    "core": {"core"},
    "kernels": {"kernels"},
    "attention": {"attention", "kernels", "core"},
    "sampler": {"sampler", "kernels", "core"},
    "models": {"models", "attention", "kernels", "model_folder"},
    "executor": {
        "executor", "models", "attention", "sampler", "kernels", "core", "control", "model_folder", "progress",
        "worker_functions",
    },
    "model_folder": {"demo"},
    "dump": {"core"},
    "control": set(),
    "health": set(),
    "turns": set(),
    "waits": set(),
    "process_options": set(),
    "weight_pieces": {"control"},
    "control_calls": {"control", "weight_pieces"},
    "core_api": {
        "control", "core.scheduler", "core.sequence", "executor.protocol", "health", "listener", "model_folder",
        "progress", "text.worker",
    },
    "engine_core": {"control", "core", "dump", "engine_control", "executor.protocol", "health", "listener", "waits"},
    "engine_control": {"control", "engine_core", "executor.protocol"},
    "in_process": {
        "core_api", "dump", "engine_core", "executor.protocol", "executor.torch_executor", "model_folder", "progress",
        "text.worker",
    },
    "listener": {"core.plan", "core.sequence", "core.step_output", "turns"},
    "completion": {"core_api", "listener", "core.detokenizer", "core.sequence"},
    "reply": {"completion", "core.sequence", "core_api"},
    "prompt": {"core.sequence", "core_api", "executor.protocol", "intake", "text"},
    "stream": {"control", "core.plan", "executor.protocol", "intake", "prompt", "reply", "runtime"},
    "intake": {"turns"},
    "progress": set(),
    "text": {"text", "core.detokenizer", "model_folder", "turns"},
    "runtime": {
        "completion", "control", "core.detokenizer", "core.sequence", "core_api", "executor.protocol", "health",
        "intake", "listener", "model_folder", "progress", "reply", "text", "turns",
    },
    "engine": {
        "control", "control_calls", "core_api", "executor.protocol", "health", "in_process", "intake",
        "process_options", "prompt", "runtime", "stream", "text.tokenizer", "transport.launch", "weight_pieces",
    },
    "transport": {
        "transport", "control", "core.scheduler", "core.sequence", "core_api", "engine_control", "engine_core",
        "executor.protocol", "health", "in_process", "listener", "model_folder", "process_options", "progress",
        "prompt", "text.worker", "turns", "waits",
    },
    "blocking": {"blocking", "control", "engine", "executor.protocol", "health", "process_options", "text.tokenizer"},
    "server": {"server", "engine", "health", "prompt", "turns"},
    "cli": {"cli", "engine", "process_options", "server", "transport"},
    "__main__": {"cli"},
    "testing": {
        "testing", "core", "control", "executor", "kernels.operations", "kernels.reference", "model_folder",
        "models.loader", "worker_functions",
    },
    "worker_functions": set(),
    "demo": {"demo"},
    "outputs": {"core.sequence"},
    "request": set(),
    "request_log": set(),
    "sampling_params": set(),
    "config": set(),
    "validation": set(),
    "plain_struct": set(),
    "metrics": set(),
    "errors": set(),
}  # fmt: skip
"""Which floors, or modules of floors, each may use besides those that everything may."""

NEVER = {
    "core": {"torch", "asyncio", "anyio", "zmq", "time", "random", "threading"},
    "transport": {"torch"},
    "server": {"torch", "zmq"},
    "models": {"asyncio", "anyio", "zmq"},
    "attention": {"asyncio", "anyio", "zmq"},
    "sampler": {"asyncio", "anyio", "zmq"},
    "kernels": {"asyncio", "anyio", "zmq"},
}

CORE_MAY_IMPORT = {"numpy", "msgspec"} | set(sys.stdlib_module_names)


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def floor_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever it stands in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            module = node.module or ""
            # A name that is imported may itself be a module: `from aioengine import engine`.
            inner = [f"{module}.{alias.name}" for alias in node.names]
            yield from [name for name in inner if is_module(name)] or [module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "worker.run")):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def is_module(name: str) -> bool:
    if not name.startswith("aioengine."):
        return False
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_a_module_imported_by_name_from_its_package_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "sneaky.py"
    source.write_text("from aioengine import engine, SamplingParams\nfrom aioengine.executor import torch_executor\n")
    assert set(imports_of(source)) == {"aioengine.engine", "aioengine.executor.torch_executor"}


def test_there_are_modules_to_look_at() -> None:
    floors = {floor_of(path) for path in modules()}
    assert {"core", "executor", "models", "engine", "text", "testing", "cli", "demo"} <= floors


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_floor_may(path: Path) -> None:
    floor = floor_of(path)
    if floor == "__init__":
        return
    allowed = MAY_IMPORT[floor] | EVERYWHERE
    for name in imports_of(path):
        if name.startswith("aioengine."):
            inner = name.removeprefix("aioengine.")
            assert any(inner == entry or inner.startswith(entry + ".") for entry in allowed), f"{floor} → {name}"
        top = name.split(".")[0]
        assert top not in NEVER.get(floor, set()), f"{floor} never imports {top}"
        if floor == "core" and top != "aioengine":
            assert top in CORE_MAY_IMPORT, f"core imports {top}, which is neither numpy, msgspec nor the stdlib"


def test_importing_the_package_loads_no_torch_and_no_transformers() -> None:
    heavy = ("torch", "transformers", "tokenizers", "rich", "uvloop", "click", "zmq", "starlette", "uvicorn", "aiohttp")
    code = f"import sys, aioengine; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_place_creates_tasks() -> None:
    callers = [
        str(path.relative_to(ROOT))
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".create_task", "ensure_future"))
    ]
    assert callers == ["runtime.py"]
