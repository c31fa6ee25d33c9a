"""A caller's arguments, checked at the call and turned into a sequence: no bad value goes any further."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections import abc
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from aioengine.config import MAX_TEMPLATE_CHARS
from aioengine.core.protocol import check_limits
from aioengine.errors import PromptTooLong
from aioengine.frontend.admission import OnFull
from aioengine.frontend.answer_format import PLAIN, AnswerOptions, AnswerPlan, ReasoningEffort, with_constraint
from aioengine.frontend.runtime import Runtime
from aioengine.sampling_params import SamplingKeywords, SamplingParams
from aioengine.scheduler.plan import int32
from aioengine.scheduler.policy import Incoming
from aioengine.scheduler.sequence import (
    MAX_ID_CHARS,
    MAX_PRIORITY,
    MAX_SALT_CHARS,
    MAX_SESSION_CHARS,
    MAX_TENANT_CHARS,
    MAX_TRACEPARENT_CHARS,
    MAX_TRACESTATE_CHARS,
    Request,
    Sequence,
    make_choices,
)
from aioengine.text.chat_input import (
    REASONING_FIELDS,
    content_chars,
    copy_messages,
    open_messages,
    take_template_kwargs,
)
from aioengine.validation import check_fields, invalid, is_utf8, shorten, typed


class MessageObject(Protocol):
    """A message as an object: a dataclass, or a pydantic model such as those of OpenAI's client."""

    @property
    def role(self) -> Any: ...
    @property
    def content(self) -> Any: ...


ChatMessage = Mapping[str, Any] | MessageObject
Prompt = str | list[int] | abc.Sequence[ChatMessage]
"""Text, token ids, or the messages of a chat: ``{"role": ..., "content": ...}`` each, or objects with these."""

PromptDict = Mapping[str, Any]
"""``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, vLLM's `TextPrompt` and `TokensPrompt`; see `open_prompt`."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

CHARS_A_TOKEN = 4
"""Roughly, of usual text."""

F = TypeVar("F", bound=Callable[..., Any])

MAX_NORMALIZED_CHARS = 4
"""Most characters that a normalizer merges into one: no composition of Unicode takes more."""


class ChatKeywords(SamplingKeywords, total=False):
    """The keywords that `LLM.chat` and `Engine.generate` share; the docstring of the second describes them."""

    cache_salt: str | None
    tenant: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    chat_template: str | None
    tools: Any
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning_effort: ReasoningEffort | None


class CallKeywords(ChatKeywords, total=False):
    """The keywords that `Engine.generate` and `Engine.stream` share."""

    sampling_params: SamplingParams | None
    priority: int
    session: str | None
    trace_headers: Mapping[str, str] | None
    on_full: OnFull
    add_special_tokens: bool | None


def lists_keywords(keywords: Any) -> Callable[[F], F]:
    """A decorator that adds the keywords of ``**options`` to `inspect.signature`, and so to a notebook's completion.

    Args:
        keywords: the TypedDict of ``**options``.
    """
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)
        for name, kind in keywords.__annotations__.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named, _ = signature.parameters.values()
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *listed])
        return function

    return decorate


CHAT_NAMES = ChatKeywords.__annotations__.keys() - SamplingKeywords.__annotations__.keys()
CALL_NAMES = CallKeywords.__annotations__.keys() - SamplingKeywords.__annotations__.keys()


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `Engine.stream` that are checked without a model; numpy's integers are accepted.

    Raises:
        InvalidRequest: an argument is bad, which the error names.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    on_full: OnFull = "wait"
    tenant: Annotated[str, Meta(min_length=1, max_length=MAX_TENANT_CHARS)] | None = None
    trace_headers: dict[str, str] | None = None
    """Names in lower case."""
    max_unread_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    add_special_tokens: bool | None = None
    session: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, invalid)
        for name in ("request_id", "cache_salt", "chat_template", "tenant", "session"):
            if not is_utf8(getattr(self, name) or ""):
                raise invalid(name, f"{name} has a lone surrogate, which has no UTF-8 form; remove it")


class Checked(NamedTuple):
    """A call's other arguments, checked against the model."""

    prompt: Prompt
    params: SamplingParams
    template_kwargs: dict[str, Any]
    options: AnswerOptions


