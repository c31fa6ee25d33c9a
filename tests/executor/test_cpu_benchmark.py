"""``python -m benchmarks.cpu`` runs to its end. Its figures are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEER = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("model", "out", "workloads", "reps", "threads"):
    parser.add_argument(f"--{name}", required=True)
args = parser.parse_args()
assert args.model == "file.gguf", args.model
figures = {"out_tok_s": 8.0, "prompt_tok_s": 8.0, "peak_rss": 3e9, "runs": [{"ids": [-1]}]}
with open(args.out, "w") as file:
    json.dump({"startup": {"to_first_token_s": 2.5}, "results": {args.workloads: figures}}, file)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_it_compares_the_engine_with_the_limits_and_with_a_peer(tmp_path: Path) -> None:
    (tmp_path / "run_other.py").write_text(PEER)
    peers = ["--runners", str(tmp_path), "--peer", f"other-q8={sys.executable},file.gguf", "--peer", "gone=/no/python"]
    figures = tmp_path / "figures.json"
    files = ["--json", str(figures)]
    workloads = ["--tiny", "--rounds", "1", "--reps", "2", "--only", "W1,lag"]  # the peer does one repetition
    ended = run("benchmarks.cpu", "--model", "demo", *workloads, *peers, *files)
    assert ended.returncode == 1, ended.stderr  # since one peer is not there
    assert "gone, W1, round 1 failed: FileNotFoundError" in ended.stdout

    found = json.loads(figures.read_text())
    (ours,) = (each for each in found["figures"] if (each["engine"], each["workload"]) == ("aioengine", "W1"))
    rate = ours["report"]["results"]["W1"]["out_tok_s"]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("| W1: "))
    cells = [cell.strip() for cell in line.split("|")][2:-1]
    assert cells[3:] == ["8.00", f"{rate / 8:.2f}", "0/1", "–", "–", "–"]
    assert float(cells[0].replace(",", "")) == pytest.approx(rate, rel=0.01)
    assert float(cells[1].replace(",", "")) > 0, "the bound"
    assert "| other-q8 | 2.50 | – | 3.00 |" in ended.stdout
    assert "aioengine, loop lag during W3, ms: p50 " in ended.stdout
