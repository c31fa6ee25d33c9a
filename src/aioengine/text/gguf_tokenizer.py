"""The tokenizer that a GGUF file describes, built anew: such a file has a vocabulary and no tokenizer.json.

What llama.cpp knows of each kind by name (its src/llama-vocab.cpp) is here what the models' own tokenizer.json says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.models.formats.gguf_file import GgufFile
from aioengine.validation import shorten

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens, as llama.cpp numbers them."""

SPACE = "▁"
"""What sentencepiece writes for one."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)
_TEKKEN = "|".join(_WORDS) + r"|\p{N}" + _REST_WITH_SLASH
_GPT4O = "|".join(f"{word}{_CONTRACTIONS}?" for word in _WORDS) + r"|\p{N}{1,3}" + _REST_WITH_SLASH

GPT2, DIGITS = "gpt2", "digits"
"""Split as GPT-2 does, by the library's own pattern; the same, each digit apart before."""

PATTERNS = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "exaone4"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
"""tokenizer.ggml.pre: into what a text is split before tokens are merged."""

IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""A piece that is a token is not merged from smaller ones. They have the beginning's token before each text, too, where
the file does not say otherwise."""

NORMALIZED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Their texts are composed (NFC)."""


def has_vocabulary(file: GgufFile) -> bool:
    return "tokenizer.ggml.tokens" in file.metadata


def build_tokenizer(file: GgufFile) -> Any:
    """A `tokenizers.Tokenizer`. It raises what that library does where the vocabulary is no good.

    Raises:
        ModelLoadError: metadata is missing or malformed, or of a kind that is not supported.
    """
    from tokenizers import AddedToken

    kind = file.get("tokenizer.ggml.model", str)
    if kind not in BUILDERS:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.model={shorten(kind)}; supported: {', '.join(BUILDERS)}")
    tokens = file.get("tokenizer.ggml.tokens", list)
    types = file.metadata.get("tokenizer.ggml.token_type")
    types = [NORMAL] * len(tokens) if types is None else list(map(int, types))
    if len(types) != len(tokens):
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens and {len(types)} types of tokens")
    tokenizer, adds_bos = BUILDERS[kind](file, tokens, types)
    of_types = {each: [token for token, of in zip(tokens, types, strict=True) if of == each] for each in set(types)}
    special = [*of_types.get(CONTROL, []), *of_types.get(UNKNOWN, [])]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in of_types.get(USER_DEFINED, [])])
    _add_ends(file, tokenizer, adds_bos)
    return tokenizer


def named_tokens_of(file: GgufFile) -> dict[str, str]:
    """ "bos_token", "eos_token" and so on, as far as the file has them.

    Raises:
        ModelLoadError: one is none of the vocabulary.
    """
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in NAMED_IDS.items()}
    return {name: _token(file, token_id) for name, token_id in ids.items() if token_id is not None}


NAMED_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}


def _token(file: GgufFile, token_id: int) -> str:
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    if not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"{file.path} names token {token_id}, and has {len(tokens)}")
    return tokens[token_id]


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Any, bool]:
    """BPE of bytes, GPT-2's and that of most models since (Sennrich et al., 2016, arXiv:1508.07909)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = file.get("tokenizer.ggml.pre", str, "default")
    if split not in PATTERNS:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.pre={shorten(split)}; supported: {', '.join(PATTERNS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list, [])]
    ignores_merges = split in IGNORES_MERGES
    tokenizer = Tokenizer(models.BPE(vocab=_ids(tokens), merges=merges, ignore_merges=ignores_merges))
    if split in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    pattern = PATTERNS[split]
    steps: list[Any] = []
    if pattern == DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif pattern != GPT2:
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (GPT2, DIGITS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, ignores_merges


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Any, bool]:
    """BPE of characters by scores, and bytes for what has no token (Kudo and Richardson, 2018, arXiv:1808.06226)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    # Where a token is spaces alone, llama.cpp writes them as such.
    tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN]
    given = file.get("tokenizer.ggml.merges", list)
    merges = _merges(file, tokens, types) if given is None else [tuple(merge.split(" ", 1)) for merge in given]
    model = models.BPE(
        vocab=_ids(tokens), merges=merges, unk_token=next(iter(unknown), None), fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer, True


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""tokenizer.ggml.model: what makes the tokenizer, and says whether the beginning's token is put before each text."""


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _merges(file: GgufFile, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    """All ways in which two tokens make a third, the best first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path} lacks tokenizer.ggml.scores, one for each of {len(tokens)} tokens")
    if file.metadata["general.architecture"].startswith("gemma"):
        scores = range(0, -len(tokens), -1)  # its scores are not in the order in which tokens are merged
    ids = _ids(tokens)
    found: list[tuple[float, int, int, int, int]] = []
    for token, kind, score in zip(tokens, types, map(float, scores), strict=True):
        if kind in (NORMAL, USER_DEFINED):
            for at in range(1, len(token)):
                left, right = ids.get(token[:at]), ids.get(token[at:])
                if left is not None and right is not None:
                    found.append((-score, -at, at - len(token), left, right))
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(found)]


def _add_ends(file: GgufFile, tokenizer: Any, adds_bos: bool) -> None:
    """Have the tokens of a text's beginning and end put around it, if the file says so."""
    from tokenizers import processors

    ids = {}
    for name, is_default in (("bos", adds_bos), ("eos", False)):
        token_id = file.get(f"tokenizer.ggml.{name}_token_id", int)
        if token_id is not None and file.get(f"tokenizer.ggml.add_{name}_token", bool, is_default):
            ids[name] = (_token(file, token_id), token_id)
    if ids:
        template = [*([ids["bos"][0]] if "bos" in ids else []), "$A", *([ids["eos"][0]] if "eos" in ids else [])]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(ids.values()))
