"""How a request is sampled and when it stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict, Unpack, get_args

import msgspec
from msgspec import Meta

from aioengine.errors import InvalidRequest
from aioengine.structured.constraints import Constraint, as_constraint, from_vllm
from aioengine.validation import check_fields, check_known_fields, field_types, invalid, is_utf8, shorten
from aioengine.vllm_names import NEUTRAL_ARGUMENTS, NEUTRAL_PARAMS, without_neutral

GREEDY_TEMPERATURE = 0.0
"""Only temperature 0 is greedy."""

MAX_STOP_STRINGS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_TEXT_CHARS = 1024
"""Limit of one stop string or bad word."""
MAX_BAD_WORDS_CHARS = 65_536
"""Limit of all bad words together: they are tokenized, twice, while the request waits."""
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**20
"""More than any vocabulary has."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGITS_PROCESSORS = 64
MAX_EXTRA_ARGS_BYTES = 65_536
"""Limit of all arguments together, in msgpack."""
MAX_BIAS = 100.0
MAX_INT = 2**31 - 1
NO_SEED = -1
"""The same as no seed, as in vLLM."""
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
"""A row's seed is 64 bits on the device, and signed."""

TOKEN = {"role": "token"}
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT, extra=TOKEN)]
NumLikeliest = Annotated[int, Meta(ge=0, le=MAX_INT)]
ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
LogprobsMode = Literal["raw", "processed"]


class _ParamsMeta(msgspec.StructMeta):
    """Keywords that the struct has not are refused by an `InvalidRequest`, or dropped where they have no effect."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        if args:
            raise InvalidRequest(f"{self.__name__} takes keywords alone, such as temperature=0.7", param="params")
        if not _PLAIN_PARAMS.issuperset(given):
            given = _in_own_names(without_neutral(NEUTRAL_PARAMS, given, invalid))
            check_known_fields(SamplingParams, given, invalid)
        return super().__call__(**given)


def _in_own_names(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords with vLLM's names for ``structured`` and ``max_thinking_tokens`` replaced by these."""
    for name in CONSTRAINTS_OF_VLLM & given.keys():
        given = given | {"structured": from_vllm(given[name]) or given.get("structured")}
        del given[name]
    budget = given.pop("thinking_token_budget", None)
    if budget in (None, -1):
        return given
    if given.get("max_thinking_tokens") not in (None, budget):
        message = "thinking_token_budget is vLLM's name of max_thinking_tokens: give one of them"
        raise invalid("max_thinking_tokens", message)
    return given | {"max_thinking_tokens": budget}


CONSTRAINTS_OF_VLLM = {"structured_outputs", "guided_decoding"}


FILTER = {"role": "filter"}
PENALTY = {"role": "penalty"}


class RowParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that are a number of each row on the device: the one table of them.

    `SamplingParams` and a plan's `RowSampling` have these fields. The executor's columns and the words of the kernels'
    samples are made from their order and types (float: float32, int: int32); so are the fields of HTTP's bodies and the
    command line's flags. A ``FILTER`` keeps some of the tokens for a draw; a ``PENALTY`` changes the logits of tokens
    that prompt or output have. The default of both is off.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0, description="0 is greedy; higher is more random (0 to 2)")] = 1.0
    top_p: Annotated[
        float,
        Meta(gt=0.0, le=1.0, description="keep the likeliest tokens that hold this much probability", extra=FILTER),
    ] = 1.0
    top_k: Annotated[
        int, Meta(ge=-1, le=MAX_INT, description="keep this many likeliest tokens; 0 or -1: all", extra=FILTER)
    ] = 0
    min_p: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="drop tokens below this fraction of the likeliest one's probability",
            extra=FILTER,
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Meta(
            ge=-2.0, le=2.0, description="taken from the logits of tokens that the output has (-2 to 2)", extra=PENALTY
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2.0, le=2.0, description="the same, for each time that they are in it (-2 to 2)", extra=PENALTY)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Meta(gt=0.0, le=100.0, description="makes tokens of prompt and output less likely; 1 is off", extra=PENALTY),
    ] = 1.0
    """Divides a positive logit, multiplies a negative one (Keskar et al., 2019, arXiv:1909.05858)."""


def _with_role(role: dict[str, str]) -> dict[str, float]:
    """The fields of `RowParams` that have a role, with the value at which they are off."""
    fields = {field.name: field.default for field in msgspec.structs.fields(RowParams)}
    hints = field_types(RowParams)
    return {name: off for name, off in fields.items() if any(meta.extra is role for meta in hints[name].__metadata__)}


