"""The parts of a chat's answer beside content: the tools that it may call, and how the model writes its reasoning.

`AnswerOptions` are a call's checked options; `AnswerFormats` are the formats of a started engine's model;
`AnswerPlan` combines the two for one rendered prompt: how the answer's text is read, and its constraint.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, InvalidRequest, ModelLoadError
from aioengine.sampling_params import SamplingParams
from aioengine.structured.constraints import Constraint, Either, Grammar
from aioengine.structured.forced import MAX_FORCED_BYTES, longest_text
from aioengine.structured.grammar import Thinking
from aioengine.structured.json_schema import unsound_keywords
from aioengine.structured.normalize import normalized
from aioengine.structured.trials import multiplies
from aioengine.text.template_files import DEFAULT, WITH_TOOLS
from aioengine.text.tokenizer import Tokenizer
from aioengine.tool_calls.calls import AnswerParser, Tool, ToolChoice, read_tool_choice, read_tools, told_tools
from aioengine.tool_calls.formats import ToolFormat, detect_tool_format, find_tool_format
from aioengine.tool_calls.grammars import StepFormat
from aioengine.tool_calls.reasoning import (
    ReasoningFormat,
    ReasoningParser,
    detect_reasoning_format,
    find_reasoning_format,
)
from aioengine.validation import invalid

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NEARER_EFFORTS = {"minimal": "low", "max": "xhigh", "xhigh": "high"}
"""Replacements of efforts that a template does not name; "low", "medium" and "high" are passed to all templates."""

HARMONY_ANSWER = "<|channel|>final<|message|>"
HARMONY_END = "<|end|><|start|>assistant"
"""The text that closes a message of gpt-oss and opens the next; its answer is the message of the final channel."""


class AnswerOptions(NamedTuple):
    """A call's options for its answer.

    Attributes:
        tools: the tools that the prompt describes.
        choice: which of them may be, or must be, called.
        is_parallel: whether one answer may have several calls.
        described: the tools, in the form that the chat template gets.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    is_parallel: bool = True
    described: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> AnswerOptions:
        """Make the options from a call's arguments.

        Raises:
            InvalidRequest: an argument is wrong.
        """
        if tools is None and tool_choice is None:
            return NO_OPTIONS
        read = read_tools(tools)
        choice = read_tool_choice(tool_choice, read)
        if choice.mode == "none":
            return cls((), choice, parallel_tool_calls is not False)
        return cls(read, choice, parallel_tool_calls is not False, told_tools(tools, read))


NO_OPTIONS = AnswerOptions()


def template_variables(effort: str | None, template: str = "") -> dict[str, Any]:
    """The variables of a ``reasoning_effort``, under the names that chat templates use.

    Args:
        template: the text of the template that will read them.
    """
    if effort is None:
        return {}
    thinks = effort != "none"
    while effort in NEARER_EFFORTS and f'"{effort}"' not in template and f"'{effort}'" not in template:
        effort = NEARER_EFFORTS[effort]
    return {"enable_thinking": thinks, "thinking": thinks, **({"reasoning_effort": effort} if thinks else {})}


