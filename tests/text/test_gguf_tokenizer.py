"""Tokenizers that are built from GGUF files, against the tokenizer.json that the files were written from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from gguf_checkpoints import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, finish, sentencepiece, write_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_PATTERN
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_PATTERN

from aioengine.errors import ModelLoadError
from aioengine.models.formats.gguf_families import generation_config_of
from aioengine.models.formats.gguf_file import GgufFile
from aioengine.text.gguf_tokenizer import PATTERNS, build_tokenizer
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
    "qwen35": lambda: byte_level(by_pattern(QWEN35_PATTERN), has_pattern=True, normalizer=normalizers.NFC()),
    "olmo": lambda: byte_level([], has_pattern=False, normalizer=normalizers.NFC()),
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
        (
            "gpt2",
            lambda writer: writer.add_tokenizer_pre("kea"),
            "tokenizer.ggml.pre='kea': how such a vocabulary",
        ),
        ("gpt2", lambda writer: writer.add_token_merges(["a z"]), "could not be loaded: .*Token `z` out of vocabulary"),
        ("gpt2", lambda writer: writer.add_token_types([1]), "2 tokens and 1 types of tokens"),
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


@pytest.mark.parametrize(("model", "eos"), [("gpt2", None), ("llama", "</s>")])
def test_ids_that_a_vocabulary_lacks_are_not_given(model: str, eos: str | None, tmp_path: Path) -> None:
    """Converters have written -1 for none, which is 4294967295 in a file."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(["a", "b", "</s>", "c"])
    writer.add_token_scores([0.0] * 4)
    writer.add_bos_token_id(1)
    for add in (writer.add_pad_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(2**32 - 1)
    finish(writer)
    named = {"bos_token": "b", **({"eos_token": eos, "unk_token": "a"} if eos else {})}
    assert load_tokenizer(tmp_path / "model.gguf").named_tokens == named


PUBLISHED = {
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
        r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}"
        r"\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "chatglm-bpe": [LLAMA3_PATTERN],
    "minicpm5": [r"\p{N}{1,3}", QWEN2_PATTERN.replace(r"\p{N}| ?", r"\p{N}+| ?")],
}
"""The patterns of tokenizer.json of models whose files name them so."""


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_split_as_the_models_own_tokenizer_splits_them(pre: str) -> None:
    own = pre_tokenizers.Sequence([split for pattern in PUBLISHED[pre] for split in by_pattern(pattern)])
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in texts():
        expected = pre_tokenizers.Sequence([own, to_bytes]).pre_tokenize_str(text)
        assert splitter(pre).pre_tokenize_str(text) == expected, f"seed {SEED}: {text!r}"


def splitter(pre: str) -> Any:
    """What splits texts before tokens are merged, of a file that names it so."""
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": ["a"]}
    return build_tokenizer(GgufFile(Path("model.gguf"), metadata, {})).pre_tokenizer


@pytest.mark.parametrize("pre", PATTERNS)
def test_no_character_is_lost_when_a_text_is_split(pre: str) -> None:
    for text in texts():
        pieces = splitter(pre).pre_tokenize_str(text)
        assert decoders.ByteLevel().decode([piece for piece, _ in pieces]) == text, f"seed {SEED}: {text!r}"


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder", "gpt-4o", "default"])
@pytest.mark.parametrize("run", [" ", "\n", "A", "!"])
def test_a_long_run_is_split_in_the_time_of_reading_it(pre: str, run: str) -> None:
    pieces = splitter(pre).pre_tokenize_str(run * 100_000 + "日")  # in the square of its length it would take minutes
    assert sum(len(piece) for piece, _ in pieces) == 100_000 + 3


