"""Compile the native kernels ahead of the first start, so that it computes by them at once: for images of containers,
and for programs that end sooner than the compiler.

    python -m aioengine.kernels.native bfloat16 [int8|int4]
"""

import sys

from aioengine.errors import InternalError
from aioengine.kernels.native.kernels.parts import DTYPES, QUANTIZATIONS, parts_of
from aioengine.kernels.native.library import compile_library, library_path


def main(arguments: list[str]) -> str | None:
    """Compile what is missing, and print where it lies.

    Args:
        arguments: a dtype, and a quantisation if weights are to be quantised.
    Returns:
        A message, if there is nothing that a later start would find; None: all is there.
    """
    match arguments:
        case [dtype] if dtype in DTYPES:
            parts = parts_of(dtype)
        case [dtype, quantization] if dtype in DTYPES and quantization in QUANTIZATIONS:
            parts = parts_of(dtype, quantization)
        case _:
            return f"usage: python -m aioengine.kernels.native {'|'.join(DTYPES)} [{'|'.join(QUANTIZATIONS)}]"
    try:
        compile_library(parts)
        missing = [str(path) for path in map(library_path, parts) if not path.exists()]
    except (InternalError, FileNotFoundError) as error:
        return str(error)
    if missing:
        return f"the folder cannot be written to, so that nothing is kept of {', '.join(missing)}"
    print(*map(library_path, parts), sep="\n")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
