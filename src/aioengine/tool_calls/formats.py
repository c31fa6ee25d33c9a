"""The formats by name, and the detection of a chat template's format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Protocol

from aioengine.errors import ConfigError
from aioengine.tool_calls.calls import NO_TOKENS, AnswerParser, Tool, ToolChoice
from aioengine.tool_calls.gemma4 import FUNCTION_GEMMA, GEMMA4
from aioengine.tool_calls.harmony import HARMONY
from aioengine.tool_calls.marked_json import COHERE, GRANITE, HERMES, LLAMA3_JSON, NEMOTRON, PHI4_MINI, XLAM
from aioengine.tool_calls.named_json import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL, MISTRAL_ARGS
from aioengine.tool_calls.pythonic import LFM2, OLMO3, PYTHONIC
from aioengine.tool_calls.tagged import TAGGED
from aioengine.validation import nearest, shorten

ENTRY_POINT_GROUP = "aioengine.tool_formats"
FORMAT_PARTS = ("name", "keeps_special_tokens", "make_parser", "grammar")


class ToolFormat(Protocol):
    """The format in which a family of models writes calls.

    Attributes:
        keeps_special_tokens: True: its markers are special tokens, so that an answer must be decoded with them. A
            tuple: its markers that are special in some tokenizers; with these the same holds.
    """

    name: str

    @property
    def keeps_special_tokens(self) -> bool | tuple[str, ...]: ...

    def make_parser(self, tools: Iterable[Tool], make_id: Callable[[], str]) -> AnswerParser:
        """A parser of one answer; ``make_id`` returns an id for each call."""
        ...

    def grammar(
        self, tools: Iterable[Tool], choice: ToolChoice, *, parallel: bool, token_ids: Mapping[str, int] = NO_TOKENS
    ) -> str:
        """A Lark grammar, in llguidance's dialect, of the answers that the choice admits, read by this format's parser.

        An answer is one call or more ("required"; one if not ``parallel``), one call of the tool ("tool"), or any text
        with calls in it ("auto"). Each call is of a tool that may be called, with arguments that its schema admits, in
        the schema's order. The end of the answer is the model's own end token.

        Args:
            token_ids: text -> id of the tokenizer's added tokens. A marker that is one of them is that token; any other
                marker is text.
        Raises:
            InternalError: no tool may be called.
        """
        ...


_formats: dict[str, ToolFormat] = {
    format.name: format
    for format in (  # noqa: A001
        HERMES, GRANITE, PHI4_MINI, NEMOTRON, COHERE, LLAMA3_JSON, XLAM, *TAGGED, PYTHONIC, LFM2, OLMO3,
        MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, GEMMA4, FUNCTION_GEMMA, HARMONY,
    )
}  # fmt: skip


def register_tool_format(name: str, format: ToolFormat) -> None:  # noqa: A002
    """Register a format by a name, in place of any other of that name.

    Raises:
        ConfigError: it is no `ToolFormat`.
    """
    if missing := [part for part in FORMAT_PARTS if not hasattr(format, part)]:
        raise ConfigError(f"{shorten(format)} is no tool format: it has no {', '.join(missing)} (aioengine.ToolFormat)")
    _formats[name] = format


def find_tool_format(name: str) -> ToolFormat:
    """Find a format that is built in, registered, or an entry point of the group ``aioengine.tool_formats``.

    Raises:
        ConfigError: there is none of that name, or it is no `ToolFormat`.
    """
    if name not in _formats:
        for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
            register_tool_format(name, entry_point.load())
    if name not in _formats:
        raise ConfigError(f"no tool format is called {shorten(name)}{nearest(name, _formats)}; known: {known_names()}")
    return _formats[name]


def known_names() -> str:
    return ", ".join(sorted({*_formats, *entry_points(group=ENTRY_POINT_GROUP).names}))


def detect_tool_format(chat_template: str) -> str | None:
    """The format that a chat template makes a model write; None where the template's text leaves doubt."""

    def has(*parts: str) -> bool:
        return all(part in chat_template for part in parts)

    # Hunyuan: other calls between the same markers. MiniMax M3: tags with a namespace.
    is_other = has("<arg_key>") or has("<tool_sep>") or has("<tool_calls>") or has("]<]minimax[>[")
    is_listed = has("[func_name1(") or has("[func_name(")
    is_xlam = has('[{"name": "tool_call_name", "arguments"')
    found = {
        "hermes": has("<tool_call>", "</tool_call>", "arguments") and not (has("<function=") or is_other or is_xlam),
        "granite": has("<|tool_call|>", "JSON list"),
        "phi4_mini": has("<|tool|>", "<|/tool|>") or has("functools["),
        "nemotron": has("<TOOLCALL>[", "</TOOLCALL>"),
        "cohere": has("<|START_ACTION|>", "tool_name"),
        "qwen3_coder": has("<tool_call>", "<function=", "<parameter="),
        "seed_oss": has("<seed:tool_call>", "<function="),
        "minimax_m2": has("<minimax:tool_call>", "<invoke name="),
        "deepseek_v32": has("｜DSML｜", "function_calls"),
        "deepseek_v4": has("｜DSML｜", "tool_calls>") and not has("function_calls"),
        "glm45": has("<tool_call>", "<arg_key>") and not has("</arg_key><arg_value>"),
        "glm47": has("<tool_call>", "</arg_key><arg_value>"),
        "llama3_json": has("<|start_header_id|>", '"parameters": ', '{"name": ')
        and not (is_listed or is_other or is_xlam or has("<TOOLCALL>")),
        "xlam": is_xlam,
        "pythonic": is_listed,
        "lfm2": has("<|tool_call_start|>") or has("List of tools: ", "<|im_start|>"),
        "olmo3": has("<function_calls>") and not has("<invoke"),
        "mistral": has("[TOOL_CALLS]") and not has("[ARGS]"),
        "mistral_args": has("[TOOL_CALLS]", "[ARGS]"),
        "deepseek_v3": has("<｜tool▁calls▁begin｜>", "```json"),
        "deepseek_v31": has("<｜tool▁calls▁begin｜>") and not has("```json"),
        "kimi_k2": has("<|tool_call_argument_begin|>"),
        "gemma4": has("<|tool_call>call:"),
        "function_gemma": has("<start_function_call>"),
        "harmony": has("<|start|>", "<|channel|>", "<|message|>"),
    }
    names = [name for name, is_found in found.items() if is_found]
    return names[0] if len(names) == 1 else None
