"""What clients send, in the OpenAI API's names and vLLM's further ones, decoded and checked.

Values are the engine's to check (`SamplingParams`): here are types, names, and what only this API has. A field that
would change the answer and is not supported is refused, never left out in silence.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from aioengine.server.faults import HttpFault, unknown, unsupported
from aioengine.validation import MAX_NAME_CHARS, shorten

T = TypeVar("T", bound=msgspec.Struct)

SMALL_BODY_BYTES = 2**16
"""A body up to here is decoded in a millisecond whatever is in it."""
MAX_FIELD_BYTES = 2**18
"""Of any field but prompts, messages and tokens."""
MAX_OTHER_TEXTS = 2**14
"""JSON texts in a body beside its prompts and messages."""
TEXTS_A_MESSAGE = 64
MAX_TOOL_BYTES = 2**20
MAX_TOOL_VALUES = 2**14
"""Of all tool calls in a chat: a value is decoded and copied in a microsecond, and a call has about ten."""

Plain = Any
"""JSON of any kind, for a field whose value is only looked at to be refused."""


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
    best_of: Plain = None
    guided_json: Plain = None
    guided_regex: Plain = None
    guided_choice: Plain = None
    guided_grammar: Plain = None
    kv_transfer_params: Plain = None
    length_penalty: Plain = None
    logits_processors: Plain = None
    min_thinking_tokens: Plain = None
    prompt_logprobs: Plain = None
    return_token_ids: Plain = None
    return_tokens_as_token_ids: Plain = None
    structured_outputs: Plain = None
    truncate_prompt_tokens: Plain = None
    use_beam_search: Plain = None

    def sampling(self) -> dict[str, Any]:
        """The fields that were given, as keywords of `SamplingParams`."""
        return {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}

    def check(self) -> None:
        """Refuse what is not supported, and what contradicts itself.

        Raises:
            HttpFault: 400, naming the field.
        """
        for name, neutral in self.NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
                raise unsupported(name)
        if self.stream_options is not None:
            if not self.stream:
                raise _bad("stream_options", "stream_options is for streams: set stream to true, or leave it out")
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
    add_special_tokens: Plain = None
    response_format: Plain = None
    suffix: Plain = None

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16
    """The API's."""

    @property
    def is_echo_alone(self) -> bool:
        """Nothing is asked for but the prompt again, for its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise _bad("max_tokens", "max_tokens=0: at least 1 is needed, or echo, which gives the prompt back")

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
    add_special_tokens: Plain = None
    audio: Plain = None
    chat_template: Plain = None
    documents: Plain = None
    echo: Plain = None
    function_call: Plain = None
    functions: Plain = None
    metadata: Plain = None
    mm_processor_kwargs: Plain = None
    modalities: Plain = None
    moderation: Plain = None
    parallel_tool_calls: Plain = None
    prediction: Plain = None
    prompt_cache_options: Plain = None
    prompt_cache_retention: Plain = None
    reasoning_effort: Plain = None
    response_format: Plain = None
    service_tier: Plain = None
    store: Plain = None
    tool_choice: Plain = None
    tools: Plain = None
    verbosity: Plain = None
    web_search_options: Plain = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise _bad("top_logprobs", "top_logprobs needs logprobs to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _bad("max_tokens", "max_tokens is the old name of max_completion_tokens: give one of them")

    def sampling(self) -> dict[str, Any]:
        sampling = super().sampling()
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        return sampling


class TextPart(msgspec.Struct):
    """A part of a message's content. Others than texts are refused by their type."""

    type: str
    text: str | None = None


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


# Decoding


def decode(body: bytes, kind: type[T], *, max_texts: int = 0) -> T:
    """The body as a ``kind``.

    A JSON parser holds the loop, so that a large body is looked at first: how many texts it may have, and how large its
    fields are, decides what it can cost.

    Args:
        max_texts: JSON texts that a large body may have in its prompt or messages.
    Raises:
        HttpFault: 400; names the field where there is one.
    """
    if len(body) > SMALL_BODY_BYTES:
        _check_texts(body, max_texts)
        _check_fields(body, kind)
    return _decoded(body, kind)


async def decode_in_turns(body: bytes, kind: type[T], *, max_texts: int = 0) -> T:
    """As `decode`, with turns for others between its passes over a large body: each takes a millisecond a MiB."""
    if len(body) <= SMALL_BODY_BYTES:
        return _decoded(body, kind)
    await asyncio.sleep(0)
    _check_texts(body, max_texts)
    await asyncio.sleep(0)
    _check_fields(body, kind)
    await asyncio.sleep(0)
    decoded = _decoded(body, kind)
    await asyncio.sleep(0)  # its prompt is decoded next
    return decoded


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _undecodable(error, kind) from None


