"""What the kernels of coded weights and their launcher have in common, which takes no numba."""

from __future__ import annotations

from llvmlite import binding

_FEATURES = binding.get_host_cpu_features()

HAS_PAIRS = all(_FEATURES.get(feature) for feature in ("avx512bw", "avx512bf16"))
"""Whether pairs of bfloat16 are looked up and multiplied at once."""

STEP_INPUTS = 64
"""The most inputs whose products are summed before they are scaled."""
