"""Bodies of requests, with the OpenAI API's names and vLLM's further ones.

The engine checks values (`SamplingParams`); types, names, and rules of this API alone are checked here. A field that
would change the answer and is not supported is refused; a field that is left out instead is logged.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from aioengine.frontend.call_options import CallOptions
from aioengine.sampling_params import ROW_PARAMS, SamplingParams
from aioengine.server.errors import ApiError, invalid_value
from aioengine.structured.constraints import Constraint, Json, from_vllm, read_structural_tag

if TYPE_CHECKING:
    Integer = int
else:
    Integer = int | float
    """An integer as JSON may write it: 2.0 is 2, as for pydantic. `Generation` makes it an int, or refuses it."""


class Body(msgspec.Struct, kw_only=True):
    """A request's body. `IgnoredFields` judges fields that are not known."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, with the values that are allowed beside null, since they ask for nothing."""
    HINTS: ClassVar[tuple[str, ...]] = ()
    """Fields that change no answer: any value is accepted, unchecked."""
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()
    """Fields that are not supported, and are left out with a warning in the log."""
    INSTEAD: ClassVar[dict[str, str]] = {}
    """Ends of the error messages of some fields that are not supported."""
    NAMES: ClassVar[dict[str, str]] = {}
    """The API's names for parameters of the engine, where they differ."""


class StreamOptions(msgspec.Struct):
    """``stream_options``: the additions to a stream's events."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """A hint: padding that hides how long tokens are; there is none."""


if TYPE_CHECKING:
    RowFields = Body
else:
    RowFields = msgspec.defstruct(
        "RowFields",
        [(name, (float if kind is float else Integer) | None, None) for name, kind in ROW_PARAMS.items()],
        bases=(Body,),
        kw_only=True,
    )
    """A body with a field for each of `aioengine.sampling_params.RowParams`."""


class Generation(RowFields, kw_only=True):
    """The fields that completions and chats share. None: absent, the model's default applies, then the API's."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys((
            "ec_transfer_params", "guided_whitespace_pattern", "kv_transfer_params", "min_thinking_tokens",
            "prompt_embeds", "repetition_detection",
        ), ()),
        **dict.fromkeys(("return_prompt_text", "use_beam_search", "watermarking"), (False,)),
        "best_of": (1,),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "media_io_kwargs": ({},),
        "options": ({},),
        "truncation_side": ("left",),
    }  # fmt: skip
    INSTEAD: ClassVar[dict[str, str]] = {
        "options": "is Ollama's: give its fields beside the prompt or messages (temperature, top_p, seed, stop), with "
        "max_tokens for num_predict and repetition_penalty for repeat_penalty; num_ctx is the server's --max-model-len",
    }
    HINTS: ClassVar[tuple[str, ...]] = (
        "guided_decoding_backend", "metadata", "prediction", "prompt_cache_options",
        "prompt_cache_retention", "return_mm_kwargs", "return_token_offsets", "routed_experts_prompt_start",
        "safety_identifier", "service_tier", "session_id", "store", "stream_interval", "user", "verbosity",
    )  # fmt: skip

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Integer | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: str | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    prompt_cache_key: str | None = None
    response_format: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    logprobs_mode: str | None = None
    max_thinking_tokens: Integer | None = None
    thinking_token_budget: Integer | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def __post_init__(self) -> None:
        for name in integer_fields(type(self)):
            value: object = getattr(self, name)
            if isinstance(value, float):
                if not value.is_integer():
                    raise ApiError(400, "invalid_type", f"{name}: expected `int`, got `float`", param=name)
                setattr(self, name, int(value))

    def has_usage(self, *, by_default: bool) -> bool:
        """Whether a stream ends with its usage."""
        asked = self.stream_options.include_usage if self.stream_options is not None else None
        return by_default if asked is None else asked

    @property
    def has_usage_all_along(self) -> bool:
        """Each event of a stream has the usage so far."""
        options = self.stream_options or StreamOptions()
        return bool(options.continuous_usage_stats) and options.include_usage is not False

    def options(self) -> dict[str, Any]:
        """The fields that were given, as options of `Engine.stream`."""
        return {name: value for name in CALL_FIELDS if (value := getattr(self, name)) is not None}

    def sampling(self) -> dict[str, Any]:
        """The fields that were given, as keywords of `SamplingParams`."""
        names = (*SAMPLING_FIELDS, "thinking_token_budget")
        sampling = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.vllm_xargs:
            sampling["extra_args"] = self.vllm_xargs
        constraint = self._constraint()
        return sampling if constraint is None else {**sampling, "structured": constraint}

    def own_names(self) -> dict[str, str]:
        """The request's names for parameters of the engine, where they differ."""
        constraints = ("response_format", "structured_outputs", *(f"guided_{name}" for name in GUIDED))
        names = {
            "structured": next((name for name in constraints if getattr(self, name) is not None), None),
            "max_thinking_tokens": "thinking_token_budget" if self.thinking_token_budget is not None else None,
        }
        return self.NAMES | {name: own for name, own in names.items() if own is not None}

    def _constraint(self) -> Constraint | None:
        """The constraint of the text, from any of its fields; several that differ are refused."""
        guided = {name: value for name in GUIDED if (value := getattr(self, f"guided_{name}")) is not None}
        given = {
            **{f"guided_{name}": from_vllm({name: value}) for name, value in guided.items()},
            "structured_outputs": from_vllm(self.structured_outputs),
            **self._own_constraint(),
        }
        names = [name for name, constraint in given.items() if constraint is not None]
        if any(given[name] != given[names[0]] for name in names):
            raise invalid_value(names[1], f"{' and '.join(names)} are several constraints: give one")
        return given[names[0]] if names else None

    def _own_constraint(self) -> dict[str, Constraint | None]:
        """The constraints of the API's own fields for it, by the fields' names."""
        return {"response_format": read_response_format(self.response_format)}

    def check(self) -> None:
        """Refuse contradictory fields."""
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs are not in streams: set stream to false, or leave them out"
            raise invalid_value("prompt_logprobs", message)
        if self.logprob_token_ids is not None and getattr(self, "logprobs", None) in (None, False):
            message = (
                "logprob_token_ids are among the log-probabilities of chats and completions: ask for logprobs, too"
            )
            raise invalid_value("logprob_token_ids", message)
        if self.stream_options is not None and not self.stream:
            message = "stream_options is for streams: set stream to true, or leave it out"
            raise invalid_value("stream_options", message)


