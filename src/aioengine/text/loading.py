"""Loads a model's tokenizer: a GGUF file's, or a folder's as `transformers.AutoTokenizer` would.

Importing transformers costs a second. Where AutoTokenizer is known to load tokenizer.json unchanged, the ``tokenizers``
library reads that file alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from aioengine.errors import AioEngineError, ModelLoadError
from aioengine.models.folder import MAX_LABELS, check_files, is_gguf, read_json
from aioengine.models.formats.gguf_file import GgufFile, tokens_of
from aioengine.text.gguf_tokenizer import PATTERNS, bos_id_of, build_tokenizer, named_tokens_of
from aioengine.text.template_files import DEFAULT, templates_of_folder, templates_of_gguf

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes whose tokens are bytes or characters."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Model types for which AutoTokenizer loads a declared PreTrainedTokenizerFast unchanged. (For others it may use a class
# of its own that rebuilds the pipeline, or Mistral's format.) A test compares each of them.
PLAIN_MODEL_TYPES = frozenset(
    {"gpt_oss", "granite", "llama", "olmo2", "olmo3", "qwen3", "qwen3_moe", "smollm3", "starcoder2"}
)
_PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
# transformers' Qwen2Tokenizer takes vocabulary, merges and post-processor from tokenizer.json and rebuilds the rest.
_QWEN_CLASSES = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})
_QWEN_MODEL_TYPES = frozenset({"qwen2", "qwen3"})
# Settings that make transformers change the tokenizer of tokenizer.json, or read another file.
_UNPLAIN_SETTINGS = frozenset({"auto_map", "fast_tokenizer_files", "fix_mistral_regex", "split_special_tokens"})


MAX_GROWTH = 1000
"""The most characters that a normalizer may make of one; Unicode's own forms have at most 18."""

MAX_TOKEN_IDS = 2**22
"""The most ids of a tokenizer, also if its model states no number; the largest known has 2**20."""

TOKEN_IDS_MARGIN = 2**16
"""Ids that a tokenizer may have beyond its model's."""

MAX_SHOWN_CHARS = 500


class LoadedTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's tokenizer; it has at least one of ``backend`` and ``slow``.

    Attributes:
        backend: a ``tokenizers.Tokenizer`` with neither truncation nor padding; None if it does not do the decoding.
        slow: a transformers tokenizer, only if it encodes differently from ``backend`` or there is no backend.
        chat_templates: templates by name.
        named_tokens: "bos_token", "eos_token" and so on, as far as they are set.
        chat_bos_id: a BOS that begins each chat, even if the template does not write it; None: left to the template.
        max_ids: upper bound of its ids, exclusive.
    """

    backend: Any = None
    slow: Any = None
    chat_templates: dict[str, str] = {}
    named_tokens: dict[str, str] = {}
    chat_bos_id: int | None = None
    max_ids: int = MAX_TOKEN_IDS


def _check_labels(folder: Path, config: dict[str, Any]) -> None:
    """Refuse too many labels: transformers makes a dict of them while it looks for the tokenizer's class."""
    pending = [config]
    while pending:
        node = pending.pop()
        num_labels = node.get("num_labels", 0)
        if isinstance(num_labels, int) and num_labels > MAX_LABELS:
            raise ModelLoadError(f"{folder / 'config.json'}: num_labels={num_labels}; 0 to {MAX_LABELS} is needed")
        pending += [part for part in node.values() if isinstance(part, dict)]


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder or GGUF file has a tokenizer. A model without one takes prompts as token ids."""
    if is_gguf(folder):
        return bool(tokens_of(GgufFile.read(folder)))
    return any((folder / name).is_file() for name in ("tokenizer_config.json", *VOCABULARY_FILES))


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Load the tokenizer of a local folder, as AutoTokenizer would, without downloads and without running its code.

    Args:
        folder: a folder or a GGUF file.
    Raises:
        ModelLoadError: there is no tokenizer, a file of it is missing or damaged, or transformers cannot load it.
    """
    if is_gguf(folder):
        return _load_from_gguf(folder)
    check_files(folder)
    files = (folder / "tokenizer_config.json", folder / "config.json")
    settings, config = (read_json(file) if file.is_file() else {} for file in files)
    _check_labels(folder, config)
    if settings.get("tokenizer_class") not in WITHOUT_VOCABULARY:
        _check_vocabulary(folder)
    templates = templates_of_folder(folder, settings)
    _check_normalizer(folder / "tokenizer.json")
    is_cut = (folder / "vocab.json").is_file() and not any(
        (folder / name).is_file() for name in ("merges.txt", "tokenizer.json")
    )
    hint = "; vocab.json needs merges.txt beside it, or a tokenizer.json" if is_cut else _missing_modules(folder)
    with failures_as(lambda problem: ModelLoadError(f"{folder}: the tokenizer could not be loaded: {problem}{hint}")):
        loaded = _load_plain(folder, settings, config.get("model_type")) or _load_with_transformers(folder)
    num_ids = config.get("vocab_size")
    max_ids = min(num_ids + TOKEN_IDS_MARGIN, MAX_TOKEN_IDS) if type(num_ids) is int else MAX_TOKEN_IDS
    return msgspec.structs.replace(loaded, chat_templates=templates or loaded.chat_templates, max_ids=max_ids)


