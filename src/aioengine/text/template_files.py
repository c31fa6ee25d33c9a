"""The chat templates of a model by name: where its folder, or its GGUF file, has them.

A folder has them in one of several places, in the order in which transformers looks: files of their own, the settings
of the tokenizer, and those of the processor that belongs to a model of images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aioengine.config import MAX_TEMPLATE_CHARS
from aioengine.errors import ModelLoadError
from aioengine.models.folder import check_files, read_json
from aioengine.models.formats.gguf_file import GgufFile

DEFAULT = "default"
"""Name of the template that is taken where no other is asked for."""

WITH_TOOLS = "tool_use"
"""Name of the template that transformers takes by itself where there are tools."""

PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
GGUF_KEY = "tokenizer.chat_template"


def templates_of_folder(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Read the templates of a model's folder; empty where it has none.

    Args:
        settings: tokenizer_config.json.
    Raises:
        ModelLoadError: one is too large, or is no text, or a file of them cannot be read.
    """
    named = folder / "additional_chat_templates"
    if named.is_dir():
        check_files(named)
    files = {DEFAULT: folder / "chat_template.jinja", **{file.stem: file for file in sorted(named.glob("*.jinja"))}}
    if found := {name: _read(file) for name, file in files.items() if file.is_file()}:
        return found
    if found := _by_name(settings.get("chat_template"), folder / "tokenizer_config.json"):
        return found
    files_of_processor = [file for name in PROCESSOR_FILES if (file := folder / name).is_file()]
    return next(filter(None, (_by_name(read_json(file).get("chat_template"), file) for file in files_of_processor)), {})


def templates_of_gguf(file: GgufFile, path: Path) -> dict[str, str]:
    """As `templates_of_folder`, of a GGUF file."""
    keys = [key for key in file.metadata if key == GGUF_KEY or key.startswith(f"{GGUF_KEY}.")]
    found = {key.removeprefix(GGUF_KEY).removeprefix(".") or DEFAULT: file.get(key, str) for key in keys}
    return _by_name(found, path)


def _read(file: Path) -> str:
    try:
        return _by_name(file.read_text("utf-8"), file)[DEFAULT]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read as a chat template: {error}") from error


def _by_name(given: Any, source: Path) -> dict[str, str]:
    """The templates of a file: one text, texts by name, or a list of names and texts."""
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {str(one.get("name")): one.get("template") for one in given}
    by_name = {} if given is None else {DEFAULT: given} if isinstance(given, str) else given
    if not isinstance(by_name, dict) or not all(isinstance(text, str) for text in by_name.values()):
        raise ModelLoadError(f"{source}: chat_template is neither a text nor texts by name")
    if any(len(text) > MAX_TEMPLATE_CHARS for text in by_name.values()):
        raise ModelLoadError(
            f"{source}: the chat template has more than {MAX_TEMPLATE_CHARS} characters, which none has"
        )
    return by_name
