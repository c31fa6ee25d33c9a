"""The operations of a decoder's step as Triton kernels: this module is an `aioengine.kernels.operations.Operations`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import triton
from triton import knobs

from aioengine.kernels.attention.choices import ATTENTION_KERNELS, Tunable
from aioengine.kernels.attention.paged_decode import attend_decode
from aioengine.kernels.attention.paged_prefill import attend_prefill, prefill_tile
from aioengine.kernels.attention.splits import choose_num_splits
from aioengine.kernels.layers.gated_activation import gated_activation
from aioengine.kernels.layers.rms_norm import add_rms_norm, rms_norm
from aioengine.kernels.layers.rotate_and_write import rotate_and_write
from aioengine.kernels.rows.append_tokens import append_tokens
from aioengine.kernels.rows.copy_blocks import copy_blocks
from aioengine.kernels.rows.gather_tokens import gather_tokens
from aioengine.kernels.rows.put_spans import put_spans
from aioengine.kernels.sampling.bad_words import ends_of_bad_words
from aioengine.kernels.sampling.draw import draw
from aioengine.kernels.sampling.edits import edit_logits
from aioengine.kernels.sampling.look_up import look_up
from aioengine.kernels.sampling.penalties import penalise
from aioengine.kernels.sampling.top_logprobs import top_logprobs
from aioengine.kernels.specimen import Specimen

__all__ = [
    "TUNABLE",
    "add_rms_norm",
    "append_tokens",
    "attend_decode",
    "attend_prefill",
    "choose_num_splits",
    "copy_blocks",
    "draw",
    "edit_logits",
    "ends_of_bad_words",
    "gated_activation",
    "gather_tokens",
    "look_up",
    "penalise",
    "prefill_tile",
    "put_spans",
    "rms_norm",
    "rotate_and_write",
    "specimens",
    "top_logprobs",
]

TUNABLE = Tunable(kernels=ATTENTION_KERNELS, compiler=triton.__version__) if not knobs.runtime.interpret else None
"""What launches of attention are worth measuring: none in the interpreter."""

KERNEL_MODULES = (
    "rows.append_tokens",
    "sampling.bad_words",
    "rows.copy_blocks",
    "sampling.draw",
    "sampling.edits",
    "layers.gated_activation",
    "rows.gather_tokens",
    "sampling.look_up",
    "attention.paged_decode",
    "attention.paged_prefill",
    "sampling.penalties",
    "rows.put_spans",
    "layers.rms_norm",
    "layers.rotate_and_write",
    "sampling.top_logprobs",
)


def specimens() -> Iterator[Specimen]:
    """Those of all kernels."""
    # By name: several modules are called as their operations are, and here those names are the operations'.
    for module in KERNEL_MODULES:
        yield from import_module(f"aioengine.kernels.{module}").specimens()
