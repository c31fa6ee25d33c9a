"""A caller's arguments, checked at the call and turned into a sequence: no bad value goes any further."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from aioengine.core.protocol import check_limits
from aioengine.errors import PromptTooLong
from aioengine.frontend.answer_format import PLAIN, AnswerOptions, AnswerPlan, template_variables, with_constraint
from aioengine.frontend.call_options import CallOptions
from aioengine.frontend.prompt import (
    Prompt,
    continued_text,
    guess_num_tokens,
    is_chat,
    keep_prompt,
    open_prompt,
    take_prompt,
    tokenize_prompt,
)
from aioengine.frontend.runtime import Runtime
from aioengine.sampling_params import NO_SEED, SamplingParams, make_params
from aioengine.scheduler.plan import int32
from aioengine.scheduler.policy import Incoming
from aioengine.scheduler.sequence import Sequence, make_choices, make_copier
from aioengine.text.chat_input import take_template_kwargs
from aioengine.validation import invalid

_copy_options: Callable[..., Incoming] = make_copier(CallOptions, Incoming)


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
        num_tokens = guess_num_tokens(self.prompt)
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
        request = make_copier(type(self.options), self.options.request_type)(
            self.options,
            prompt_token_ids=token_ids,
            params=with_constraint(params, plan),
            seed=int.from_bytes(os.urandom(7)) if params.seed is None else params.seed,
            max_total_tokens=len(ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
            bad_words=runtime.require_tokenizer().encode_bad_words(params.bad_words) if params.bad_words else (),
            thinking=plan.thinking,
            **trace,
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