def _load_from_gguf(path: Path) -> LoadedTokenizer:
    file = GgufFile.read(path)
    if not tokens_of(file):
        raise ModelLoadError(f"{path} has no tokenizer; give prompts as token ids")
    templates = templates_of_gguf(file, path)
    with failures_as(lambda problem: ModelLoadError(f"{path}: the tokenizer could not be loaded: {problem}")):
        loaded = _with_backend(build_tokenizer(file), named_tokens_of(file))
    max_ids = len(tokens_of(file))
    return msgspec.structs.replace(loaded, chat_templates=templates, chat_bos_id=bos_id_of(file), max_ids=max_ids)


def _check_vocabulary(folder: Path) -> None:
    """Refuse a folder without a vocabulary: for most classes transformers would make a tokenizer without tokens."""
    if any((folder / name).is_file() for name in VOCABULARY_FILES):
        return
    names = ", ".join(VOCABULARY_FILES)
    if has_tokenizer(folder):
        raise ModelLoadError(
            f"{folder} has tokenizer_config.json and no vocabulary; one of these is missing: {names}. Add it, or "
            "remove tokenizer_config.json and give prompts as token ids"
        )
    raise ModelLoadError(f"{folder} has no tokenizer (none of {names}); add one, or give prompts as token ids")


def _missing_modules(folder: Path) -> str:
    """A hint for a vocabulary that needs optional packages of transformers; "" if none is missing."""
    needed = {"sentencepiece": folder.glob("*.model"), "tiktoken": folder.glob("tiktoken.model")}
    missing = [name for name, files in needed.items() if any(files) and find_spec(name) is None]
    is_read = missing and not (folder / "tokenizer.json").is_file()
    return (
        f"; its vocabulary may need packages that are not installed: pip install {' '.join(missing)}" if is_read else ""
    )


@contextmanager
def failures_as(make: Callable[[str], AioEngineError]) -> Iterator[None]:
    """Convert errors of a tokenizer's library into an error of ours: bare exceptions of many kinds, and panics.

    A panic of Rust code is a BaseException of a class that cannot be imported. Rust has printed it on stderr by then.

    Args:
        make: makes the error from the library's message.
    """
    try:
        yield
    except AioEngineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = (str(error) or type(error).__name__)[:MAX_SHOWN_CHARS]
        raise make(problem.encode("utf-8", "replace").decode()) from error


def _check_normalizer(file: Path) -> None:
    """Refuse a normalizer for which the library would take unbounded memory, which aborts the process.

    Such a normalizer makes very many characters of one, or has a table that is larger than its data.
    """
    if not file.is_file():
        return
    try:
        parts = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
        steps = list(_steps(msgspec.json.decode(parts.get("normalizer", b"null"))))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is damaged: {error}") from error
    try:
        grown = max((_grown(steps, text) for text in {"a", *map(_pattern, steps)}), default=0)
        charsmaps = [step["precompiled_charsmap"] for step in steps if step.get("precompiled_charsmap")]
        lies = [data for data in map(base64.b64decode, charsmaps) if int.from_bytes(data[:4], "little") > len(data)]
    except (TypeError, ValueError, AttributeError, KeyError):
        return  # no normalizer that the library reads
    if grown > MAX_GROWTH:
        raise ModelLoadError(f"{file}: the normalizer makes more than {MAX_GROWTH} characters of one")
    if lies:
        raise ModelLoadError(f"{file}: the normalizer's precompiled_charsmap is cut short")