GEMMA = [(token, CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")]
WORDS = ["▁", "a", "b", "H", "i", "Hi", "▁a", "▁b", "▁Hi", "\n", "\t", "<", ">", "h", "1"]


def write(
    folder: Path, tokens: list[tuple[str, int]], arch: str = "gemma3", **keys: Any
) -> tuple[Path, dict[str, int]]:
    """A file of a sentencepiece vocabulary that begins with these tokens, and their ids.

    ``keys``: further metadata of the tokenizer's, tokens by their texts; a key that is None is left out.
    """
    given = {token for token, _ in tokens}
    tokens = [*tokens, *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    tokens += [(word, NORMAL) for word in WORDS if word not in given]
    ids = {token: token_id for token_id, (token, _) in enumerate(tokens)}
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_scores([-float(token_id) for token_id in range(len(tokens))])
    for key, value in {"add_space_prefix": False, **keys}.items():
        if key == "name":
            writer.add_name(value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", [ids[token] for token in value])
        elif value is not None and key.endswith("_id"):
            writer.add_uint32(f"tokenizer.ggml.{key}", ids[value])
        elif value is not None:
            writer.add_string(f"tokenizer.{key}", value)
    finish(writer)
    return folder / "model.gguf", ids


def test_tokens_of_white_space_alone_are_found_in_the_text_itself(tmp_path: Path) -> None:
    added = [" " * length for length in range(2, 32)] + ["\n" * length for length in range(2, 32)] + ["\t\t", "<h1>"]
    file, ids = write(tmp_path, [*GEMMA, *((token, USER_DEFINED) for token in added)], bos_token_id="<bos>")
    tokenizer = Ours.load(file)
    assert tokenizer.vocab_size == len(ids)
    assert tokenizer.encode("a  b") == [ids[token] for token in ("<bos>", "a", "  ", "b")]
    rng = random.Random(SEED)
    for _ in range(NUM_TEXTS):
        runs = [rng.choice(["a", "b", "Hi", "<h1>", "1"]) + rng.choice(" \n") * rng.randrange(2, 32) for _ in range(9)]
        text = "".join(runs)
        found = tokenizer.encode(text, add_special_tokens=False)
        pieces = [piece for run in runs for piece in (run.rstrip(" \n"), run[len(run.rstrip(" \n")) :])]
        assert found == [ids[piece] for piece in pieces], f"seed {SEED}: {text!r}"
        assert tokenizer.decode(found) == text, f"seed {SEED}: {text!r}"
        assert "".join(map(tokenizer.decode, found)) == text, f"seed {SEED}: {text!r}"


@pytest.mark.parametrize("spelling", ["▁▁", "  "])
@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
def test_a_token_of_two_spaces_is_the_same_however_a_file_writes_it(spelling: str, kind: int, tmp_path: Path) -> None:
    file, ids = write(tmp_path, [*GEMMA, (spelling, kind)])
    tokenizer = Ours.load(file)
    assert tokenizer.encode("a  b", add_special_tokens=False) == [ids[token] for token in ("a", spelling, "b")]
    assert tokenizer.decode([ids["a"], ids[spelling], ids["b"]]) == "a  b"


ENDS: dict[str, tuple[list[tuple[str, int]], dict[str, Any], set[str]]] = {
    "the turn's end that no key names": (GEMMA, {"eos_token_id": "<eos>"}, {"<eos>", "<end_of_turn>"}),
    "of a type that is no control token": ([("<|im_end|>", USER_DEFINED)], {"eos_token_id": "a"}, {"a", "<|im_end|>"}),
    "a list": (GEMMA[:3], {"eos_token_id": "<eos>", "eos_token_ids": ["<eos>", "a"]}, {"<eos>", "a"}),
    "a turn and a message": ([], {"eos_token_id": "a", "eot_token_id": "b", "eom_token_id": "h"}, {"a", "b", "h"}),
    "code": ([("<|fim_pad|>", CONTROL)], {"eos_token_id": "a", "fim_sep_token_id": "b"}, {"a", "b", "<|fim_pad|>"}),
    "harmony": (
        [(token, CONTROL) for token in ("<|return|>", "<|call|>", "<|end|>", "<|endoftext|>")],
        {"eos_token_id": "<|return|>"},
        {"<|return|>", "<|call|>", "<|endoftext|>"},
    ),
    "phi-3": ([("<|end|>", CONTROL), ("</s>", CONTROL)], {"eos_token_id": "a"}, {"a", "<|end|>", "</s>"}),
    "a strike-through of HTML": ([*GEMMA[:3], ("</s>", USER_DEFINED)], {"eos_token_id": "<eos>"}, {"<eos>"}),
    "Llama 2's": ([("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)], {}, {"</s>"}),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_a_text_ends_at_the_tokens_that_a_file_names_and_at_well_known_ones(case: str, tmp_path: Path) -> None:
    tokens, keys, ends = ENDS[case]
    file, ids = write(tmp_path, tokens, **keys)
    given = generation_config_of(GgufFile.read(file))["eos_token_id"]
    assert sorted(given) == sorted(ids[token] for token in ends)
    assert ends <= set(Ours.load(file).special_tokens.values())


PHI = [("<unk>", UNKNOWN), *((token, CONTROL) for token in ("<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>"))]


@pytest.mark.parametrize(
    ("name", "arch", "strips"),
    [
        ("Phi-3-mini-4k-instruct", "phi3", True),
        ("my PHI3 finetune", "llama", True),
        ("Phi 3.5 Mini Instruct", "phi3", True),
        ("Mistral 7B", "llama", False),
    ],
)
def test_white_space_after_a_token_of_phi_3_is_part_of_it(name: str, arch: str, strips: bool, tmp_path: Path) -> None:
    file, ids = write(tmp_path, PHI, arch, name=name, add_space_prefix=True)
    tokenizer = Ours.load(file)
    for text, bare in (("<|user|>\nHi", "<|user|>Hi"), ("Hi<|end|>\n\n", "Hi<|end|>")):
        found = [tokenizer.encode(each, add_special_tokens=False) for each in (text, bare)]
        assert (found[0] == found[1]) is strips
    for token in ("<s>", "<unk>", "<|endoftext|>"):
        kept = tokenizer.encode(f"{token}\nHi", add_special_tokens=False)
        assert kept == [ids[token], *(ids[piece] for piece in ("▁", "\n", "Hi"))]


TURN = "<start_of_turn>user\n{{ messages[0].content }}"
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("template", [TURN, "{{ bos_token }}" + TURN, "<bos>" + TURN])
@pytest.mark.parametrize("adds", [True, None])
def test_a_chat_begins_with_one_bos_where_the_file_says_so(template: str, adds: bool | None, tmp_path: Path) -> None:
    keys = {"bos_token_id": "<bos>", "chat_template": template, "add_bos_token": adds}
    file, ids = write(tmp_path, GEMMA, **keys)
    tokenizer = Ours.load(file)
    assert tokenizer.apply_chat_template(CHAT)[:2] == [ids["<bos>"], ids["<start_of_turn>"]]
    assert tokenizer.encode("Hi") == [ids["<bos>"], ids["Hi"]]
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert isinstance(rendered, str)
    assert tokenizer.encode_chat(rendered, add_special_tokens=False) == tokenizer.encode(
        rendered, add_special_tokens=False
    )


@pytest.mark.parametrize(("template", "num_bos"), [(TURN, 0), ("{{ bos_token }}" + TURN, 1)])
def test_a_chat_has_the_bos_of_its_template_alone_where_the_file_says_to_add_none(
    template: str, num_bos: int, tmp_path: Path
) -> None:
    keys = {"bos_token_id": "<bos>", "chat_template": template, "add_bos_token": False}
    file, ids = write(tmp_path, GEMMA, **keys)
    tokenizer = Ours.load(file)
    assert tokenizer.apply_chat_template(CHAT).count(ids["<bos>"]) == num_bos
    assert tokenizer.encode("Hi") == [ids["Hi"]]


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)])
def test_the_split_says_whether_there_is_a_bos_where_the_file_does_not(pre: str, adds: bool, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "<s>"])
    writer.add_token_types([NORMAL, CONTROL])
    writer.add_bos_token_id(1)
    writer.add_chat_template("a")
    finish(writer)
    tokenizer = Ours.load(tmp_path / "model.gguf")
    assert tokenizer.encode("a") == tokenizer.apply_chat_template(CHAT) == ([1, 0] if adds else [0])
