"""A GGUF file's vocabulary: types of tokens, tokens with a role, and those that end a text.

The rules are those of llama.cpp (its src/llama-vocab.cpp): files name few of the tokens that end a text, and their
converters know many by their texts.
"""

from __future__ import annotations

import numpy as np

from aioengine.errors import ModelLoadError
from aioengine.models.formats.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens, as llama.cpp numbers them."""

ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
"""transformers' names of tokens → the beginning of their metadata's keys."""

SENTENCEPIECE = "llama"
DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids of roles in a sentencepiece vocabulary whose file does not name them."""

END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "</s>", "<eos>", "<turn|>",
    "<|tool_response>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>", "<|fim_pad|>",
    "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
}  # fmt: skip
"""Tokens that end a turn, a text or a piece of code in any vocabulary that has them, whatever their type."""


def tokens_of(file: GgufFile) -> list[str]:
    """The vocabulary, by ids; empty where the file has none."""
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list, [])
    return tokens


def token_types(file: GgufFile) -> list[int]:
    """The type of each token; all are normal where the file has no types.

    Raises:
        ModelLoadError: there are more or fewer types than tokens.
    """
    tokens, types = tokens_of(file), file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens and {len(types)} types of tokens")
    return list(map(int, types))


def id_of_role(file: GgufFile, role: str) -> int | None:
    """The token that the file names for a role, such as "bos"; None if it names none.

    Ids outside the vocabulary count as not given, as in llama.cpp: converters have written -1 for none.
    """
    token_id: int | None = file.get(f"tokenizer.ggml.{role}_token_id", int)
    num_tokens = len(tokens_of(file))
    is_known = token_id is not None and (0 <= token_id < num_tokens or not num_tokens)
    if not is_known and file.metadata.get("tokenizer.ggml.model") == SENTENCEPIECE:
        token_id = DEFAULT_IDS.get(role, num_tokens)
        is_known = token_id < num_tokens
    return token_id if is_known else None


def ending_ids(file: GgufFile) -> list[int]:
    """The tokens that end a text: those that the file names, and those of `END_TEXTS`.

    "<|end|>" is left out if the vocabulary has other tokens that end a turn, as harmony's: it ends one of several
    messages there. "</s>" is left out if it is no control token, as in Gemma's vocabulary: it is HTML there.

    Raises:
        ModelLoadError: metadata is malformed.
    """
    ids = dict.fromkeys(token_id for role in END_ROLES if (token_id := id_of_role(file, role)) is not None)
    listed = file.get("tokenizer.ggml.eos_token_ids", (np.ndarray, list), [])
    ids |= dict.fromkeys(token_id.item() if isinstance(token_id, np.generic) else token_id for token_id in listed)
    types = token_types(file)
    known = {
        token: token_id
        for token_id, token in enumerate(tokens_of(file))
        if token in END_TEXTS and (token != "</s>" or types[token_id] == CONTROL)
    }
    if known.keys() & {"<|call|>", "<|calls|>"} and known.keys() & {"<|return|>", "<|flush|>"}:
        ids.pop(known.pop("<|end|>", -1), None)
    return list(ids | dict.fromkeys(known.values()))
