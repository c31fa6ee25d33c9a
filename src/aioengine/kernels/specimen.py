"""What it takes to compile a kernel ahead of time, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A kernel with arguments' types, of a size that serving uses. Each kernel module has ``specimens()``.

    Attributes:
        name: the kernel's, and what sets this specimen apart.
        kernel: decorated by ``triton.jit``.
        signature: the arguments' types by name, such as ``{"x": "*bf16", "n": "i32"}``; "constexpr" for constants.
        constants: those.
        num_warps, num_stages, enable_fp_fusion: as it is launched. Launches say all whether products and sums may be
            fused: Triton warns where they do not (3.9), and changes what it does then (3.10).
        min_capability: such as 80 or 90: older GPUs do not run it.
        is_default: launched unless something else was measured to be faster, so that it has to fit into any GPU; what
            is only tried is passed over where it does not.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    enable_fp_fusion: bool = True
    min_capability: int = 80
    is_default: bool = True
