"""The tokenizer of a GGUF file, made from its vocabulary, since such a file has no tokenizer.json.

llama.cpp knows each kind by name (its src/llama-vocab.cpp). The patterns here are those of the models' tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.models.formats.gguf_file import (
    CONTROL,
    NORMAL,
    ROLES,
    SENTENCEPIECE,
    UNKNOWN,
    USER_DEFINED,
    GgufFile,
    ending_ids,
    id_of_role,
    token_types,
    tokens_of,
)
from aioengine.validation import shorten

SPACE = "▁"
"""Sentencepiece's character for a space."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_TEKKEN = "|".join(_WORDS) + r"|\p{N}" + _REST_WITH_SLASH
_WORDS_WITH_ENDS = "|".join(f"{word}{_CONTRACTIONS}?" for word in _WORDS)
_GPT4O = _WORDS_WITH_ENDS + r"|\p{N}{1,3}" + _REST_WITH_SLASH
_KIMI = r"\p{Han}+|" + _GPT4O.replace("/", "").replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LATE_SCRIPTS = (
    "\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68\U00010570-\U000105bc"
    "\U00016e40-\U00016e7f\U0001d400-\U0001df2a"
)
_CASED = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_LATE_SCRIPTS}]]"
_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES
)
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _LINES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|" + _LINES.replace(
    "]+", "]"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"


def _all(names: str, *patterns: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), patterns)


