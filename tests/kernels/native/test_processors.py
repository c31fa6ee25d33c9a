"""Native kernels on processors with fewer instructions than this one: the same tests, by code made for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

HASWELL = "64bit avx avx2 bmi bmi2 cmov cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sse sse2 sse3 sse4.1 sse4.2 ssse3"
PROCESSORS = {
    "haswell": HASWELL.split(),
    "skylake-avx512": [*HASWELL.split(), *(f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))],
}

PRETEND = """
from llvmlite import binding
features = binding.FeatureMap(dict.fromkeys(binding.get_host_cpu_features(), False) | dict.fromkeys({features}, True))
binding.get_host_cpu_features = lambda: features
binding.get_host_cpu_name = lambda: {name!r}
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_are_right_on_other_processors(tmp_path: Path, name: str) -> None:
    features = PROCESSORS[name]
    if not all(binding.get_host_cpu_features().get(feature) for feature in features):
        pytest.skip(f"this processor has less than {name}")
    (tmp_path / "sitecustomize.py").write_text(PRETEND.format(features=features, name=name))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)]),
        "XDG_CACHE_HOME": str(tmp_path),
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features),
    }
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here)]
    run = subprocess.run(command, env=environment, cwd=here.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert list((tmp_path / "aioengine").glob("*.o"))
