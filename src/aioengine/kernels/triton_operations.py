"""The operations of a decoder's step as Triton kernels: this module is an `aioengine.kernels.operations.Operations`.

The imports are the table of them.
"""

from __future__ import annotations

import triton
from triton import knobs

from aioengine.kernels.attention.paged_decode import attend_decode
from aioengine.kernels.attention.paged_prefill import attend_prefill, prefill_tile
from aioengine.kernels.layers.coded_linear import linear, pack
from aioengine.kernels.layers.experts import experts
from aioengine.kernels.layers.gated_activation import gated_activation
from aioengine.kernels.layers.rms_norm import add_rms_norm, rms_norm, rms_norm_add
from aioengine.kernels.layers.rotate_and_write import rotate_and_write
from aioengine.kernels.layers.route import route
from aioengine.kernels.layers.scale import scale
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
from aioengine.kernels.torch.attention import attention_output
from aioengine.kernels.torch.layers import rows_of_tokens
from aioengine.kernels.torch.products import embed, unpack, unpack_codes

IS_TUNABLE = not knobs.runtime.interpret
"""Whether it matters how attention is launched: in the interpreter it does not."""
