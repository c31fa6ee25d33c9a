"""A model's chat templates are found by name wherever its files have them, and taken as transformers takes them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_checkpoints import finish

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.models.formats.gguf_file import GgufFile
from aioengine.text.template_files import templates_of_gguf
from aioengine.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
NAMED = {
    "default": "plain:{{ messages[0].content }}",
    "tool_use": "tools:{{ (tools or []) | length }}:{{ messages[0].content }}",
    "rag": "rag:{{ messages[0].content }}",
}


def set_config(folder: Path, template: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


def as_list(folder: Path) -> None:
    set_config(folder, [{"name": name, "template": template} for name, template in NAMED.items()])


def as_dict(folder: Path) -> None:
    set_config(folder, NAMED)


def as_files(folder: Path) -> None:
    set_config(folder, "another")
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    (folder / "chat_template.json").write_text("no JSON, and not read")


def as_processors(folder: Path, name: str = "chat_template.json") -> None:
    set_config(folder, None)
    (folder / name).write_text(json.dumps({"chat_template": NAMED}))


def as_processors_config(folder: Path) -> None:
    as_processors(folder, "processor_config.json")


@pytest.mark.parametrize("put", [as_list, as_dict, as_files, as_processors, as_processors_config])
def test_templates_are_found_by_name(folder: Path, put: Callable[[Path], None]) -> None:
    put(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_templates == NAMED
    assert tokenizer.render_chat(MESSAGES) == "plain:hi"
    assert tokenizer.render_chat(MESSAGES, tools=TOOLS) == "tools:1:hi"
    assert tokenizer.render_chat(MESSAGES, tools=TOOLS, chat_template="default") == "plain:hi"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="rag", tokenize=False) == "rag:hi"
    assert tokenizer.render_chat(MESSAGES, chat_template="own:{{ messages[0].role }}") == "own:user"
    with pytest.raises(InvalidRequest, match=r"no chat template 'rga': .*'default', 'rag', 'tool_use'") as refused:
        tokenizer.render_chat(MESSAGES, chat_template="rga")
    assert refused.value.param == "chat_template"


@pytest.mark.parametrize("put", [as_list, as_files])
def test_they_are_taken_as_transformers_takes_them(folder: Path, put: Callable[[Path], None]) -> None:
    from transformers import AutoTokenizer

    put(folder)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for name in (None, *NAMED):
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(MESSAGES, chat_template=name, tools=tools, tokenize=False)
            assert ours.render_chat(MESSAGES, chat_template=name, tools=tools) == expected
            assert ours.apply_chat_template(MESSAGES, chat_template=name, tools=tools, tokenize=False) == expected


@pytest.mark.parametrize("template", [NAMED["rag"], {"default": NAMED["rag"]}])
def test_a_processors_file_is_read_where_no_other_has_a_template(folder: Path, template: Any) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert Tokenizer.load(folder).render_chat(MESSAGES).startswith("<s><|im_start|>")
    set_config(folder, None)
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "rag:hi"


def test_without_a_default_one_must_be_named(folder: Path) -> None:
    set_config(folder, {"rag": NAMED["rag"]})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequest, match=r"no chat template 'default': .*'rag'"):
        tokenizer.render_chat(MESSAGES)
    assert tokenizer.render_chat(MESSAGES, chat_template="rag") == "rag:hi"


@pytest.mark.parametrize(
    "template", [5, ["x"], [{"name": "default"}], {"default": None}, [{"name": ["x"], "template": 1}], {"default": {}}]
)
def test_what_is_no_template_is_refused_with_the_files_name(folder: Path, template: Any) -> None:
    set_config(folder, template)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template is neither a text nor"):
        Tokenizer.load(folder)


def test_large_ones_and_pipes_are_refused(folder: Path) -> None:
    set_config(folder, {"rag": "x" * 2**21})
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: the chat template has more than"):
        Tokenizer.load(folder)
    as_files(folder)
    named = folder / "additional_chat_templates"
    (named / "large.jinja").write_text("x" * 2**21)
    with pytest.raises(ModelLoadError, match=r"large\.jinja: the chat template has more than"):
        Tokenizer.load(folder)
    (named / "large.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"large\.jinja cannot be read as a chat template"):
        Tokenizer.load(folder)
    (named / "large.jinja").unlink()
    os.mkfifo(named / "pipe.jinja")
    with pytest.raises(ModelLoadError, match=r"pipe\.jinja is no regular file, but a pipe"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_gguf_file_has_several_by_keys_of_their_own(tmp_path: Path, is_listed: bool) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    if is_listed:
        writer.add_chat_template([{"name": name, "template": template} for name, template in NAMED.items()])
    else:
        writer.add_chat_template(NAMED["default"])
        for name in ("tool_use", "rag"):
            writer.add_string(f"tokenizer.chat_template.{name}", NAMED[name])
    finish(writer)
    assert templates_of_gguf(GgufFile.read(file), file) == NAMED
    without = tmp_path / "without.gguf"
    finish(gguf.GGUFWriter(without, "llama"))
    assert templates_of_gguf(GgufFile.read(without), without) == {}
