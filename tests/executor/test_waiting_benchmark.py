"""`benchmarks/gpu/waiting.py` runs to its end, and what it takes for granted is so. Its figures are not judged here."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timerfd and eventfd are Linux's")


def test_it_fills_its_tables(tmp_path: Path) -> None:
    report = tmp_path / "waiting.json"
    command = [sys.executable, "-m", "benchmarks.gpu.waiting", "--device", "stand-in", "--repeats", "1"]
    process = subprocess.run(
        [*command, "--seconds", "0.2", "--json", str(report)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "GPU's half is not measured" in process.stdout
    lines = process.stdout.splitlines()
    assert sum(line.startswith("| asyncio, launching, 10 ms | ") for line in lines) == 3
    figures = json.loads(report.read_text())
    assert len(figures["rows"]) == 2 * 3 * 3 * 8
    for row in figures["rows"]:
        assert row["loop"] in ("asyncio", "uvloop")
        assert row["steps"][0] >= 2
        if row["way"] != "timer":  # that one may be early by what a clock cannot tell
            assert 0 < row["p50_us"][0] <= row["p90_us"][0] <= row["p99_us"][0]
        assert 0 < row["loop_cpu_percent"][0] <= 110
        assert row["process_cpu_percent"][0] > 0


def load_steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("waiting_steps", ROOT / "benchmarks" / "gpu" / "waiting_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_event_file_is_readable_once_a_thread_without_python_has_called_its_function() -> None:
    file = load_steps().EventFile()
    for _ in range(3):
        file.arm()
        with pytest.raises(BlockingIOError):
            os.read(file.fd, 8)
        call_in_a_thread_of_c(file.function, file.argument)
        assert os.read(file.fd, 8) == (1).to_bytes(8, sys.byteorder)
    libc = ctypes.CDLL(None)
    libc.fclose(file.argument)


def call_in_a_thread_of_c(function: ctypes.c_void_p, argument: ctypes.c_void_p) -> None:
    """As CUDA's driver calls a host function."""
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, function, argument) == 0
    assert libc.pthread_join(thread, None) == 0