class Prepared(NamedTuple):
    """A request on its way to the core.

    Attributes:
        text: the text that was tokenized; None for token ids.
        plan: how the answer is read and constrained.
    """

    text: str | None
    sequence: Sequence
    plan: AnswerPlan


# At the call


def open_prompt(prompt: Any, cache_salt: str | None) -> tuple[Any, str | None]:
    """The prompt and the salt in a `PromptDict`; other prompts are unchanged, but message objects become dicts.

    Keys with the value None count as absent, and so do unknown keys with an empty value (``multi_modal_data``). Token
    ids win over their text. A salt of the call wins over the dict's.

    Raises:
        InvalidRequest: the dict has neither text nor token ids, or has unknown keys.
    """
    if not isinstance(prompt, dict):
        return open_messages(prompt), cache_salt
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = [
        key
        for key, value in given.items()
        if key not in PROMPT_KEYS and (value or not isinstance(value, dict | list | tuple))
    ]
    if "role" in unknown:
        raise invalid("prompt", "prompt is one message; a chat is a list of messages, also of a single one")
    if unknown:
        names = ", ".join(sorted(map(shorten, unknown)))
        raise invalid("prompt", f"prompt has {names}; a prompt dict takes {', '.join(PROMPT_KEYS)}")
    salt = cache_salt if cache_salt is not None else given.get("cache_salt")
    for key in ("prompt_token_ids", "prompt"):
        if key in given:
            return given[key], salt
    raise invalid("prompt", "a prompt dict needs a prompt (text) or prompt_token_ids (a list of ints)")


def check_request(
    runtime: Runtime, call: Call, prompt: Any, params: SamplingParams, template_kwargs: Any, options: AnswerOptions
) -> Checked:
    """Check a request against the engine's limits, the model's vocabulary and its tokenizer.

    The prompt and the template's variables are copied: the caller may change its own while the request waits.

    Raises:
        InvalidRequest, PromptTooLong: a value, which the error names, does not fit; or this model cannot take the
            prompt.
    """
    check_limits(params, runtime.config, runtime.info.vocab_size, runtime.core.eos_token_ids)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and runtime.tokenizer is None:
            raise invalid(name, f"{name} needs a tokenizer, and this model has none")
    taken = _take_prompt(runtime, prompt, params)
    is_chat = _is_chat(taken)
    if call.chat_template is not None and not is_chat:
        raise invalid("chat_template", "chat_template is for the messages of a chat, and this prompt is none")
    runtime.answer_formats.check(options, params, is_chat=is_chat)
    return Checked(taken, params, take_template_kwargs(template_kwargs, is_chat=is_chat), options)


def _take_prompt(runtime: Runtime, prompt: Any, params: SamplingParams) -> Prompt:
    max_ids = runtime.info.max_model_len - 1
    prompt = _as_list(prompt, max_ids, params.num_prompt_tokens(runtime.info.max_model_len))
    if not isinstance(prompt, str | list):
        raise invalid("prompt", f"prompt is {typed(prompt)}; give a str, a list of token ids, or a list of messages")
    if not prompt:
        raise invalid("prompt", "the prompt is empty; give at least one character, token id or message")
    if isinstance(prompt, list) and not _is_chat(prompt):
        return _check_ids(prompt, max_ids, runtime.info.vocab_size)
    runtime.require_tokenizer()
    taken: Prompt = prompt if isinstance(prompt, str) else copy_messages(prompt)
    return taken


