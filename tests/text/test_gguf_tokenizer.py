"""Tokenizers that are built from GGUF files, against the tokenizer.json that the files were written from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from gguf_checkpoints import finish, sentencepiece, write_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_PATTERN

from aioengine.errors import ModelLoadError
from aioengine.text.loading import has_tokenizer, load_tokenizer
from aioengine.text.tokenizer import Tokenizer as Ours

SEED = 20261124
NUM_TEXTS = 60
CORPUS = [
    "The café's 12345 naïve résumés weren't there; they've said “I'LL go” at 10:45, haven't they?",
    "def f(x):\n    return x ** 2  # squares\n\n\nprint(f(3.14159))\r\n\tpass",
    "日本語のテキストと中文文本，还有한국어 문장. Привет, мир! Ελληνικά κείμενα, हिन्दी पाठ।",
    "emoji 👩‍👩‍👧 🎉🎉 and e\u0301 combining, ﬁ ligatures, ½ and ² numbers, x₁₂₃",
    "HTTPServer/URLParser camelCase SHOUTING don't DON'T we're WE'RE  two   three    four",
] * 3
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
"""Llama 3's, which Qwen2's was made of: up to three digits are a piece."""

SPECIAL, PLAIN = ["<|begin|>", "<|end|>"], ["<think>", "</think>"]
CHARS = "".join(CORPUS) + "".join(map(chr, range(32, 127))) + "\x00\x7f\u2581\ufffdßéñ\u00a0\u3000\n\n  "


def texts() -> Iterator[str]:
    rng = random.Random(SEED)
    words = [*" ".join(CORPUS).split(" "), *SPECIAL, *PLAIN, " ", "  ", "\n"]
    for number in range(NUM_TEXTS):
        pieces = rng.choices(CHARS, k=number) if number % 2 else rng.choices(words, k=number)
        yield ("" if number % 2 else " ").join(pieces)


def byte_level(split: list[Any], *, has_pattern: bool, normalizer: Any = None, **options: bool) -> Tokenizer:
    """BPE of bytes as tokenizer.json files have it, trained on `CORPUS`."""
    tokenizer = Tokenizer(models.BPE(**options))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not has_pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def by_pattern(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level([], has_pattern=False),
    "smollm": lambda: byte_level([pre_tokenizers.Digits(individual_digits=True)], has_pattern=False),
    "llama-bpe": lambda: byte_level(by_pattern(LLAMA3_PATTERN), has_pattern=True, ignore_merges=True),
    "dbrx": lambda: byte_level(by_pattern(LLAMA3_PATTERN), has_pattern=True),
    "qwen2": lambda: byte_level(by_pattern(QWEN2_PATTERN), has_pattern=True, normalizer=normalizers.NFC()),
    "spm with prefix": lambda: sentencepiece(CORPUS, has_prefix=True),
    "spm": lambda: sentencepiece(CORPUS, has_prefix=False),
}


@pytest.mark.parametrize(("name", "adds_bos"), [(name, number % 2 > 0) for number, name in enumerate(TOKENIZERS)])
def test_texts_and_tokens_are_those_of_tokenizer_json(name: str, adds_bos: bool, tmp_path: Path) -> None:
    original = TOKENIZERS[name]()
    original.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    original.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    if adds_bos:
        bos_id = original.token_to_id("<|begin|>")
        original.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", bos_id)]
        )
    file = save(original, tmp_path, name)
    found = load_tokenizer(file).backend
    assert found.get_vocab() == original.get_vocab()
    for text in texts():
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids, f"seed {SEED}: {text!r}"
        for skips in (True, False):
            decoded = original.decode(ids, skip_special_tokens=skips)
            assert found.decode(ids, skip_special_tokens=skips) == decoded, f"seed {SEED}: {text!r}"


def save(tokenizer: Tokenizer, folder: Path, name: str) -> Path:
    """A GGUF file of this tokenizer alone."""
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", chat_template="{{ messages }}"
    ).save_pretrained(folder)
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    write_tokenizer(writer, folder, tokenizer.get_vocab_size(), name)
    finish(writer)
    return file


def test_the_chat_template_and_the_named_tokens_are_there(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["gpt-2"]()
    tokenizer.add_special_tokens(SPECIAL)
    found = Ours.load(save(tokenizer, tmp_path, "gpt-2"))
    assert found.chat_templates == {"default": "{{ messages }}"}
    assert found.bos_token_id == tokenizer.token_to_id("<|begin|>")
    assert set(found.special_tokens.values()) == set(SPECIAL)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "model.gguf", "llama"))
    assert not has_tokenizer(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match="has no tokenizer; give prompts as token ids"):
        load_tokenizer(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("model", "change", "problem"),
    [
        ("bert", lambda writer: None, "tokenizer.ggml.model='bert'; supported: gpt2, llama"),
        ("gpt2", lambda writer: writer.add_tokenizer_pre("falcon"), "tokenizer.ggml.pre='falcon'; supported: default"),
        ("gpt2", lambda writer: writer.add_token_merges(["a z"]), "could not be loaded: .*Token `z` out of vocabulary"),
        ("gpt2", lambda writer: writer.add_token_types([1]), "2 tokens and 1 types of tokens"),
        ("gpt2", lambda writer: writer.add_bos_token_id(7), "names token 7, and has 2"),
        ("llama", lambda writer: None, "lacks tokenizer.ggml.scores, one for each of 2 tokens"),
        ("gpt2", lambda writer: writer.add_chat_template("x" * 2**21), "the chat template has more than"),
    ],
)
def test_what_is_wrong_with_a_vocabulary_is_named(
    model: str, change: Callable[[gguf.GGUFWriter], None], problem: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(["a", "b"])
    change(writer)
    finish(writer)
    with pytest.raises(ModelLoadError, match=problem) as raised:
        load_tokenizer(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(raised.value)