def _steps(normalizer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(normalizer, dict) and isinstance(normalizer.get("normalizers"), list):
        for inner in normalizer["normalizers"]:
            yield from _steps(inner)
    elif isinstance(normalizer, dict):
        yield normalizer


def _pattern(step: dict[str, Any]) -> str:
    """The text that a step replaces; "" if that is a regular expression, or if it replaces nothing."""
    return str((step.get("pattern") or {}).get("String", ""))


def _grown(steps: list[dict[str, Any]], text: str) -> int:
    """The most characters that the steps make of a text, where a regular expression may match anywhere."""
    factor = 1
    for step in steps:
        content, pattern = step.get("content") or "", _pattern(step)
        if pattern:
            text = text.replace(pattern, content)
        elif step.get("type") == "Replace":
            factor *= 1 + len(content)
        text = (step.get("prepend") or "") + text
        if len(text) * factor > 1000 * MAX_GROWTH:
            break
    return len(text) * factor


def _load_plain(folder: Path, config: dict[str, Any], model_type: object) -> LoadedTokenizer | None:
    """Load tokenizer.json as it is; None where AutoTokenizer might make another tokenizer of the folder.

    Args:
        config: contents of tokenizer_config.json.
    """
    is_qwens = config.get("tokenizer_class") in _QWEN_CLASSES and model_type in _QWEN_MODEL_TYPES
    is_plain = config.get("tokenizer_class") in _PLAIN_CLASSES and model_type in {None, *PLAIN_MODEL_TYPES}
    if (
        not (is_plain or is_qwens)
        or any(config.get(name) for name in _UNPLAIN_SETTINGS)
        or not (folder / "tokenizer.json").is_file()
    ):
        return None
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if not _adds_nothing(folder, config, backend) or (is_qwens and not _is_as_qwens_class_makes(config, backend)):
        return None
    named_tokens = {name: _content(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
    return _with_backend(backend, named_tokens)


def _adds_nothing(folder: Path, config: dict[str, Any], backend: Any) -> bool:
    """Whether the settings beside tokenizer.json name only tokens that it has, with the same properties."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    if declared is None:
        # Only without added_tokens_decoder does transformers read these older files.
        if (folder / "special_tokens_map.json").exists() or (folder / "added_tokens.json").exists():
            return False
    elif not all(_is_same_token(token, added.get(_content(token))) for token in declared.values()):
        return False
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = {content for content, token in added.items() if token.special}  # transformers makes named tokens special
    named = [value for key, value in config.items() if key.endswith("_token") and isinstance(value, (str, dict))]
    # "add_bos_token" and its like are flags, which transformers ignores if there is a tokenizer.json.
    others = [value for key, value in config.items() if key.endswith("_token") and key not in NAMED_TOKENS]
    custom = [value for value in others if not (value is None or isinstance(value, bool))]
    return not custom and isinstance(extra, list) and all(_content(token) in special for token in [*extra, *named])


def _is_as_qwens_class_makes(config: dict[str, Any], backend: Any) -> bool:
    """Whether Qwen2Tokenizer would build the tokenizer of tokenizer.json, with the same ids of its added tokens."""
    from tokenizers.models import BPE

    added = {str(token_id): token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    declared = config.get("added_tokens_decoder")
    first_added = backend.get_vocab_size(with_added_tokens=False)
    if (
        (declared is not None and {token_id: _content(token) for token_id, token in declared.items()} != added)
        or added.keys() != set(map(str, range(first_added, first_added + len(added))))
        or not {"eos_token", "pad_token", "unk_token"} <= config.keys()
        or any(config.get(name) for name in ("add_bos_token", "add_eos_token", "add_prefix_space"))
    ):
        return False
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    match [json.loads(part.__getstate__()) for part in parts if part is not None], backend.model:
        case (
            [
                {"type": "NFC"},
                {"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ]},
                {"type": "ByteLevel"},
                {"type": "ByteLevel"},
            ],
            BPE(dropout=None, unk_token=None, fuse_unk=False, byte_fallback=False, ignore_merges=False) as model,
        ):  # fmt: skip
            return pattern == PATTERNS["qwen2"][0] and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    return False


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content"))


def _is_same_token(declared: dict[str, Any], token: Any) -> bool:
    properties = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return token is not None and all(declared.get(name) == getattr(token, name) for name in properties)


def _load_with_transformers(folder: Path) -> LoadedTokenizer:
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    # By default trust_remote_code would ask on the terminal.
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **here)
    except Exception as error:
        try:  # the config may be the cause
            AutoConfig.from_pretrained(str(folder), **here)
        except Exception as of_config:
            if str(of_config) == str(error):
                problem = str(error)[:MAX_SHOWN_CHARS]
                raise ModelLoadError(
                    f"{folder / 'config.json'}: transformers does not understand it: {problem}"
                ) from error
        raise
    own = getattr(tokenizer, "chat_template", None)  # set by some classes
    templates = {DEFAULT: own} if isinstance(own, str) else {}
    named_tokens = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}

    def is_own(*methods: str) -> bool:
        return any(getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in methods)

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or is_own("_decode"):
        return LoadedTokenizer(slow=tokenizer, chat_templates=templates, named_tokens=named_tokens)
    slow = tokenizer if is_own("__call__", "_encode_plus") else None
    loaded = _with_backend(tokenizer.backend_tokenizer, named_tokens)
    return msgspec.structs.replace(loaded, chat_templates=templates, slow=slow)


def _with_backend(backend: Any, named_tokens: dict[str, str]) -> LoadedTokenizer:
    # Some tokenizer.json files have a truncation length from training; transformers, too, ignores it unless asked.
    backend.no_truncation()
    backend.no_padding()
    return LoadedTokenizer(backend=backend, named_tokens=named_tokens)
