"""What clients send, in the OpenAI API's names and vLLM's further ones.

Values are the engine's to check (`SamplingParams`): here are types, names, and what only this API has. A field that
would change the answer and is not supported is refused, never left out in silence.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from aioengine.server.faults import invalid_value, unsupported

MAX_NEUTRAL_BYTES = 64
"""Of a refused field's value: one that asks for nothing is short, and a long one need not be decoded."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream tells of itself."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Generation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats have in common. None is absent: the model's default, then the API's."""

    SAMPLING: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "stop", "stop_token_ids",
        "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
        "bad_words", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    )  # fmt: skip
    """Fields that the engine knows by the same name."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "kv_transfer_params": (),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "min_thinking_tokens": (),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }
    """Fields that are not supported, with the values that ask for nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    best_of: msgspec.Raw = msgspec.Raw()
    guided_json: msgspec.Raw = msgspec.Raw()
    guided_regex: msgspec.Raw = msgspec.Raw()
    guided_choice: msgspec.Raw = msgspec.Raw()
    guided_grammar: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    length_penalty: msgspec.Raw = msgspec.Raw()
    logits_processors: msgspec.Raw = msgspec.Raw()
    min_thinking_tokens: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    return_token_ids: msgspec.Raw = msgspec.Raw()
    return_tokens_as_token_ids: msgspec.Raw = msgspec.Raw()
    structured_outputs: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw()
    use_beam_search: msgspec.Raw = msgspec.Raw()

    def sampling(self) -> dict[str, Any]:
        """The fields that were given, as keywords of `SamplingParams`."""
        return {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}

    def check(self) -> None:
        """Refuse what is not supported, and what contradicts itself.

        Raises:
            HttpFault: 400, naming the field.
        """
        for name, neutral in self.NEUTRAL.items():
            raw = getattr(self, name)
            if is_given(raw) and not _is_one_of(raw, neutral):
                raise unsupported(name)
        if self.stream_options is not None:
            if not self.stream:
                raise invalid_value(
                    "stream_options", "stream_options is for streams: set stream to true, or leave it out"
                )
            if self.stream_options.include_obfuscation:
                raise unsupported("stream_options.include_obfuscation")


class CompletionRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/completions``."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Generation.NEUTRAL,
        "add_special_tokens": (True,),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
    }

    prompt: msgspec.Raw = msgspec.Raw()
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    suffix: msgspec.Raw = msgspec.Raw()

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16
    """The API's."""

    @property
    def is_echo_alone(self) -> bool:
        """Nothing is asked for but the prompt again, for its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise invalid_value(
                "max_tokens", "max_tokens=0: at least 1 is needed, or echo, which gives the prompt back"
            )

    def sampling(self) -> dict[str, Any]:
        sampling = super().sampling()
        sampling.setdefault("max_tokens", self.DEFAULT_MAX_TOKENS)
        if self.is_echo_alone:
            sampling["max_tokens"] = 1
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
            if self.echo:
                sampling["prompt_logprobs"] = self.logprobs
        return sampling


class ChatRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/chat/completions``."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Generation.NEUTRAL,
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # says nothing without tools
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: msgspec.Raw = msgspec.Raw()
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    echo: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw()
    modalities: msgspec.Raw = msgspec.Raw()
    moderation: msgspec.Raw = msgspec.Raw()
    parallel_tool_calls: msgspec.Raw = msgspec.Raw()
    prediction: msgspec.Raw = msgspec.Raw()
    prompt_cache_options: msgspec.Raw = msgspec.Raw()
    prompt_cache_retention: msgspec.Raw = msgspec.Raw()
    reasoning_effort: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    service_tier: msgspec.Raw = msgspec.Raw()
    store: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    verbosity: msgspec.Raw = msgspec.Raw()
    web_search_options: msgspec.Raw = msgspec.Raw()

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
            sampling["logprobs"] = self.top_logprobs or 0
        return sampling


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content. Others than texts are refused by their type."""

    type: str
    text: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw()
    """What some clients add for other providers: it says nothing about the text."""
    audio_url: msgspec.Raw = msgspec.Raw()
    file: msgspec.Raw = msgspec.Raw()
    image_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()
    refusal: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()

    OTHERS: ClassVar[tuple[str, ...]] = ("audio_url", "file", "image_url", "input_audio", "refusal", "video_url")
    """What parts of other types hold."""


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat, also as clients send an answer's message back.

    Of what is kept for templates, `tool_calls` are the template's business. An answer's annotations say where its text
    came from, which no template reads.
    """

    TEMPLATE_TEXTS: ClassVar[tuple[str, ...]] = ("name", "tool_call_id", "reasoning_content", "refusal")
    NEUTRAL: ClassVar[tuple[str, ...]] = ("audio", "function_call")
    """Must be null."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/tokenize``, with a prompt or with messages."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


def template_kwargs(request: ChatRequest | TokenizeRequest) -> dict[str, Any] | None:
    """What the chat template is told beside the messages."""
    given = dict(request.chat_template_kwargs or {})
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(request, name)) is not None:
            given[name] = value
    return given or None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/detokenize``."""

    tokens: msgspec.Raw
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/abort``: one id or several, as they were in ``X-Request-Id`` or in an answer's ``id``."""

    request_id: str | None = None
    request_ids: list[str] | None = None


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field of the body is there, and not null."""
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")


def _is_one_of(raw: msgspec.Raw, values: tuple[Any, ...]) -> bool:
    if len(memoryview(raw)) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # what was passed over undecoded may be no JSON
        return False
    return any(value == other and type(value) is type(other) for other in values)