class AnswerFormats:
    """The formats in which the model of a started engine writes calls and reasoning.

    Args:
        tokenizer: None: there are no chats.
    Raises:
        ConfigError: the config names a format that is not known.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        templates = tokenizer.chat_templates if tokenizer is not None else {}
        template = templates.get(DEFAULT, "")
        with_tools = templates.get(WITH_TOOLS, template)
        self._tokenizer = tokenizer
        tool_name, reasoning_name = config.tool_format, config.reasoning_format
        if tool_name == "auto":
            tool_name = detect_tool_format(with_tools) or "none"
        if reasoning_name == "auto":
            reasoning_name = detect_reasoning_format(with_tools) or detect_reasoning_format(template) or "none"
        self._tools: ToolFormat | None = None if tool_name == "none" else find_tool_format(tool_name)
        self._reasoning = None if reasoning_name == "none" else find_reasoning_format(reasoning_name)

    @property
    def has_tools(self) -> bool:
        """Whether the format of the model's tool calls is known."""
        return self._tools is not None

    def check(self, options: AnswerOptions, params: SamplingParams, *, is_chat: bool) -> None:
        """Refuse options that this model does not support, or that exclude each other.

        Raises:
            InvalidRequest: the error names the option.
        """
        if options.tools and not is_chat:
            raise invalid("tools", "tools are for chats: give the prompt as a list of messages")
        if options.tools and self._tools is None:
            raise invalid(
                "tools",
                "the format in which this model writes tool calls cannot be told from its chat template: start the "
                'engine with tool_format, such as "hermes"',
            )
        if options.tools and not params.detokenize:
            raise invalid("detokenize", "tool calls are read from text, and detokenize=False makes none")
        if options.tools and self._reasoning is not None and self._reasoning.has_own_parser:
            name = self._reasoning.name
            if params.structured is not None:
                raise invalid("structured", f"in the format {name} an answer has tools or a shape: give one of them")
            if params.max_thinking_tokens is not None:
                raise invalid("max_thinking_tokens", f"in the format {name} it is for answers without tools")
        if params.max_thinking_tokens is not None and (self._reasoning is None or not is_chat):
            raise invalid(
                "max_thinking_tokens",
                "max_thinking_tokens is for chats with models whose reasoning format is known: start the engine with "
                "reasoning_format, or leave it out",
            )

    def plan(
        self, options: AnswerOptions, params: SamplingParams, prompt_text: str, continued: str | None = None
    ) -> AnswerPlan:
        """How the answer to a rendered chat is read, and its constraint. With tools, not for the event loop.

        Args:
            continued: the text of the last message, if the answer continues it.
        Raises:
            InvalidRequest: a strict tool's schema cannot be enforced.
        """
        reasoning, tools = self._reasoning, self._tools if options.tools else None
        if reasoning is None and tools is None:
            return PLAIN
        constraint = self._constraint(options, params)
        is_begun = reasoning is not None and (
            reasoning.is_begun_by_prompt(prompt_text)
            if continued is None
            else reasoning.is_begun_by_message(prompt_text, continued)
        )
        thinking = None
        may_think = is_begun or continued is None
        if reasoning is not None and may_think and (constraint is not None or params.max_thinking_tokens is not None):
            must_begin = constraint is not None and not is_begun
            if tools is None or not reasoning.has_own_parser:  # else the grammar of calls admits reasoning before them
                thinking = self._thinking(reasoning, prompt_text, params, is_begun=is_begun, must_begin=must_begin)
        keeps = tools is not None and self._keeps(tools.keeps_special_tokens)
        if reasoning is not None:
            keeps = keeps or self._keeps(reasoning.keeps_special_tokens or (reasoning.begin, reasoning.end))

        def tools_parser(*, is_strict: bool) -> AnswerParser | None:
            if tools is None:
                return None
            make = getattr(tools, "make_strict_parser", tools.make_parser) if is_strict else tools.make_parser
            parser: AnswerParser = make(options.tools, make_call_id)
            return parser

        def make_parser() -> AnswerParser:
            # Text that a grammar admits must not be read as a call that the grammar would refuse.
            inner = tools_parser(is_strict=constraint is not None)
            if reasoning is None:
                assert inner is not None
                return inner
            probe = tools_parser(is_strict=True) if constraint is None else None
            max_calls = None if options.is_parallel else 1
            return ReasoningParser(reasoning, inner, is_begun, probe=probe, max_calls=max_calls)

        param: Any = (
            "tools" if isinstance(constraint, Grammar) and constraint is not params.structured else "structured"
        )
        return AnswerPlan(constraint, thinking, make_parser, keeps, param, ends_at_call=not options.is_parallel)

    def _constraint(self, options: AnswerOptions, params: SamplingParams) -> Constraint | None:
        """The constraint of the text after the reasoning."""
        if not options.tools:
            return params.structured
        assert self._tools is not None
        choice, may_be_called = options.choice, options.choice.pick(options.tools)
        is_forced = choice.mode in ("required", "tool")  # a call has no text that structured could constrain
        is_shaped = is_forced or params.structured is not None
        if not (is_shaped or choice.names is not None or any(tool.strict for tool in may_be_called)):
            return None
        # With a shape, the answer is calls, or text of that shape, and no other text.
        shape = ToolChoice("required", choice.names) if is_shaped and not is_forced else choice
        enforced = tuple(map(_enforceable, may_be_called))
        text = self._tools.grammar(enforced, shape, parallel=options.is_parallel, token_ids=self._added_tokens)
        schemas = [tool.parameters for tool in enforced]
        is_short = all(longest_text(schema) <= MAX_FORCED_BYTES and not multiplies(schema) for schema in schemas)
        calls = Grammar(text, is_short and isinstance(self._tools, StepFormat))  # no format forces text for ever
        shaped = params.structured
        if shaped is None or is_forced:
            return calls
        assert not isinstance(shaped, Either), "it is made here alone"
        return Either((calls, shaped))

    def _keeps(self, wanted: bool | tuple[str, ...]) -> bool:
        """Whether answers are decoded with special tokens, so that these markers, and any others, are in the text."""
        assert self._tokenizer is not None
        if isinstance(wanted, bool):
            return wanted
        return any(self._added_tokens.get(text) in self._tokenizer.special_tokens for text in wanted)

    @functools.cached_property
    def _added_tokens(self) -> dict[str, int]:
        assert self._tokenizer is not None
        return self._tokenizer.added_tokens

    def _thinking(
        self,
        reasoning: ReasoningFormat,
        prompt_text: str,
        params: SamplingParams,
        *,
        is_begun: bool,
        must_begin: bool,
    ) -> Thinking | None:
        max_tokens = -1 if params.max_thinking_tokens is None else params.max_thinking_tokens
        if reasoning.has_own_parser:
            end = self._ids(HARMONY_ANSWER)
            return Thinking(
                end_ids=end, forced_end_ids=(*self._ids(HARMONY_END), *end), is_begun=True, max_tokens=max_tokens
            )
        if prompt_text.rstrip().endswith(reasoning.end):
            return None  # the prompt has ended the reasoning
        if must_begin and not self._begins_by_itself:
            return None
        end = self._ids(reasoning.end)
        begin = () if is_begun else self._ids(reasoning.begin)
        gaps = tuple(ids[0] for text in ("\n", "\n\n") if len(ids := self._ids(text)) == 1)
        return Thinking(
            begin_ids=begin, end_ids=end, forced_end_ids=end, is_begun=is_begun, max_tokens=max_tokens, gap_ids=gaps
        )

    @functools.cached_property
    def _begins_by_itself(self) -> bool:
        """Whether the model writes the begin marker if the prompt has not: no model whose template can does."""
        assert self._tokenizer is not None
        assert self._reasoning is not None
        try:
            prompt = self._tokenizer.render_chat([{"role": "user", "content": "?"}], **template_variables("low"))
        except (InvalidRequest, ModelLoadError):
            return True
        return not self._reasoning.is_begun_by_prompt(prompt)

    def _ids(self, text: str) -> tuple[int, ...]:
        assert self._tokenizer is not None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _enforceable(tool: Tool) -> Tool:
    """The tool with its schema in the form that is enforced.

    Raises:
        InvalidRequest: the tool is strict, and its schema cannot be enforced.
    """
    parameters = normalized(tool.parameters)
    if tool.strict and (unsound := unsound_keywords(parameters)):
        raise invalid("tools", f"tool {tool.name!r} cannot be strict: {'; '.join(unsound)}")
    return msgspec.structs.replace(tool, parameters=parameters)


