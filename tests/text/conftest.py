"""Small tokenizers of each kind that models have, trained here."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from aioengine.text.detokenizer import Detokenizer
from aioengine.text.tokenizer import Tokenizer as Ours

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't sleeping, is it? No!",
    "Naïve café visitors don't order 日本茶 with 😀😃👩‍👩‍👧 and  two   spaces.",
    "\n\n\tdef main():\n\t\treturn [x ** 2 for x in range(10)]",
] * 2

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def texts_of(detokenizer: Detokenizer, token_ids: Iterable[int]) -> list[str]:
    """What each id settles, and what the end does."""
    return [*map(detokenizer.feed_one, token_ids), detokenizer.flush()]


def chat_ids(tokenizer: Ours, messages: Any, **kwargs: Any) -> list[int]:
    """The ids of a chat; its template writes all special tokens."""
    return tokenizer.encode(tokenizer.render_chat(messages, **kwargs), add_special_tokens=False)


def byte_level(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """GPT-2's, Llama 3's and Qwen's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "é x", "<0xE2>"])  # a space is none of the byte characters; not a byte either
    tokenizer.add_special_tokens(["<|ünknown end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def qwens() -> Tokenizer:
    """As in the folders of Qwen 2 and 3."""
    tokenizer = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    flags = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(**flags)])
    tokenizer.post_processor = processors.ByteLevel(**flags)
    tokenizer.decoder = decoders.ByteLevel(**flags)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool call>"])
    return tokenizer


def byte_fallback(*steps: decoders.Decoder) -> Tokenizer:
    """Llama 2's, Mistral 7B's and Gemma's kind; by default with Llama 2's decoder."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator([text.replace("😀", "") for text in CORPUS], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    for token in [*trained["vocab"], "▁", "▁▁", "", "<0x+f>", "<0xg0>"]:
        vocabulary.setdefault(token, len(vocabulary))
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    llama = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(list(steps or llama))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["▁added", "zz top"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """T5's and XLNet's kind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder or decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoder or decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def end_of_word() -> Tokenizer:
    """GPT-1's and CLIP's kind: what a token shows depends on whether another one follows."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def without_decoder() -> Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


_REPLACE = decoders.Replace("▁", " ")
_BYTES = decoders.ByteFallback()

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))]

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "qwen": qwens,
    "byte level in a sequence": lambda: byte_level(
        decoders.Sequence([decoders.Replace("Ġ", "Ġé"), decoders.ByteLevel(), decoders.Strip(" ", 2, 0)])
    ),
    "llama 2": byte_fallback,
    "gemma": lambda: byte_fallback(_REPLACE, _BYTES, decoders.Fuse()),
    "byte fallback without fuse": lambda: byte_fallback(_REPLACE, _BYTES),
    "byte fallback before replace": lambda: byte_fallback(_BYTES, _REPLACE, decoders.Fuse()),
    "byte fallback before metaspace": lambda: byte_fallback(_BYTES, decoders.Metaspace()),
    "only fuse": lambda: byte_fallback(decoders.Fuse()),
    "only a strip of each token": lambda: byte_fallback(_REPLACE, decoders.Strip(" ", 1, 0)),
    "metaspace": unigram,
    "metaspace that never prepends": lambda: unigram(decoders.Metaspace(prepend_scheme="never")),
    "word piece": word_piece,
    "word piece without cleanup": lambda: word_piece(decoders.WordPiece(cleanup=False)),
    "end of word": end_of_word,
    "connectionist": lambda: word_piece(decoders.CTC(pad_token="a", word_delimiter_token="i")),
    "no decoder": without_decoder,
}


@pytest.fixture(scope="session", params=list(KINDS))
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer of each kind; nothing may change it."""
    return KINDS[request.param]()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as transformers 5 writes it: byte-level, with a chat template."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.fixture
def qwen_folder(tmp_path: Path) -> Path:
    """A model folder as Qwen's are."""
    tokenizer = qwens()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    added = {
        str(token_id): {"content": token.content, **{flag: getattr(token, flag) for flag in flags}}
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path
