"""The parts of the native library, so that a model waits for the compilation of those alone that it needs: "common",
the kernels of a dtype ("bfloat16"), and those of its quantised weights ("bfloat16-int8").
"""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
COMMON = "common"
ALL_PARTS = (COMMON, *DTYPES, *(f"{dtype}-{quantization}" for dtype in DTYPES for quantization in QUANTIZATIONS))


def parts_of(dtype: str, quantization: str | None = None) -> tuple[str, ...]:
    """What a model needs.

    Args:
        dtype: of its activations, as in ``DTYPES``.
        quantization: of its layers; the head is int8 with either.
    """
    return COMMON, dtype, *(f"{dtype}-{each}" for each in QUANTIZATIONS if quantization in (each, "int4"))


def part_of(kernel: str) -> str:
    """By the first dtype and the first quantisation in a kernel's name."""
    words = kernel.split("_")
    found = (next((word for word in words if word in kinds), None) for kinds in (DTYPES, QUANTIZATIONS))
    return "-".join(filter(None, found)) or COMMON
