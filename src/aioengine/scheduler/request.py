"""A request as it enters the core: validated, tokenized, with nothing left to decide."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.sampling_params import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One prompt and what to do with it.

    Attributes:
        request_id: the caller's name for it; it may repeat, so nothing is looked up by it inside the core.
        prompt_token_ids: int32 [prompt tokens], at least one, below the model's vocabulary size.
        params: checked against the engine's limits.
        seed: ``params.seed``, or the one drawn for this request.
        max_total_tokens: prompt and output together; more than the prompt, at most ``max_model_len``.
        bad_words: ``params.bad_words`` as token ids.
        priority: smaller goes first, whenever it came.
        cache_salt: requests share cached prefixes only with those of the same salt.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""