def keep_prompt(prompt: Any) -> Any:
    """A copy of a prompt that is checked later, if it is a list, messages, an array or a tensor."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
        return copy_messages(prompt)
    copy = getattr(prompt, "clone", None) or getattr(prompt, "copy", None)
    try:
        return copy() if callable(copy) else prompt
    except Exception:  # an object that cannot be copied cannot be read, either: its check will raise
        return prompt


def operation_of(prompt: Prompt) -> str:
    """The prompt's operation, as gen_ai's semantic conventions name it."""
    return "chat" if _is_chat(prompt) else "text_completion"


def make_id() -> str:
    return f"req-{os.urandom(8).hex()}"


def num_chars(prompt: Prompt, params: SamplingParams) -> int | None:
    """Number of characters to tokenize; None for chats, whose templates are programs that may take long over little."""
    if _is_chat(prompt):
        return None
    return len(prompt) + 2 * sum(len(word) for word in params.bad_words)  # each word is encoded in two forms


def incoming_of(call: Call, checked: Checked) -> Incoming:
    """The properties by which the policy orders a request before it is tokenized."""
    return Incoming(
        request_id=call.request_id,
        tenant=call.tenant or "",
        priority=call.priority,
        cache_salt=call.cache_salt or "",
        num_prompt_tokens=_guess_num_tokens(checked.prompt),
        params=checked.params,
    )


def _guess_num_tokens(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return 1 + len(prompt) // CHARS_A_TOKEN
    if not _is_chat(prompt):
        return len(prompt)
    contents = (message.get("content") for message in prompt if isinstance(message, dict))
    return 1 + sum(map(content_chars, contents)) // CHARS_A_TOKEN


# On the way to the core


def prepare(runtime: Runtime, call: Call, checked: Checked) -> Prepared:
    """Turn a prompt into a sequence; pure and thread-safe, so that long prompts are prepared off the loop."""
    text, ids = _tokenize(runtime, call, checked)
    plan = PLAIN
    if text is not None and _is_chat(checked.prompt):
        continued = _continued(checked.prompt[-1], checked.template_kwargs.get("continue_final_message"))
        plan = runtime.answer_formats.plan(checked.options, checked.params, text, continued)
    params = with_constraint(checked.params, plan)
    limit = runtime.info.max_model_len - 1  # room for one output token
    if len(ids) > limit:
        raise PromptTooLong(len(ids), limit)
    token_ids = np.array(ids, dtype=np.int32)
    token_ids.flags.writeable = False
    room = limit + 1 - len(ids)
    request = Request(
        request_id=call.request_id,
        prompt_token_ids=token_ids,
        params=params,
        seed=int.from_bytes(os.urandom(7)) if params.seed is None else params.seed,
        max_total_tokens=len(ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
        bad_words=runtime.require_tokenizer().encode_bad_words(params.bad_words) if params.bad_words else (),
        priority=call.priority,
        cache_salt=call.cache_salt or "",
        thinking=plan.thinking,
        tenant=call.tenant or "",
        traceparent=_header_of(call, "traceparent", MAX_TRACEPARENT_CHARS),
        tracestate=_header_of(call, "tracestate", MAX_TRACESTATE_CHARS),
        session=call.session or "",
    )
    return Prepared(text, runtime.core.make_sequence(request), plan)


def _header_of(call: Call, name: str, max_chars: int) -> str:
    """A header of the caller's span; empty if there is none, or one that is too long for a span's."""
    header = (call.trace_headers or {}).get(name, "")
    return header if len(header) <= max_chars else ""


def _continued(message: Any, field: bool | str | None) -> str | None:
    """The text that an answer continues: a message's content, or its field of this name; None: the answer is new."""
    if not field:
        return None
    names = REASONING_FIELDS if field in REASONING_FIELDS else ("content",)
    return next((message[name] for name in names if isinstance(message.get(name), str)), None)


def unprepared(call: Call, checked: Checked) -> tuple[str | None, Sequence]:
    """Make the sequence of a request that was aborted before `prepare`: nothing is computed, not even its token ids."""
    ids = checked.prompt if isinstance(checked.prompt, list) and not _is_chat(checked.prompt) else []
    request = Request(
        request_id=call.request_id,
        prompt_token_ids=int32(ids),
        params=checked.params,
        seed=0,
        max_total_tokens=len(ids) + 1,
    )
    text = checked.prompt if isinstance(checked.prompt, str) else None
    return text, make_choices(request)


