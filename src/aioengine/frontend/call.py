"""A caller's arguments, checked at the call and turned into a sequence: no bad value goes any further."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections import abc
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from aioengine.core.protocol import check_limits
from aioengine.errors import PromptTooLong
from aioengine.frontend.answer_format import PLAIN, AnswerOptions, AnswerPlan, template_variables, with_constraint
from aioengine.frontend.call_options import CallOptions
from aioengine.frontend.runtime import Runtime
from aioengine.sampling_params import NO_SEED, SamplingParams, make_params
from aioengine.scheduler.plan import int32
from aioengine.scheduler.policy import Incoming
from aioengine.scheduler.sequence import Sequence, make_choices, make_copier
from aioengine.text.chat_input import (
    REASONING_FIELDS,
    content_chars,
    copy_messages,
    open_messages,
    take_template_kwargs,
)
from aioengine.validation import invalid, shorten, typed

MADE_FIELDS = (
    *("prompt_token_ids", "params", "seed", "max_total_tokens", "bad_words", "thinking"),
    *("traceparent", "tracestate"),
)
"""Fields of a request that are made, and no options."""

_copy_options: Callable[..., Incoming] = make_copier(CallOptions, Incoming, "params", "num_prompt_tokens")


class Call:
    """The arguments of one call of `Engine.generate` or `Engine.stream`.

    Its options are checked when it is made. `check` needs the started engine, and gives it a prompt of its own and the
    model's defaults; `prepare` makes a sequence of it.

    Args:
        kind: the class of its options.
        given: its keywords: options, and sampling parameters.
        seeds: source of the seed of a request without one; None: a random one.
    Attributes:
        params: the sampling parameters.
    Raises:
        InvalidRequest: an option is bad.
    """

    prompt: Prompt
    params: SamplingParams
    _variables: dict[str, Any]
    """For the chat template, with the tools."""

    def __init__(
        self,
        kind: type[CallOptions],
        prompt: Any,
        params: SamplingParams | None,
        given: Mapping[str, Any],
        seeds: random.Random | None = None,
    ) -> None:
        named = {name: value for name, value in given.items() if name in kind.__struct_fields__}
        self._sampling = {name: value for name, value in given.items() if name not in named}
        self._given_params = params
        self._given_prompt, named["cache_salt"] = open_prompt(prompt, named.get("cache_salt"))
        self.options = options = kind(**named)
        self._answer = AnswerOptions.of(options.tools, options.tool_choice, options.parallel_tool_calls)
        self._given_variables = options.chat_template_kwargs
        self._seed: int | None = None
        asked = getattr(params, "seed", None), self._sampling.get("seed")
        if seeds is not None and all(seed in (None, NO_SEED) for seed in asked):
            self._seed = seeds.getrandbits(56)
        self.is_checked = False

    def keep_arguments(self) -> None:
        """Copy what the caller may change before `check`."""
        self._given_prompt = keep_prompt(self._given_prompt)
        if isinstance(self._given_variables, dict):
            self._given_variables = dict(self._given_variables)

    def check(self, runtime: Runtime) -> None:
        """Check it against the engine's limits, the model's vocabulary and its tokenizer, once.

        Raises:
            InvalidRequest, PromptTooLong: a value, which the error names, does not fit; or this model cannot take the
                prompt.
        """
        if self.is_checked:
            return
        options, params = self.options, make_params(self._given_params, runtime.sampling_defaults, self._sampling)
        if self._seed is not None:
            params = msgspec.structs.replace(params, seed=self._seed)
        check_limits(params, runtime.config, runtime.info.vocab_size, runtime.core.eos_token_ids)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and runtime.tokenizer is None:
                raise invalid(name, f"{name} needs a tokenizer, and this model has none")
        prompt = take_prompt(runtime, self._given_prompt, params)
        if options.chat_template is not None and not is_chat(prompt):
            raise invalid("chat_template", "chat_template is for the messages of a chat, and this prompt is none")
        runtime.answer_formats.check(self._answer, params, is_chat=is_chat(prompt))
        given = self._given_variables
        if options.reasoning_effort is not None and isinstance(given, Mapping | None):
            template = options.chat_template or (runtime.tokenizer and runtime.tokenizer.chat_template) or ""
            given = {**template_variables(options.reasoning_effort, template), **(given or {})}
        self._variables = take_template_kwargs(given, is_chat=is_chat(prompt))
        if self._answer.tools:
            self._variables["tools"] = list(self._answer.described)
        self.prompt, self.params = prompt, params
        self._given_prompt = self._given_params = self._given_variables = None
        self._sampling.clear()
        self.is_checked = True

    @property
    def operation(self) -> str:
        """The operation, as gen_ai's semantic conventions name it."""
        return "chat" if is_chat(self.prompt) else "text_completion"

    @property
    def num_chars(self) -> int | None:
        """Number of characters to tokenize; None for chats, whose templates may take long over little."""
        if is_chat(self.prompt):
            return None
        return len(self.prompt) + 2 * sum(map(len, self.params.bad_words))  # each word is encoded in two forms

    @property
    def incoming(self) -> Incoming:
        """The properties by which the policy orders it before it is tokenized."""
        if isinstance(self.prompt, str):
            num_tokens = 1 + len(self.prompt) // CHARS_A_TOKEN
        elif not is_chat(self.prompt):
            num_tokens = len(self.prompt)
        else:
            contents = (message.get("content") for message in self.prompt if isinstance(message, dict))
            num_tokens = 1 + sum(map(content_chars, contents)) // CHARS_A_TOKEN
        return _copy_options(self.options, params=self.params, num_prompt_tokens=num_tokens)

    def prepare(self, runtime: Runtime, trace: Mapping[str, Any]) -> tuple[str | None, Sequence, AnswerPlan]:
        """Turn it into a sequence; pure and thread-safe, so that long prompts are prepared off the loop.

        Args:
            trace: fields of the request that name the caller's span.
        Returns:
            (the text that was tokenized, or None for token ids; the sequence; how the answer is read and constrained).
        """
        params, variables, plan = self.params, self._variables, PLAIN
        text, ids = tokenize_prompt(runtime, self.prompt, params, self.options, variables)
        if text is not None and is_chat(self.prompt):
            continued = continued_text(self.prompt[-1], variables.get("continue_final_message"))
            plan = runtime.answer_formats.plan(self._answer, params, text, continued)
        limit = runtime.info.max_model_len - 1  # room for one output token
        if len(ids) > limit:
            raise PromptTooLong(len(ids), limit)
        token_ids = np.array(ids, dtype=np.int32)
        token_ids.flags.writeable = False
        room = limit + 1 - len(ids)
        request = make_copier(type(self.options), self.options.request_type, *MADE_FIELDS)(
            self.options,
            prompt_token_ids=token_ids,
            params=with_constraint(params, plan),
            seed=int.from_bytes(os.urandom(7)) if params.seed is None else params.seed,
            max_total_tokens=len(ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
            bad_words=runtime.require_tokenizer().encode_bad_words(params.bad_words) if params.bad_words else (),
            thinking=plan.thinking,
            traceparent=trace.get("traceparent", ""),
            tracestate=trace.get("tracestate", ""),
        )
        return text, runtime.core.make_sequence(request), plan

    def unprepared(self) -> tuple[str | None, Sequence]:
        """Make the sequence of a request that was aborted before `prepare`: it has not even token ids of a text."""
        ids = self.prompt if isinstance(self.prompt, list) and not is_chat(self.prompt) else []
        request = self.options.request_type(
            request_id=self.options.request_id,
            prompt_token_ids=int32(ids),
            params=self.params,
            seed=0,
            max_total_tokens=len(ids) + 1,
        )
        return self.prompt if isinstance(self.prompt, str) else None, make_choices(request)


def make_id() -> str:
    return f"req-{os.urandom(8).hex()}"


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

MAX_NORMALIZED_CHARS = 4
"""Most characters that a normalizer merges into one: no composition of Unicode takes more."""


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


def take_prompt(runtime: Runtime, prompt: Any, params: SamplingParams) -> Prompt:
    """A prompt as a text, a list of token ids or a list of messages, copied: the caller may change its own later.

    Raises:
        InvalidRequest, PromptTooLong: it is none of these, or nothing for this model.
    """
    max_ids = runtime.info.max_model_len - 1
    prompt = _as_list(prompt, max_ids, params.num_prompt_tokens(runtime.info.max_model_len))
    if not isinstance(prompt, str | list):
        raise invalid("prompt", f"prompt is {typed(prompt)}; give a str, a list of token ids, or a list of messages")
    if not prompt:
        raise invalid("prompt", "the prompt is empty; give at least one character, token id or message")
    if isinstance(prompt, list) and not is_chat(prompt):
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


def continued_text(message: Any, field: bool | str | None) -> str | None:
    """The text that an answer continues: a message's content, or its field of this name; None: the answer is new."""
    if not field:
        return None
    names = REASONING_FIELDS if field in REASONING_FIELDS else ("content",)
    return next((message[name] for name in names if isinstance(message.get(name), str)), None)


def tokenize_prompt(
    runtime: Runtime, prompt: Prompt, params: SamplingParams, options: CallOptions, variables: dict[str, Any]
) -> tuple[str | None, list[int]]:
    """The text of a prompt, rendered if it is a chat, and its token ids; for token ids there is no text.

    Args:
        variables: for the chat template, with the tools.
    Raises:
        InvalidRequest, PromptTooLong: it has no tokens, or more than the model takes.
    """
    if isinstance(prompt, list) and not isinstance(prompt[0], dict):
        return None, prompt  # checked at the call
    limit = runtime.info.max_model_len - 1
    tokenizer = runtime.require_tokenizer()
    if isinstance(prompt, str):
        text = prompt
    else:
        text = tokenizer.render_chat(prompt, chat_template=options.chat_template, **variables)
    num_kept = params.num_prompt_tokens(runtime.info.max_model_len)
    if runtime.longest_token_chars is not None and num_kept is None:
        at_least = len(text) // (MAX_NORMALIZED_CHARS * runtime.longest_token_chars)
        if at_least > limit:  # megabytes that cannot fit are refused before they are tokenized
            raise PromptTooLong(at_least, limit, is_lower_bound=True)
    if isinstance(prompt, str):
        ids = tokenizer.encode(text, add_special_tokens=options.add_special_tokens is not False)
    else:
        ids = tokenizer.encode_chat(text, add_special_tokens=options.add_special_tokens)
    if num_kept is not None:
        ids = ids[-num_kept:]
    if not ids:
        raise invalid("prompt", "the prompt has no tokens; give at least one character or id")
    return text, _check_ids(ids, limit, runtime.info.vocab_size)


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt that was taken is a list of messages."""
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
