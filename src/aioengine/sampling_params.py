"""How a request is sampled and when it stops."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aioengine.errors import InvalidRequest
from aioengine.validation import check_fields, check_known_fields, is_utf8, shorten

GREEDY_TEMPERATURE = 0.0
"""Only temperature 0 is greedy."""

MAX_STOP_STRINGS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_TEXT_CHARS = 1024
"""Of one stop string or bad word."""
MAX_BAD_WORDS_CHARS = 65_536
"""Of all together: they are tokenized, twice, while the request waits."""
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**20
"""More than any vocabulary has."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGITS_PROCESSORS = 64
MAX_BIAS = 100.0
MAX_INT = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=name)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one request asks of the sampler. The rules and names are vLLM's where the field has no others.

    A value out of range is an `InvalidRequest` that names the field, raised when the struct is made.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0, description="0 is greedy; higher is more random (0 to 2)")] = 1.0
    top_p: Annotated[
        float, Meta(gt=0.0, le=1.0, description="keep the likeliest tokens that hold this much probability")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT, description="keep this many likeliest tokens; 0 or -1: all")] = 0
    min_p: Annotated[
        float, Meta(ge=0.0, le=1.0, description="drop tokens below this fraction of the likeliest one's probability")
    ] = 0.0
    seed: Annotated[int, Meta(description="the same seed gives the same tokens; drawn at random if absent")] | None = (
        None
    )
    max_tokens: (
        Annotated[int, Meta(ge=1, le=MAX_INT, description="the most tokens to generate; absent: up to max_model_len")]
        | None
    ) = None
    min_tokens: Annotated[
        int, Meta(ge=0, le=MAX_INT, description="no EOS, stop token or stop string before this many tokens")
    ] = 0
    ignore_eos: Annotated[bool, Meta(description="go on after the model's end-of-sequence token")] = False
    stop: Annotated[
        str | Annotated[tuple[ShortText, ...], Meta(max_length=MAX_STOP_STRINGS)],
        Meta(description="strings that end the text and are not part of it"),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Meta(max_length=MAX_STOP_TOKEN_IDS, description="token ids that end the output and are its last token"),
    ] = ()
    n: Annotated[int, Meta(ge=1, le=MAX_INT, description="choices to generate for the prompt")] = 1
    presence_penalty: Annotated[
        float, Meta(ge=-2.0, le=2.0, description="taken from the logits of tokens that the output has (-2 to 2)")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2.0, le=2.0, description="the same, for each time that they are in it (-2 to 2)")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0.0, le=100.0, description="makes tokens of prompt and output less likely; 1 is off")
    ] = 1.0
    logit_bias: (
        Annotated[
            dict[TokenId, float],
            Meta(max_length=MAX_LOGIT_BIAS, description="token id → what is added to its logit, at most ±100"),
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[
            tuple[TokenId, ...],
            Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, description="the only tokens that may be generated"),
        ]
        | None
    ) = None
    bad_words: Annotated[
        str | Annotated[tuple[ShortText, ...], Meta(max_length=MAX_BAD_WORDS)],
        Meta(description="texts that must not be generated, by their tokens"),
    ] = ()
    logits_processors: Annotated[tuple[Any, ...], Meta(max_length=MAX_LOGITS_PROCESSORS)] = ()
    """Functions over logits, in this process only: see `aioengine.LogitsProcessor`."""
    logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_INT,
                description="log-probabilities of each token and of this many likeliest ones, before temperature",
            ),
        ]
        | None
    ) = None
    logprob_token_ids: (
        Annotated[
            tuple[TokenId, ...],
            Meta(max_length=MAX_LOGPROB_TOKEN_IDS, description="tokens whose log-probabilities to report always"),
        ]
        | None
    ) = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0, le=MAX_INT, description="log-probabilities of each prompt token and of this many likeliest ones"
            ),
        ]
        | None
    ) = None
    detokenize: Annotated[bool, Meta(description="make text of the tokens")] = True
    skip_special_tokens: Annotated[bool, Meta(description="leave special tokens out of the text")] = True
    spaces_between_special_tokens: Annotated[
        bool, Meta(description="where special tokens are kept: as the decoder spaces them, or joined")
    ] = True
    include_stop_str_in_output: Annotated[
        bool, Meta(description="end the text after the stop string or stop token instead of before it")
    ] = False

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                msgspec.structs.force_setattr(self, name, (getattr(self, name),))
        check_fields(self, _invalid)
        self._check_lengths()
        self._check_texts()
        for processor in self.logits_processors:
            if not callable(processor):
                raise _invalid(
                    "logits_processors", f"logits_processors holds {shorten(processor)}, which cannot be called"
                )
        if self.logit_bias:
            clamped = {token: min(max(bias, -MAX_BIAS), MAX_BIAS) for token, bias in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", clamped)

    def _check_lengths(self) -> None:
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _invalid("seed", f"seed={shorten(self.seed)}: a signed 64-bit integer is needed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")

    def _check_texts(self) -> None:
        if self.stop and not self.detokenize:
            raise _invalid("stop", "stop strings are found in text, and detokenize=False makes none")
        if any(not word.strip() for word in self.bad_words):
            raise _invalid("bad_words", "bad_words holds a text of spaces alone; it would forbid every word")
        if sum(len(word) for word in self.bad_words) > MAX_BAD_WORDS_CHARS:
            raise _invalid("bad_words", f"bad_words has more than {MAX_BAD_WORDS_CHARS} characters; give fewer words")
        for name in ("stop", "bad_words"):
            if not all(is_utf8(text) for text in getattr(self, name)):
                raise _invalid(name, f"{name} holds a lone surrogate, which has no UTF-8 form; remove it")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        """How many are computed: all greedy choices are the same one."""
        return 1 if self.is_greedy else self.n


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