class AnswerPlan(NamedTuple):
    """How the answer to one prompt is read and constrained.

    Attributes:
        constraint: of the text after the reasoning.
        thinking: the reasoning, if it or the text after it is constrained.
        make_parser: makes the parser of one choice; None: the text is the content.
        keeps_special_tokens: whether the text has special tokens.
        param: the argument of the call from which the constraint was made.
        ends_at_call: whether the answer ends at its first complete tool call.
    """

    constraint: Constraint | None = None
    thinking: Thinking | None = None
    make_parser: Callable[[], AnswerParser] | None = None
    keeps_special_tokens: bool = False
    param: Literal["structured", "tools"] = "structured"
    ends_at_call: bool = False

    def rename_param(self, error: AioEngineError) -> AioEngineError:
        """An error of the request, with the constraint under the name that the caller used."""
        if self.param == "structured" or not isinstance(error, InvalidRequest) or error.param != "structured":
            return error
        return InvalidRequest(error.renamed(self.param), param=self.param).with_hint(error.hint)


PLAIN = AnswerPlan()


def make_call_id() -> str:
    """A random id of a tool call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def with_constraint(params: SamplingParams, plan: AnswerPlan) -> SamplingParams:
    """The sampling parameters for the core, with the plan's constraint."""
    if plan.constraint is None or plan.constraint is params.structured:
        return params
    return msgspec.structs.replace(params, structured=plan.constraint)
