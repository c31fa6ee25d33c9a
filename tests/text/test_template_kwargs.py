"""Variables for chat templates: they are checked and copied, and a template sees what it sees in transformers.

The templates are shaped as those of well-known families, their tricks included.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from text.conftest import byte_level

from aioengine.errors import InvalidRequest
from aioengine.text.chat_input import MAX_BYTES, MAX_LEVELS, RESERVED, VALUE_BYTES, take_template_kwargs
from aioengine.text.loading import LoadedTokenizer
from aioengine.text.tokenizer import Tokenizer

NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "chatml with thinking": (
        "{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        "{%- endif %}"
    ),
    "instructions": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = '' %}{% endif %}"
        "{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + (system_message if loop.first else '') + message['content'].strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "thoughts are cut": (
        "{%- set ns = namespace(last=0) %}"
        "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
        "{%- endfor %}"
        "{%- for message in messages %}"
        "{%- set content = message.content %}"
        "{%- if '</think>' in content and loop.index0 < ns.last %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|' + message.role + '|>' + content + '<|end|>' }}"
        "{%- endfor %}{{- '<|assistant|>' if add_generation_prompt else '' }}"
    ),
    "reasoning in a field": (
        "{%- for message in messages %}{{- '<|' + message.role + '|>' }}"
        "{%- if message.reasoning_content is string %}{{- '<think>' + message.reasoning_content + '</think>' }}"
        "{%- endif %}{{- message.content + '<|end|>' }}"
        "{%- endfor %}{{- '<|assistant|>' if add_generation_prompt else '' }}"
    ),
    "variables shown": (
        "{%- macro show(value) %}{{- value | tojson }}{%- endmacro %}"
        "{{- show(builtin) if builtin is defined else 'none' }}|{{ bos_token }}|{{ show(pair or 0) }}\n"
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}\n{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ tools is none }}{{ documents is none }}"
    ),
    "contents forgotten": "{% for message in messages %}{{ message.role }}{% endfor %}",
}

USER = {"role": "user", "content": " Who lives here? "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "system", "content": "Be brief."}, USER],
    "an answer begun": [USER, {"role": "assistant", "content": "A fox, and"}],
    "an answer begun with a space at its end": [USER, {"role": "assistant", "content": " A fox, and "}],
    "a thought": [
        USER,
        {"role": "assistant", "content": "<think>\nA fox?\n</think>\n\nA fox."},
        USER,
        {"role": "assistant", "content": "<think>\nStill a fox"},
    ],
    "reasoning in a field": [USER, {"role": "assistant", "content": "", "reasoning_content": "A fox?"}],
}

KWARGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "without thinking": {"enable_thinking": False},
    "thinking": {"enable_thinking": True},
    "no generation prompt": {"add_generation_prompt": False},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
    "a field continued": {"add_generation_prompt": False, "continue_final_message": "reasoning_content"},
    "named tokens replaced": {"bos_token": "<b> à Zürich", "eos_token": ""},
    "data": {"builtin": [{"name": "f", "of": [1, 2.5, None, True]}], "pair": (1, "zwei")},
    "numpy's": {"builtin": {"n": np.int64(3)}, "enable_thinking": np.bool_(False)},
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMED_TOKENS)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(LoadedTokenizer(backend=byte_level(), named_tokens=NAMED_TOKENS))


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_is_rendered_as_transformers_renders_it(
    theirs: Any, ours: Tokenizer, template: str, kwargs: str
) -> None:
    ours.chat_template = TEMPLATES[template]
    for chat in CHATS.values():
        expected = rendered_by(theirs, chat, TEMPLATES[template], {"add_generation_prompt": True, **KWARGS[kwargs]})
        taken = take_template_kwargs(KWARGS[kwargs], is_chat=True)
        if isinstance(expected, str):
            assert ours.render_chat(chat, **taken) == expected
        else:
            with pytest.raises(InvalidRequest, match="chat template does not take") as refused:
                ours.render_chat(chat, **taken)
            assert str(expected)[:100] in str(refused.value)
            assert refused.value.param == "prompt"


def rendered_by(theirs: Any, chat: list[dict[str, Any]], template: str, kwargs: dict[str, Any]) -> str | Exception:
    """The text, or the error that was raised."""
    try:
        return str(theirs.apply_chat_template(chat, chat_template=template, tokenize=False, **kwargs))
    except Exception as error:
        return error


def test_what_a_template_says_of_its_failure_is_cut_short(ours: Tokenizer) -> None:
    ours.chat_template = "{{ raise_exception(messages[0].content) }}"
    with pytest.raises(InvalidRequest) as refused:
        ours.render_chat([{"role": "user", "content": "no! " * 100_000}])
    assert "no! no!" in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({"enable_thinking": False}, True),
        ({"continue_final_message": False}, True),
        ({"continue_final_message": True}, False),
        ({"continue_final_message": "thinking"}, False),
        ({"add_generation_prompt": False}, False),
        (MappingProxyType({"enable_thinking": False}), True),
    ],
)
def test_a_generation_prompt_is_added_unless_a_message_is_continued(given: Any, begins: bool) -> None:
    assert take_template_kwargs(given, is_chat=True) == {"add_generation_prompt": begins, **given}


def test_variables_need_a_chat_and_nothing_is_nothing() -> None:
    for is_chat in (True, False):
        assert take_template_kwargs(None, is_chat=is_chat) == take_template_kwargs({}, is_chat=is_chat) == {}
    with pytest.raises(InvalidRequest, match="for the messages of a chat"):
        take_template_kwargs({"enable_thinking": False}, is_chat=False)


def test_what_is_taken_is_a_copy() -> None:
    inner: dict[str, Any] = {"a": [1]}
    given = {"x": inner, "y": (inner, inner)}
    taken = take_template_kwargs(given, is_chat=True)
    inner["a"].append(2)
    inner["b"] = 3
    assert taken == {"x": {"a": [1]}, "y": ({"a": [1]}, {"a": [1]}), "add_generation_prompt": True}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def holds_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class Text(msgspec.Struct):
    text: str


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([("enable_thinking", False)], "a mapping of names"),
        ("enable_thinking", "a mapping of names"),
        ({1: 2}, "names are str"),
        ({"a": {1: 2}}, "names are str"),
        ({"a": {1, 2}}, "holds a set; plain data"),
        ({"a": [b"bytes"]}, "holds a bytes; plain data"),
        ({"a": Text("x")}, "holds a Text; plain data"),
        ({"a": len}, "plain data"),
        ({"a": np.zeros(3)}, "holds a ndarray; plain data"),
        ({"a": "\ud800"}, "lone surrogate"),
        ({"\ud800": 1}, "lone surrogate"),
        ({"a": "x" * MAX_BYTES}, "more than 65536 bytes"),
        ({"a": "é" * (MAX_BYTES // 2)}, "more than 65536 bytes"),
        ({"a": [None] * (MAX_BYTES // VALUE_BYTES)}, "more than 65536 bytes"),
        ({"x" * MAX_BYTES: 1}, "more than 65536 bytes"),
        ({"a": 1 << 8 * MAX_BYTES}, "more than 65536 bytes"),
        ({"a": functools.reduce(lambda held, _: [held, held], range(30), 1)}, "more than 65536 bytes"),
        ({"a": nested(MAX_LEVELS)}, "deeper than 32 levels"),
        ({"a": holds_itself()}, "deeper than 32 levels"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "give one of them"),
        ({"add_generation_prompt": True, "continue_final_message": "thinking"}, "give one of them"),
        ({"add_generation_prompt": 1}, "True or False"),
        ({"add_generation_prompt": None}, "True or False"),
        ({"continue_final_message": 1}, "the name of a message's field"),
        ({"continue_final_message": None}, "the name of a message's field"),
    ],
)
def test_what_cannot_be_taken_is_the_callers_fault(given: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        take_template_kwargs(given, is_chat=True)
    assert refused.value.param == "chat_template_kwargs"
    assert len(str(refused.value)) < 400


def test_what_is_just_within_the_bounds_is_taken() -> None:
    widest = {"a": "x" * (MAX_BYTES - VALUE_BYTES - 1)}
    assert take_template_kwargs(widest, is_chat=True)["a"] == widest["a"]
    assert take_template_kwargs({"a": nested(MAX_LEVELS - 1)}, is_chat=True)["a"] == nested(MAX_LEVELS - 1)


def test_names_that_have_a_meaning_already_are_refused_and_no_other_clashes(folder: Path) -> None:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template):
        taken = {"add_generation_prompt", "continue_final_message", "kwargs"}
        assert set(inspect.signature(function).parameters) - taken <= RESERVED
    for name in RESERVED:
        with pytest.raises(InvalidRequest, match=rf"holds {name}, which is not for the template"):
            take_template_kwargs({name: None}, is_chat=True)
    tokenizer = Tokenizer.load(folder)
    for name in ("template", "args", "context", "variables", "named_tokens", "loop", "range", "__class__", "a b", ""):
        assert tokenizer.render_chat([USER], **take_template_kwargs({name: "x"}, is_chat=True)) == (
            tokenizer.render_chat([USER])
        )