PATTERNS = {
    **_all(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3
    ),
    **_all("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    **_all("qwen35", _QWEN35),
    **_all("gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum", _GPT2),
    **_all("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_all("gpt-4o llama4 kanana2 minimax-m2", _GPT4O),
    **_all("tekken", _TEKKEN),
    **_all("kimi-k2", _KIMI),
    **_all("deepseek-v3 hunyuan-dense joyai-llm", r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    **_all(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"(?<!\s)\s+$",
        _ASIAN,
        r"\p{N}+",
    ),
    **_all("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
    **_all("seed-coder", _SEED),
    **_all("bailingmoe bailingmoe2 llada-moe", _BAILING),
    **_all("minicpm5", r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")),
    **_all("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_all("viking", r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
    **_all("falcon", _PUNCTUATION, _GPT2, "[0-9][0-9][0-9]"),
    **_all("default", _PUNCTUATION.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""Patterns by tokenizer.ggml.pre that split a text before tokens are merged; each splits what the last one left."""

ADDS_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Vocabularies that put a BOS before each text where the file lacks add_bos_token."""

IGNORES_MERGES = {*ADDS_BOS, "minicpm5"}
"""Vocabularies in which a piece that is a token is not merged from smaller ones."""

NORMALIZED = {"qwen2", "deepseek-r1-qwen", "qwen35", "olmo", "mpt", "command-r"}
"""Vocabularies whose texts are composed (NFC), as in transformers' classes for these models."""

NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""The tokens of Phi-3's families that leave white space after them as it is."""


def build_tokenizer(file: GgufFile) -> Any:
    """Build a `tokenizers.Tokenizer`. Errors of that library about the vocabulary pass through.

    Raises:
        ModelLoadError: metadata is missing, malformed or of a kind that is not supported.
    """
    from tokenizers import AddedToken

    kind, added_tokens = file.get("tokenizer.ggml.model", str), []
    if kind not in BUILDERS:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.model={shorten(kind)}; supported: {', '.join(BUILDERS)}")
    types = token_types(file)
    tokens = tokens_of(file)
    if kind == SENTENCEPIECE:
        tokens = [_spelled(token, each == USER_DEFINED) for token, each in zip(tokens, types, strict=True)]
    tokenizer = BUILDERS[kind](file, tokens, types)
    ends, strips = set(ending_ids(file)), _strips(file)
    for token_id, (token, each) in enumerate(zip(tokens, types, strict=True)):
        if each in (CONTROL, UNKNOWN, USER_DEFINED) or token_id in ends:
            is_special = each != USER_DEFINED or token_id in ends
            its_space = strips and token not in NOT_STRIPPED
            added_tokens.append(AddedToken(token, normalized=False, special=is_special, rstrip=its_space))
    tokenizer.add_tokens(added_tokens)
    _add_ends(file, tokenizer)
    return tokenizer


def named_tokens_of(file: GgufFile) -> dict[str, str]:
    """ "bos_token", "eos_token" and so on, as far as the file has them."""
    ids = {name: id_of_role(file, role) for name, role in ROLES.items()}
    return {name: tokens_of(file)[token_id] for name, token_id in ids.items() if token_id is not None}


def bos_id_of(file: GgufFile) -> int | None:
    """The token that begins each text, chats included; None where the file adds none."""
    pre = file.get("tokenizer.ggml.pre", str, "default")
    is_default = pre in ADDS_BOS or file.metadata["tokenizer.ggml.model"] == SENTENCEPIECE
    return id_of_role(file, "bos") if file.get("tokenizer.ggml.add_bos_token", bool, is_default) else None


def _strips(file: GgufFile) -> bool:
    """Whether white space after added tokens belongs to them. Phi-3's does, and GGUF has no key for it."""
    name = file.get("general.name", str, "").lower()
    return "phi-3" in name or "phi3" in name or file.metadata.get("general.architecture") == "phi3"


def _spelled(token: str, is_added: bool) -> str:
    """A token as the tokenizer spells it: with spaces if it is found in the text itself, else with `SPACE` for them."""
    if is_added:
        return token.replace(SPACE, " ")
    return SPACE * len(token) if token and not token.strip(" ") else token


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    """BPE of bytes, as in GPT-2 and most models since (Sennrich et al., 2016, arXiv:1508.07909)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = file.get("tokenizer.ggml.pre", str, "default")
    if split not in PATTERNS:
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.pre={shorten(split)}: how such a vocabulary splits texts is not known here"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list, [])]
    tokenizer = Tokenizer(models.BPE(vocab=_ids(tokens), merges=merges, ignore_merges=split in IGNORES_MERGES))
    if split in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[split]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    """BPE of characters by scores, with bytes for the others (Kudo and Richardson, 2018, arXiv:1808.06226)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN]
    given = file.get("tokenizer.ggml.merges", list)
    ids = _ids(tokens)
    merges = _merges(file, tokens, types) if given is None else [tuple(merge.split(" ", 1)) for merge in given]
    # A file may have merges of spaces, too; their tokens are found in the text before any merge.
    merges = [merge for merge in merges if "".join(merge) in ids and all(token in ids for token in merge)]
    model = models.BPE(vocab=ids, merges=merges, unk_token=next(iter(unknown), None), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


BUILDERS = {"gpt2": _byte_level, SENTENCEPIECE: _sentencepiece}
"""Functions that build the tokenizer, by tokenizer.ggml.model."""


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _merges(file: GgufFile, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third, the best first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path} lacks tokenizer.ggml.scores, one for each of {len(tokens)} tokens")
    if file.metadata["general.architecture"].startswith("gemma"):
        scores = range(0, -len(tokens), -1)  # Gemma's scores are not in the order of merging
    ids = _ids(tokens)
    found: list[tuple[float, int, int, int, int]] = []
    for token, kind, score in zip(tokens, types, map(float, scores), strict=True):
        if kind == NORMAL:  # added tokens are found in the text before any merge
            for at in range(1, len(token)):
                left, right = ids.get(token[:at]), ids.get(token[at:])
                if left is not None and right is not None:
                    found.append((-score, -at, at - len(token), left, right))
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(found)]


def _add_ends(file: GgufFile, tokenizer: Any) -> None:
    """Make the tokenizer add a beginning and an end token to texts, if the file asks for them."""
    from tokenizers import processors

    eos_id = id_of_role(file, "eos") if file.get("tokenizer.ggml.add_eos_token", bool, False) else None
    first, last = ([] if i is None else [(tokens_of(file)[i], i)] for i in (bos_id_of(file), eos_id))
    if first or last:
        template = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*first, *last])
