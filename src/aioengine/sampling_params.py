"""How a request is sampled and when it stops."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aioengine.errors import InvalidRequest
from aioengine.validation import check_fields, check_known_fields

GREEDY_TEMPERATURE = 0.0
"""Only temperature 0 is greedy."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=name)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request asks of the sampler. The rules and names are vLLM's where the field has no others.

    A value out of range is an `InvalidRequest` that names the field, raised when the struct is made.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0, description="0 is greedy; higher is more random (0 to 2)")] = 1.0
    top_p: Annotated[
        float, Meta(gt=0.0, le=1.0, description="keep the likeliest tokens that hold this much probability")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="keep this many likeliest tokens; 0 or -1: all")] = 0
    min_p: Annotated[
        float, Meta(ge=0.0, le=1.0, description="drop tokens below this fraction of the likeliest one's probability")
    ] = 0.0
    seed: Annotated[int, Meta(description="the same seed gives the same tokens; drawn at random if absent")] | None = (
        None
    )
    max_tokens: (
        Annotated[int, Meta(ge=1, description="the most tokens to generate; absent: up to max_model_len")] | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, description="no EOS, stop token or stop string before this many tokens")] = 0
    ignore_eos: Annotated[bool, Meta(description="go on after the model's end-of-sequence token")] = False
    stop: Annotated[str | tuple[str, ...], Meta(description="strings that end the text and are not part of it")] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...], Meta(description="token ids that end the output and are its last token")
    ] = ()
    logprobs: (
        Annotated[
            int,
            Meta(
                ge=0, description="log-probabilities of each token and of this many likeliest ones, before temperature"
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        check_fields(self, _invalid)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _invalid("seed", f"seed={self.seed}: a signed 64-bit integer is needed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if any(not text for text in self.stop):
            raise _invalid("stop", "stop holds an empty string; it would end every text at once")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY_TEMPERATURE


def make_params(params: SamplingParams | None, defaults: dict[str, Any], sampling: dict[str, Any]) -> SamplingParams:
    """The parameters of a call: ``params`` as given, or ``defaults`` (the model's) overridden by keywords.

    Raises:
        InvalidRequest: both were given, a keyword is unknown, or a value is bad.
    """
    if params is None:
        check_known_fields(SamplingParams, sampling, _invalid)
        return SamplingParams(**{**defaults, **sampling})
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be a SamplingParams, not {type(params).__name__}", param="params")
    if sampling:
        names = ", ".join(sampling)
        raise InvalidRequest(f"give either params or keywords ({names}), not both", param="params")
    return params