def _tokenize(runtime: Runtime, call: Call, checked: Checked) -> tuple[str | None, list[int]]:
    prompt, variables = checked.prompt, checked.template_kwargs
    if checked.options.told:
        variables = {**variables, "tools": list(checked.options.told)}
    limit = runtime.info.max_model_len - 1
    if isinstance(prompt, list) and not isinstance(prompt[0], dict):
        return None, prompt  # checked at the call
    tokenizer = runtime.require_tokenizer()
    if isinstance(prompt, str):
        text = prompt
    else:
        text = tokenizer.render_chat(prompt, chat_template=call.chat_template, **variables)
    num_kept = checked.params.num_prompt_tokens(runtime.info.max_model_len)
    if runtime.longest_token_chars is not None and num_kept is None:
        at_least = len(text) // (MAX_NORMALIZED_CHARS * runtime.longest_token_chars)
        if at_least > limit:  # megabytes that cannot fit are refused before they are tokenized
            raise PromptTooLong(at_least, limit, is_lower_bound=True)
    if isinstance(prompt, str):
        ids = tokenizer.encode(text, add_special_tokens=call.add_special_tokens is not False)
    else:
        ids = tokenizer.encode_chat(text, add_special_tokens=call.add_special_tokens)
    if num_kept is not None:
        ids = ids[-num_kept:]
    if not ids:
        raise invalid("prompt", "the prompt has no tokens; give at least one character or id")
    return text, _check_ids(ids, limit, runtime.info.vocab_size)


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def _check_ids(prompt: list[Any], limit: int, vocab_size: int) -> list[int]:
    """The token ids, checked, as a new list."""
    if len(prompt) > limit:
        raise PromptTooLong(len(prompt), limit)
    with contextlib.suppress(msgspec.ValidationError):  # the usual case, ten times as fast
        checked: list[int] = msgspec.convert(prompt, _ids_below(vocab_size), strict=True)
        return checked
    try:
        plain = [token_id.item() if isinstance(token_id, np.integer) else token_id for token_id in prompt]
        ids = msgspec.convert(plain, list[int], strict=True)
    except msgspec.ValidationError as exc:
        is_several = isinstance(prompt[0], str | list)
        why = "a call has one: asyncio.gather several, or give them to LLM.generate" if is_several else str(exc)
        raise invalid("prompt", f"prompt: a list holds token ids (int) or messages (dict): {why}") from None
    worst = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= worst < vocab_size:
        raise invalid("prompt", f"prompt holds token id {shorten(worst)}; the model has 0 to {vocab_size - 1}")
    return ids


@functools.cache
def _ids_below(vocab_size: int) -> Any:
    """The type of a list of a model's token ids."""
    return list[Annotated[int, Meta(ge=0, lt=vocab_size)]]


def _as_list(prompt: Any, max_ids: int, num_kept: int | None) -> Any:
    """A tuple, or an array or tensor of one dimension, as a list; of token ids the last ``num_kept``.

    Raises:
        InvalidRequest, PromptTooLong: the prompt cannot be read, or is too long for the model.
    """
    if num_kept is not None and isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], dict):
        prompt = prompt[-num_kept:]
    if isinstance(prompt, tuple):
        if len(prompt) > max_ids and not isinstance(prompt[0], dict):
            raise PromptTooLong(len(prompt), max_ids)
        return list(prompt)
    if getattr(prompt, "ndim", None) != 1 or not hasattr(prompt, "tolist"):
        return prompt
    try:
        if num_kept is not None:
            prompt = prompt[-num_kept:]
        length = len(prompt)
        items = prompt.tolist() if length <= max_ids else None
    except Exception as exc:  # an array of the caller's own may raise anything, and so may a tensor without data
        raise invalid("prompt", f"prompt is {typed(prompt)} that cannot be read: {type(exc).__name__}") from None
    if length > max_ids:
        raise PromptTooLong(length, max_ids)
    return items