ROW_PARAMS: dict[str, type[int] | type[float]] = {
    name: hint.__origin__ for name, hint in field_types(RowParams).items()
}
"""The fields of `RowParams`, in order, with their types."""
FILTERS = _with_role(FILTER)
PENALTIES = _with_role(PENALTY)


def is_any_on(params: RowParams, values_off: Mapping[str, float]) -> bool:
    """Whether one of these `FILTERS` or `PENALTIES` is on."""
    return any(getattr(params, name) != off for name, off in values_off.items())


class SamplingParams(
    RowParams, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=_ParamsMeta
):
    """The sampling parameters of one request. The rules and names are vLLM's where the field has no others.

    A value out of range is an `InvalidRequest` that names the field, raised when the struct is made.
    """

    seed: Annotated[int | None, Meta(description="the same seed gives the same tokens; drawn if absent or -1")] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_INT)] | None,
        Meta(description="the most tokens to generate; absent: up to max_model_len"),
    ] = None
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
    logit_bias: Annotated[
        Annotated[dict[TokenId, float], Meta(max_length=MAX_LOGIT_BIAS)] | None,
        Meta(description="token id → what is added to its logit, at most ±100"),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None,
        Meta(description="the only tokens that may be generated"),
    ] = None
    bad_words: Annotated[
        str | Annotated[tuple[ShortText, ...], Meta(max_length=MAX_BAD_WORDS)],
        Meta(description="texts that must not be generated, by their tokens"),
    ] = ()
    structured: Constraint | None = None
    """The constraint on the text: a JSON schema as a dict, a type, or `Json`, `Regex`, `Choice`, `Grammar`,
    `StructuralTags`."""
    max_thinking_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT)] | None,
        Meta(description="the most tokens of reasoning before the answer, where the model's format is known"),
    ] = None
    logits_processors: Annotated[tuple[Any, ...], Meta(max_length=MAX_LOGITS_PROCESSORS)] = ()
    """Functions over logits, in this process only: see `aioengine.LogitsProcessor`."""
    extra_args: Annotated[dict[str, Any], Meta(max_length=MAX_LOGITS_PROCESSORS)] | None = None
    """Logits processors of the engine's (`EngineConfig.logits_processors`), by name, with their arguments: a dict of
    keywords, or one argument. Plain data, which travels."""
    logprobs: Annotated[
        NumLikeliest | None,
        Meta(description="log-probabilities of each token and of this many likeliest ones"),
    ] = None
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(description="log-probabilities before rules and temperature, or those that tokens are drawn by"),
    ] = "raw"
    """Prompt tokens' are always raw. vLLM's names, "raw_logprobs" and "processed_logprobs", are the same."""
    logprob_token_ids: Annotated[
        Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None,
        Meta(description="tokens whose log-probabilities to report always"),
    ] = None
    prompt_logprobs: Annotated[
        NumLikeliest | None, Meta(description="log-probabilities of each prompt token and of this many likeliest ones")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT)] | None,
        Meta(description="take the last tokens of a longer prompt, so many; -1: as many as fit, with max_tokens"),
    ] = None
    detokenize: Annotated[bool, Meta(description="make text of the tokens")] = True
    skip_special_tokens: Annotated[bool, Meta(description="leave special tokens out of the text")] = True
    spaces_between_special_tokens: Annotated[
        bool, Meta(description="where special tokens are kept: as the decoder spaces them, or joined")
    ] = True
    include_stop_str_in_output: Annotated[
        bool, Meta(description="end the text after the stop string or stop token instead of before it")
    ] = False

    if TYPE_CHECKING:  # a list is as good as the tuple that is made of it

        def __init__(self, **fields: Unpack[SamplingKeywords]) -> None: ...

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                msgspec.structs.force_setattr(self, name, (getattr(self, name),))
        if self.structured is not None:
            msgspec.structs.force_setattr(self, "structured", as_constraint(self.structured))
        if isinstance(self.logprobs_mode, str):
            msgspec.structs.force_setattr(self, "logprobs_mode", self.logprobs_mode.removesuffix("_logprobs"))
        check_fields(self, invalid)
        if self.seed == NO_SEED:
            msgspec.structs.force_setattr(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens=0 leaves no prompt; give 1 or more, or -1")
        self._check_texts()
        for processor in self.logits_processors:
            if not callable(processor):
                raise invalid(
                    "logits_processors", f"logits_processors holds {shorten(processor)}, which cannot be called"
                )
        if self.extra_args:
            msgspec.structs.force_setattr(self, "extra_args", _plain(self.extra_args))
        if self.logit_bias:
            clamped = {token: min(max(bias, -MAX_BIAS), MAX_BIAS) for token, bias in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", clamped)

    def _check_texts(self) -> None:
        if self.stop and not self.detokenize:
            raise invalid("stop", "stop strings are found in text, and detokenize=False makes none")
        if any(not word.strip() for word in self.bad_words):
            raise invalid("bad_words", "bad_words holds a text of spaces alone; it would forbid every word")
        if sum(len(word) for word in self.bad_words) > MAX_BAD_WORDS_CHARS:
            raise invalid("bad_words", f"bad_words has more than {MAX_BAD_WORDS_CHARS} characters; give fewer words")
        for name in ("stop", "bad_words"):
            if not all(is_utf8(text) for text in getattr(self, name)):
                raise invalid(name, f"{name} holds a lone surrogate, which has no UTF-8 form; remove it")

    def clone(self, **changes: Unpack[SamplingKeywords]) -> Self:
        """A copy with other values in these fields.

        Raises:
            InvalidRequest: a value is bad.
        """
        return type(self)(**{**msgspec.structs.asdict(self), **changes})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY_TEMPERATURE

    def num_prompt_tokens(self, max_model_len: int) -> int | None:
        """The most tokens that are kept of a prompt, its last ones; None: all."""
        if self.truncate_prompt_tokens == -1:
            return max(1, max_model_len - (self.max_tokens or 1))
        return self.truncate_prompt_tokens

    @property
    def num_sequences(self) -> int:
        """How many sequences are computed: all greedy choices are one."""
        return 1 if self.is_greedy else self.n


def _holds_token_ids(hint: Any) -> bool:
    return hint == TokenId or any(map(_holds_token_ids, get_args(hint)))


TOKEN_FIELDS = tuple(name for name, hint in field_types(SamplingParams).items() if _holds_token_ids(hint))
"""The fields that hold token ids: an engine checks them against its model's vocabulary."""


def _plain(extra_args: dict[str, Any]) -> dict[str, Any]:
    """A copy, as another process would have it."""
    try:
        encoded = msgspec.msgpack.encode(extra_args)
        copy: dict[str, Any] = msgspec.msgpack.decode(encoded)
    except Exception as error:  # a class of the caller's own may raise anything
        raise invalid("extra_args", f"extra_args takes plain data, such as numbers, texts and lists: {error}") from None
    if len(encoded) > MAX_EXTRA_ARGS_BYTES:
        raise invalid("extra_args", f"extra_args has {len(encoded)} bytes; at most {MAX_EXTRA_ARGS_BYTES} are possible")
    return copy


_PLAIN_PARAMS = frozenset(SamplingParams.__struct_fields__) - NEUTRAL_PARAMS.keys()
"""Fields that `without_neutral` need not look at."""


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams`, for type checkers, as keywords of a call; a test holds the two together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: str | list[str] | tuple[str, ...] | None
    stop_token_ids: list[int] | tuple[int, ...] | None
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | tuple[int, ...] | None
    bad_words: str | list[str] | tuple[str, ...] | None
    structured: Any
    max_thinking_tokens: int | None
    logits_processors: list[Any] | tuple[Any, ...] | None
    extra_args: dict[str, Any] | None
    logprobs: int | None
    logprobs_mode: LogprobsMode
    logprob_token_ids: list[int] | tuple[int, ...] | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool


def one_params(params: SamplingParams | None, sampling_params: SamplingParams | None) -> SamplingParams | None:
    """The parameters that a call was given under either name; the second is vLLM's.

    Raises:
        InvalidRequest: both were given.
    """
    if params is not None and sampling_params is not None:
        raise InvalidRequest("params and sampling_params are two names of one argument: give one", param="params")
    return sampling_params if params is None else params


def make_params(params: SamplingParams | None, defaults: dict[str, Any], sampling: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a call: ``params`` as given, or ``defaults`` (the model's) overridden by keywords.

    Raises:
        InvalidRequest: both were given, a keyword is unknown, or a value is bad.
    """
    if not _PLAIN_PARAMS.issuperset(sampling):
        sampling = _in_own_names(without_neutral(NEUTRAL_ARGUMENTS | NEUTRAL_PARAMS, sampling, invalid))
        check_known_fields(SamplingParams, sampling, invalid)
    if params is None:
        return SamplingParams(**{**defaults, **sampling})
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be a SamplingParams, not {type(params).__name__}", param="params")
    if sampling:
        names = ", ".join(sampling)
        raise InvalidRequest(f"give either params or keywords ({names}), not both", param="params")
    return params
