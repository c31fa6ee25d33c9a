"""A short run of the fuzzer; a million messages are `python benchmarks/wire_fuzz.py --frames 1000000`."""

import subprocess
import sys
from pathlib import Path

import pytest
from nightly import nightly

FUZZER = Path(__file__).parents[2] / "benchmarks" / "wire_fuzz.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FUZZER, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("seed", [1, *nightly(2)])
def test_broken_messages_do_no_harm(seed: int) -> None:
    done = run("--frames", "20000", "--seed", str(seed), "--live-share", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "harm: none" in done.stdout


@pytest.mark.nightly
def test_harm_is_seen(tmp_path: Path) -> None:
    """A reader that lets one kind of error through is found by a short run."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import runpy, sys\n"
        "from aioengine.transport import wire\n"
        "read = wire.Reader.read\n"
        "def read_one(reader, frames):\n"
        "    if len(frames) > 1:\n"
        "        raise IndexError('too many')\n"
        "    return read(reader, frames)\n"
        "wire.Reader.read = read_one\n"
        f"sys.argv = ['wire_fuzz', '--frames', '2000', '--live-share', '0']\n"
        f"sys.path.insert(0, {str(FUZZER.parent)!r})\n"
        f"runpy.run_path({str(FUZZER)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, broken], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "IndexError: too many" in done.stdout