GUIDED = ("json", "regex", "choice", "grammar")
"""The kinds of constraints of vLLM's fields ``guided_json`` and so on."""


def read_response_format(given: dict[str, Any] | None) -> Constraint | None:
    """OpenAI's ``response_format``, vLLM's further type ``structural_tag``, and the types of huggingface_hub.

    APIs put a schema in different places: in ``json_schema``, or beside the type as ``schema`` or ``value``. A schema
    with ``"strict": false`` is enforced as far as it can be; all others are enforced, or refused.
    """
    kind = given.get("type") if given is not None else "text"
    if given is None or kind == "text":
        return None
    if kind in ("json_object", "json_schema", "json"):
        wrapped = given if given.get("json_schema") is None else given["json_schema"]
        schemas = [wrapped.get(name) for name in ("schema", "value")] if isinstance(wrapped, dict) else [wrapped]
        schema = next((schema for schema in schemas if schema is not None), None)
        if schema is None and kind == "json_object":
            return Json()
        if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            wrapped, schema = schema, schema["schema"]  # TGI's value is what OpenAI's json_schema is
        if not isinstance(wrapped, dict) or not isinstance(schema, dict | bool):
            message = 'response_format needs {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            raise invalid_value("response_format", message)
        return Json(schema, lenient=wrapped.get("strict") is False)
    if kind == "regex" and isinstance(given.get("value"), str):
        return from_vllm({"regex": given["value"]})
    if kind == "structural_tag":
        return read_structural_tag(given)
    message = "response_format.type is text, json_object, json_schema, regex with a value, or structural_tag"
    raise invalid_value("response_format", message)


SAMPLING_FIELDS = tuple(name for name in Generation.__struct_fields__ if name in SamplingParams.__struct_fields__)
CALL_FIELDS = tuple(name for name in Generation.__struct_fields__ if name in CallOptions.__struct_fields__)
"""Fields that the engine knows by the same names: of sampling, and other options."""


