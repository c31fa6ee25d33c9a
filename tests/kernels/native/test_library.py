"""Where native kernels are kept, and that an engine starts without them where they cannot be."""

from __future__ import annotations

import fcntl
import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aioengine.executor.host import HostAccelerator, use_torch_threads
from aioengine.kernels.native import compilation as kept
from aioengine.kernels.native.compilation import Compilation
from aioengine.kernels.native.library import PACKAGE, find_library, library_path, read_part
from aioengine.processes.own_process import COMPILER_OUTLIVES
from doubles.held_compiler import HeldCompiler


def _bringing(code: Path) -> str:
    """A program that has this file in place of what the compiler makes."""
    return f"""
import sys, types
from pathlib import Path
sys.modules["aioengine.kernels.native.compiler"] = types.SimpleNamespace(
    compile_part=lambda *_: Path({str(code)!r}).read_bytes()
)
"""


@pytest.mark.parametrize("problem", ["no home", "a folder that cannot be", "a file in its place"])
def test_where_no_folder_can_be_used_the_library_is_compiled_for_this_engine_alone(
    problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache_home = tmp_path / ("x" * 300 if problem == "a folder that cannot be" else "file")
    compiler = HeldCompiler(tmp_path, monkeypatch, cache_home=cache_home)
    if problem == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # no user's
    assert find_library(["common"]) is None
    compilation = Compilation(["common"])
    assert compilation.poll() is None
    compiler.go_on()
    library = compilation.poll()
    assert library is not None
    assert library.address("put_spans")
    assert compilation.poll() is None
    assert "compiled for this engine alone" in caplog.text


def test_a_file_that_is_not_whole_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LLVM would end the process."""
    code = read_part("common")
    assert code is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = library_path("common")
    path.parent.mkdir()
    for broken in (b"", code, code[:5000]):
        path.write_bytes(broken)
        assert find_library(["common"]) is None
        compilation = Compilation(["common"])
        assert compilation._child is not None
        compilation.close()


@pytest.mark.parametrize("has_run", [False, True], ids=["no step", "a step"])
@pytest.mark.parametrize("is_held", [False, True], ids=["compiled", "not compiled"])
def test_an_engine_that_computed_and_closes_before_its_kernels_are_there_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_run: bool, is_held: bool
) -> None:
    kept._warn_of_missing.cache_clear()
    compiler = HeldCompiler(tmp_path, monkeypatch)
    for _ in range(2):
        compilation = Compilation(["common"])
        if has_run:
            compilation.begin()
        if not is_held:
            compiler.go_on()
            assert compilation.poll() is not None
        compilation.close()
    compiler.go_on()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["`aioengine compile`" in warning for warning in warnings] == ([True] if is_held and has_run else [])


def test_the_compiler_takes_no_module_from_the_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if path != str(PACKAGE.parent))])
    with io.FileIO(tmp_path / "errors", "w+") as errors, io.FileIO(tmp_path / "unkept", "w") as unkept:
        child = kept._start_child((), unkept.fileno(), errors)
        child.communicate()
        assert child.returncode == 0, (tmp_path / "errors").read_text()


def test_the_compiler_has_one_thread_whatever_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "import os, sys, numpy\nsys.stderr.write(str(len(os.listdir('/proc/self/task'))))"
    monkeypatch.setattr(kept, "_COMPILE", program)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with io.FileIO(tmp_path / "threads", "w+") as errors:
        kept._start_child((), errors.fileno(), errors).communicate()
    assert (tmp_path / "threads").read_text() == "1"


def test_a_compiler_that_writes_much_ends_and_its_last_lines_are_the_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = "import sys\nsys.stderr.write('import a\\n' * 50_000)\nraise OSError('no room')"
    monkeypatch.setattr(kept, "_COMPILE", program)
    compilation = Compilation(["common"])
    assert compilation._child is not None
    assert compilation._child.wait(60) == 1
    assert compilation.poll() is None
    assert compilation.problem.startswith("import a\n")
    assert compilation.problem.endswith("\nOSError: no room")


def test_kernels_that_the_compiler_cannot_write_are_for_this_engine_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = read_part("common")
    assert code is not None
    (tmp_path / "code").write_bytes(code)
    monkeypatch.setattr(kept, "_COMPILE", _bringing(tmp_path / "code") + kept._COMPILE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library_path("common").with_suffix(".lock").mkdir(parents=True)
    compilation = Compilation(["common"])
    assert compilation.poll() is None
    found = compilation.wait()
    assert found is not None
    assert found.address("put_spans")
    assert "compiled for this engine alone: [Errno 21] Is a directory" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize(("head_start_s", "begins"), [(600.0, True), (0.0, False)])
def test_the_compiler_leaves_the_cores_to_an_engine_until_it_is_told_to_begin_or_a_time_is_over(
    head_start_s: float, begins: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kept, "HEAD_START_S", head_start_s)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation = Compilation(["common"])
    assert compilation._child is not None
    assert compilation.is_running is not begins
    if begins:
        compilation.begin()
    assert compilation.is_running
    assert compilation._child.wait(60) == 0
    assert compilation.poll() is not None
    assert not compilation.is_running


@pytest.mark.nightly
def test_the_compiler_begins_when_the_first_step_has_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept, "HEAD_START_S", 600.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    accelerator = HostAccelerator(num_threads=1, parts=["common"])
    compilation = accelerator._compilation
    assert compilation is not None
    assert compilation._child is not None
    assert compilation._child.stdin is not None
    for _ in range(2):
        assert accelerator.newer_operations() is None
        assert not compilation._child.stdin.closed
    accelerator.copy_out(torch.zeros(1, dtype=torch.int32), accelerator.host_words(1), 1)
    assert compilation._child.wait(60) == 0
    assert accelerator.newer_operations() is not None
    accelerator.close()


def test_torch_leaves_the_compiler_a_core_once_it_has_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = HeldCompiler(tmp_path, monkeypatch)

    def counts() -> list[int]:
        """torch's threads of a step: at first, after something else set them, beside the compiler, and afterwards."""
        accelerator = HostAccelerator(num_threads=2, parts=["common"])
        found = []
        for then in (
            lambda: use_torch_threads(1),
            lambda: accelerator.copy_out(torch.zeros(1, dtype=torch.int32), accelerator.host_words(1), 1),
            lambda: (compiler.go_on(), accelerator.newer_operations()),
            lambda: accelerator.close(),
        ):
            accelerator.use_threads(2)
            found.append(torch.get_num_threads())
            then()
        return found

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(counts).result() == [2, 2, 1, 2]


def test_a_commands_compiler_goes_on_when_it_ends_and_the_next_one_starts_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = read_part("common")
    assert code is not None
    (tmp_path / "code").write_bytes(code)
    os.mkfifo(tmp_path / "pipe")
    compiling = f"pipe = open({str(tmp_path / 'pipe')!r}, 'w')\n{_bringing(tmp_path / 'code')}{kept._COMPILE}"
    program = f"""
from aioengine.kernels.native import compilation
compilation._COMPILE = {compiling!r}
compilation.Compilation(["common"])
"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(COMPILER_OUTLIVES, "1")

    def run_command() -> str:
        """Run it and wait for the end of its compiler; return its stderr."""
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit((tmp_path / "pipe").read_text)
            command = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, stderr=subprocess.PIPE)
            ended.result(60)
        return command.stderr.decode()

    path = library_path("common")
    path.parent.mkdir()
    with path.with_name("compiler.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the compiler of another command
        assert "as an earlier command's compiler still does" in run_command()
        assert not path.exists()
    assert "once, also after this command ends; until" in run_command()
    assert read_part("common") == code


def test_a_command_whose_kernels_cannot_be_kept_reports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kept, "_COMPILE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/file")
    monkeypatch.setenv(COMPILER_OUTLIVES, "1")
    Compilation(["common"]).close()
    assert re.search(r"for this command alone, .* kept \(.*Not a directory", caplog.records[0].message)
