"""The operations of a decoder's step in plain torch: this module is an `aioengine.kernels.operations.Operations`.

The imports are the table of them.
"""

from __future__ import annotations

from aioengine.kernels.torch.attention import attend_decode, attend_prefill, attention_output, prefill_tile
from aioengine.kernels.torch.experts import experts, route
from aioengine.kernels.torch.layers import (
    add_rms_norm,
    append_tokens,
    copy_blocks,
    gated_activation,
    gather_tokens,
    put_spans,
    rms_norm,
    rms_norm_add,
    rotate_and_write,
    rows_of_tokens,
    scale,
)
from aioengine.kernels.torch.products import embed, linear, pack, unpack, unpack_codes
from aioengine.kernels.torch.rules import edit_logits, ends_of_bad_words, look_up, penalise, top_logprobs
from aioengine.kernels.torch.sampling import draw
