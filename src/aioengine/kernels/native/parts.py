"""The parts of the native library, so that a model waits for the compilation of those alone that it needs: "common",
the kernels of a dtype ("bfloat16"), those of its int8 weights ("bfloat16-int8"), and those of weights of codes, which
are int4 ones, too ("coded").
"""

from __future__ import annotations

from collections.abc import Iterable

DTYPES = ("float32", "bfloat16", "float16")
COMMON, CODED = "common", "coded"
ALL_PARTS = (COMMON, *DTYPES, *(f"{dtype}-int8" for dtype in DTYPES), CODED)


def parts_of(dtype: str, quantization: str | None = None) -> tuple[str, ...]:
    """The parts that a model needs.

    Args:
        dtype: of its activations, as in ``DTYPES``.
        quantization: of its layers; the head is int8 with "int8" or "int4". "coded": as its checkpoint has them.
    """
    of_int8 = () if quantization in (None, "coded") else (f"{dtype}-int8",)
    of_codes = () if quantization in (None, "int8") else (CODED,)
    return COMMON, dtype, *of_int8, *of_codes


def part_of(kernel: str) -> str:
    """The part of a kernel, by the first dtype in its name, and whether it is for int8 weights or for codes."""
    words = kernel.split("_")
    if CODED in words:
        return CODED
    dtype = next((word for word in words if word in DTYPES), COMMON)
    return f"{dtype}-int8" if "int8" in words else dtype


def compile_seconds(parts: Iterable[str]) -> int:
    """About how many seconds of a core these parts take, on Zen 4 at 3.7 GHz."""
    return sum({COMMON: 6, CODED: 14}.get(part, 2 if "int8" in part else 12) for part in parts)