class CompletionRequest(Generation, kw_only=True):
    """The body of ``/v1/completions``."""

    HINTS: ClassVar[tuple[str, ...]] = (*Generation.HINTS, "parallel_tool_calls", "reasoning_effort")

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {**Generation.NEUTRAL, "messages": ([],), "suffix": ("",)}
    INSTEAD: ClassVar[dict[str, str]] = {
        **Generation.INSTEAD,
        "messages": "are for /v1/chat/completions; here is /v1/completions, which needs a prompt",
    }

    prompt: msgspec.Raw = msgspec.Raw()
    echo: bool | None = None
    logprobs: Integer | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Only the prompt is asked for again, for its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens=0: at least 1 is needed, or echo, which gives the prompt back"
            raise invalid_value("max_tokens", message)
        if self.is_echo_alone and self.logprob_token_ids is not None:
            raise invalid_value("logprob_token_ids", "logprob_token_ids are of output tokens: give max_tokens")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise invalid_value("truncate_prompt_tokens", "echo gives the whole prompt back: give one of the two")

    def sampling(self) -> dict[str, Any]:
        sampling = super().sampling()
        sampling.setdefault("max_tokens", 16)  # the API's default
        if self.is_echo_alone:
            sampling["max_tokens"] = 1
        if self.logprobs is not None:
            sampling["logprobs"] = 0 if self.logprob_token_ids else self.logprobs
            if self.echo:
                sampling["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return sampling


class ChatGeneration(Generation, kw_only=True):
    """The fields that all APIs of chats share."""

    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: dict[str, Any] | str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class ChatRequest(ChatGeneration, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Generation.NEUTRAL,
        **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "prompt": ("",),
    }
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("functions",)
    NAMES: ClassVar[dict[str, str]] = {
        "prompt": "messages",
        "logprobs": "top_logprobs",
        "structured": "response_format",
    }
    INSTEAD: ClassVar[dict[str, str]] = {
        **Generation.INSTEAD,
        "function_call": "must be none or auto, or be left out: give tools and tool_choice",
        "prompt": "is for /v1/completions; here is /v1/chat/completions, which needs messages",
    }

    messages: msgspec.Raw = msgspec.Raw()
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def own_names(self) -> dict[str, str]:
        names = super().own_names()
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.chat_template_kwargs is None:
            names["chat_template_kwargs"] = "add_generation_prompt"
        return names

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs", "top_logprobs needs logprobs to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise invalid_value("max_tokens", "max_tokens is the old name of max_completion_tokens: give one of them")

    def sampling(self) -> dict[str, Any]:
        sampling = super().sampling()
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            sampling["logprobs"] = 0 if self.logprob_token_ids else self.top_logprobs or 0
        return sampling


class TextPart(msgspec.Struct, omit_defaults=True):
    """A part of a message's content. Types other than texts are refused; other fields are ignored."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[TextPart] | None = None


class ChatMessage(msgspec.Struct):
    """A message of a chat, also as clients send an answer's message back; other fields are ignored."""

    TEMPLATE_TEXTS: ClassVar[tuple[str, ...]] = ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")

    role: str
    content: str | list[str | TextPart] | msgspec.UnsetType | None = msgspec.UNSET
    name: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()


class TokenizeRequest(Body, kw_only=True):
    """The body of ``/tokenize``, with a prompt or with messages."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


@functools.cache
def integer_fields(kind: type[Body]) -> tuple[str, ...]:
    """The fields that are an `Integer`."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type == int | float | None)


@functools.cache
def known_names(kind: type[Body]) -> frozenset[str]:
    """The names of all fields that a body of this kind may have, supported or not."""
    return frozenset((*kind.__struct_fields__, *kind.NEUTRAL, *kind.HINTS, *kind.LEFT_OUT))


def template_kwargs(request: ChatRequest | TokenizeRequest) -> dict[str, Any] | None:
    """The variables of the chat template, beside the messages."""
    given = dict(request.chat_template_kwargs or {})
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(request, name)) is not None:
            given[name] = value
    return given or None


class DetokenizeRequest(Body, kw_only=True):
    """The body of ``/detokenize``."""

    tokens: msgspec.Raw
    model: str | None = None


class AbortRequest(Body, kw_only=True):
    """The body of ``/abort``: one id or several, as they were in ``X-Request-Id`` or in an answer's ``id``."""

    request_id: str | None = None
    request_ids: list[str] | None = None


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field of the body is there, and not null."""
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")