def _check_texts(body: bytes, max_texts: int) -> None:
    if has_more_texts(body, MAX_OTHER_TEXTS + max_texts):
        raise HttpFault(400, "the request has too many prompts, messages or other texts; send less at once")


def _check_fields(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Refuse large fields other than those that are meant to be: decoding them makes objects of all that is in them."""
    for name, value in _decoded_fields(body, kind).items():
        if name not in ("prompt", "messages", "tokens") and len(memoryview(value)) > MAX_FIELD_BYTES:
            raise _bad(name[:MAX_NAME_CHARS], f"{shorten(name)} is larger than {MAX_FIELD_BYTES:,} bytes; send less")


def _decoded_fields(body: bytes, kind: type[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _undecodable(error, kind) from None


def has_more_texts(data: bytes, limit: int) -> bool:
    """Whether `num_texts` is larger; most bodies have too few quotes for that, escaped ones and all."""
    num_quotes = data.count(b'"')
    return num_quotes > limit and num_quotes - data.count(b'\\"') > limit


def num_texts(data: bytes) -> int:
    """At most so many JSON texts are in it: each has an opening quote, and that is never escaped."""
    return data.count(b'"') - data.count(b'\\"')


_UNKNOWN = re.compile(r"unknown field `(.*?)`(?: - at `\$(.*)`)?$", re.DOTALL)
_PLACE = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")


def _undecodable(error: Exception, kind: type[msgspec.Struct]) -> HttpFault:
    """The fault of a body that is no JSON, or not of this ``kind``."""
    if not isinstance(error, msgspec.ValidationError):
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return HttpFault(400, f"the request's body is not valid JSON: {reason}", code="invalid_json")
    message = str(error)
    if (match := _UNKNOWN.search(message)) is not None:
        name, place = match.groups()
        if place is None or not place.strip("."):
            return unknown(name, _nearest(name, kind))
        return unknown(f"{place.strip('.')}.{name}", "; leave it out")
    match = _PLACE.search(message)
    place = match.group(1) if match is not None else ""
    said = message[: match.start()] if match is not None else message
    said = said[0].lower() + said[1:]
    name = re.split(r"[.\[]", place, maxsplit=1)[0]
    return HttpFault(
        400, f"{place}: {said}" if place else f"the request's body: {said}", param=name or None, code="invalid_type"
    )


def _nearest(name: str, kind: type[msgspec.Struct]) -> str:
    known = kind.__struct_fields__
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_NAME_CHARS else []
    return f"; did you mean {near[0]!r}?" if near else "; leave it out"


def _bad(name: str, message: str) -> HttpFault:
    return HttpFault(400, message, param=name, code="invalid_value")


# Prompts, messages, tokens


def read_messages(raw: msgspec.Raw, max_messages: int) -> list[dict[str, Any]]:
    """A chat's messages as the engine takes them.

    Raises:
        HttpFault: 400; says which message is wrong and how.
    """
    data = _required(raw, "messages")
    if has_more_texts(data, TEXTS_A_MESSAGE * max_messages):
        raise _too_many("messages", max_messages)
    messages = _decode_part(data, list[ChatMessage], "messages")
    if not messages:
        raise _bad("messages", "messages is empty; give at least one")
    if len(messages) > max_messages:
        raise _too_many("messages", max_messages)
    _check_tool_calls([bytes(message.tool_calls) for message in messages if is_given(message.tool_calls)])
    return [_plain_message(place, message) for place, message in enumerate(messages)]


def _check_tool_calls(calls: list[bytes]) -> None:
    """Refuse what would take long to decode and copy."""
    if sum(map(len, calls)) > MAX_TOOL_BYTES:
        raise _bad("messages", f"the messages' tool_calls have more than {MAX_TOOL_BYTES:,} bytes; send less at once")
    # Values are counted by what stands around them; arguments are texts, and full of that.
    structure = b"".join([part for call in calls for part in _without_escapes(call).split(b'"')[::2]])
    if sum(map(structure.count, (b",", b"[", b"{"))) > MAX_TOOL_VALUES:
        raise _bad("messages", f"the messages' tool_calls have more than {MAX_TOOL_VALUES:,} values; send less at once")


def _without_escapes(data: bytes) -> bytes:
    """JSON in which each quote begins or ends a text."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"")


def _plain_message(place: int, message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text":
                raise unsupported(f"messages[{place}].content", f"has a part of type {shorten(part.type)}; give texts")
            if part.text is None:
                raise _bad("messages", f"messages[{place}].content has a text part without a text")
        plain["content"] = [{"type": "text", "text": part.text} for part in message.content]
    elif message.content is not None:
        plain["content"] = message.content
    for name in ChatMessage.TEMPLATE_TEXTS:
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    for name in ChatMessage.NEUTRAL:
        if is_given(getattr(message, name)):
            raise unsupported(f"messages[{place}].{name}")
    if is_given(message.tool_calls):
        plain["tool_calls"] = _decode_part(message.tool_calls, list[dict[str, Any]], f"messages[{place}].tool_calls")
    return plain


def read_prompts(raw: msgspec.Raw, *, max_prompts: int, max_ids: int) -> list[str | list[int]]:
    """A completion's prompts: a text, token ids, or a list of either.

    Args:
        max_ids: the most token ids of one prompt; more are refused uncounted.
    Raises:
        HttpFault: 400.
    """
    data = _required(raw, "prompt")
    kind = _kind_of(data)
    if kind == "text":
        return [_decode_part(data, str, "prompt")]
    if kind == "ids":
        return [_read_ids(data, max_ids, "prompt")]
    if kind == "empty":
        raise _bad("prompt", "the prompt is empty; give at least one character or token id")
    if kind == "texts":
        if has_more_texts(data, 2 * max_prompts):
            raise _too_many("prompts", max_prompts)
        prompts: list[Any] = _decode_part(data, list[str], "prompt")
    else:
        if data.count(b"[") > max_prompts + 1:
            raise _too_many("prompts", max_prompts)
        lists = _decode_part(data, list[msgspec.Raw], "prompt")
        prompts = [_read_ids(bytes(item), max_ids, f"prompt[{place}]") for place, item in enumerate(lists)]
    if len(prompts) > max_prompts:
        raise _too_many("prompts", max_prompts)
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise _bad("prompt", f"prompt[{place}] is empty; give at least one character or token id")
    return prompts


def read_text(raw: msgspec.Raw, name: str) -> str:
    """A field that holds one text."""
    text: str = _decode_part(_required(raw, name), str, name)
    return text


def read_tokens(raw: msgspec.Raw, max_ids: int) -> list[int]:
    """A field that holds one list of token ids."""
    return _read_ids(_required(raw, "tokens"), max_ids, "tokens")


def _read_ids(data: bytes, max_ids: int, name: str) -> list[int]:
    num_ids = data.count(b",") + 1
    if num_ids > max_ids:
        # Decoding them would take 30 ns each, on the loop.
        message = f"{name} has {num_ids:,} token ids; at most {max_ids:,} are allowed (max_model_len)"
        raise HttpFault(400, message, param=re.split(r"\[", name)[0], code="context_length_exceeded")
    ids: list[int] = _decode_part(data, list[int], name)
    return ids


_KINDS: tuple[tuple[re.Pattern[bytes], Literal["text", "ids", "empty", "texts", "lists"]], ...] = (
    (re.compile(rb"\s*\""), "text"),
    (re.compile(rb"\s*\[\s*\]"), "empty"),
    (re.compile(rb"\s*\[\s*\""), "texts"),
    (re.compile(rb"\s*\[\s*\["), "lists"),
    (re.compile(rb"\s*\[\s*-?\d"), "ids"),
)


def _kind_of(data: bytes) -> Literal["text", "ids", "empty", "texts", "lists"]:
    for pattern, kind in _KINDS:
        if pattern.match(data):
            return kind
    raise HttpFault(
        400,
        "prompt: a text, a list of token ids, or a list of texts or of lists of token ids is needed",
        param="prompt",
        code="invalid_type",
    )


def _required(raw: msgspec.Raw, name: str) -> bytes:
    if not is_given(raw):
        raise HttpFault(400, f"{name} is missing", param=name, code="missing_required_parameter")
    return bytes(raw)


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field of the body is there, and not null."""
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")


def _decode_part(data: bytes, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        said = re.sub(r" - at `\$(.*)`$", r" (at \1)", str(error))
        raise HttpFault(400, f"{name}: {said}", param=re.split(r"[.\[]", name)[0], code="invalid_type") from None


def _too_many(what: str, limit: int) -> HttpFault:
    return HttpFault(400, f"more than {limit:,} {what} in one request; send fewer at once", code="invalid_value")
