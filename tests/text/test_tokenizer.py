"""A folder's tokenizer: the same ids as AutoTokenizer's, and errors that say what to do."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from text.conftest import byte_fallback, byte_level, chat_ids, texts_of, unigram, without_decoder, word_piece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.text.detokenizer import make_detokenizer
from aioengine.text.loading import PLAIN_MODEL_TYPES, LoadedTokenizer, failures_as, has_tokenizer, load_tokenizer
from aioengine.text.token_table import decoding
from aioengine.text.tokenizer import MAX_CHARS_HOLDING_GIL, Tokenizer

MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Naïve café? 😀"}]
TEXTS = [
    "",
    " ",
    "The quick  brown fox",
    "naïve 日本茶 😀👩‍👩‍👧\n\n",
    "<s>a</s><|im_end|> <tool call>é x",
    "e\u0301 12345 don't",
    "fox " * 2000,
]

QWENS_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
PUTS_A_TOKEN_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [393], "tokens": ["<|im_start|>"]}},
}
PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
QWENS_END = {**PLAIN_TOKEN, "content": "<|endoftext|>", "normalized": False, "special": True}


def rewrite(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def assert_like_auto_tokenizer(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), auto_tokenizer(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"], text
    ids = theirs(" ".join(TEXTS[:-1]))["input_ids"]
    for options in ({}, {"skip_special_tokens": True}):
        assert ours.decode(ids, **options) == theirs.decode(ids, clean_up_tokenization_spaces=False, **options)
    for has_prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=has_prompt, return_dict=False)
        assert chat_ids(ours, MESSAGES, add_generation_prompt=has_prompt) == expected
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)


def test_a_callers_tokenizer_has_transformers_names_and_defaults(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), auto_tokenizer(folder)
    text = " ".join(TEXTS[:-1])
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.decode(ids[0]) == theirs.decode(ids[0])
    expected = theirs.apply_chat_template(MESSAGES, return_dict=False)
    assert ours.apply_chat_template(MESSAGES) == expected
    assert ours.apply_chat_template(conversation=MESSAGES, tools=None, return_dict=False) == expected
    for options in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert ours.apply_chat_template(MESSAGES, tokenize=False, **options) == expected
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.vocab_size == len(ours) == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat_template == theirs.chat_template
    assert isinstance(ours.backend, Backend)
    with pytest.raises(InvalidRequest, match="return_dict"):
        ours.apply_chat_template(MESSAGES, return_dict=True)


@pytest.mark.parametrize("config", [{"num_labels": 10**9}, {"text_config": {"num_labels": 10**9}}])
def test_labels_without_number_are_refused_before_transformers_lists_them(folder: Path, config: dict[str, Any]) -> None:
    rewrite(folder / "config.json", **config)
    with pytest.raises(ModelLoadError, match=r"config\.json: num_labels=1000000000; 0 to 65536 is needed"):
        load_tokenizer(folder)


# None is what AutoTokenizer makes of a folder without config.json; the last two have classes of their own.
@pytest.mark.parametrize("model_type", [*sorted(PLAIN_MODEL_TYPES), None, "qwen2", "gemma3_text"])
def test_a_folder_gives_the_ids_of_auto_tokenizer(folder: Path, model_type: str | None) -> None:
    (folder / "config.json").unlink()
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert_like_auto_tokenizer(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"eos_token": "<|new|>"},
        {"pad_token": {"__type": "AddedToken", "content": "</s>", "special": True}},
        {"unk_token": "fox"},
        {"image_token": "<|image|>"},
        {"tool_token": "<tool call>", "chat_template": "{{ tool_token }}"},
        {"additional_special_tokens": ["<|im_end|>", "brown"]},
        {"additional_special_tokens": ["<tool call>"]},
        {"pad_token": "<tool call>"},
        {"extra_special_tokens": {"tool": "<tool call>"}},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": ...},
        {"split_special_tokens": True},
        {"add_prefix_space": True, "clean_up_tokenization_spaces": True, "model_max_length": 5},
        {"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]},
        {"added_tokens_decoder": {}},
        {"added_tokens_decoder": {"1": {"content": "</s>", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"396": {"content": "<tool call>", "special": False, "lstrip": True}}},
        {"added_tokens_decoder": {"900": {"content": "quick", "special": False, "lstrip": True}}},
    ],
)
@pytest.mark.filterwarnings("default")
def test_settings_mean_what_they_mean_to_auto_tokenizer(folder: Path, settings: dict[str, Any]) -> None:
    rewrite(folder / "tokenizer_config.json", **settings)
    for token in settings.get("added_tokens_decoder", {}).values():
        token.setdefault("single_word", False)
    assert_like_auto_tokenizer(folder)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"added_tokens_decoder": ...},  # as transformers 5 saves it
        {"tokenizer_class": "Qwen2TokenizerFast", "unk_token": "<|endoftext|>", "bos_token": "<|im_start|>"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"add_eos_token": True},
        {"add_prefix_space": True},
        {"eos_token": ..., "pad_token": ...},
        {"added_tokens_decoder": {"392": {"content": "<|endoftext|>", "special": True}}},
        {"added_tokens_decoder": {}},
        {"added_tokens_decoder": {"393": QWENS_END, "392": {**QWENS_END, "content": "<|im_start|>"}}},
        {"added_tokens_decoder": {"900": {"content": "quick", "special": False, "lstrip": True}}},
        {"additional_special_tokens": ["<tool call>"]},
        {"split_special_tokens": True},
    ],
    ids=str,
)
def test_a_folder_of_qwens_gives_the_ids_of_auto_tokenizer(
    qwen_folder: Path, settings: dict[str, Any], model_type: str
) -> None:
    rewrite(qwen_folder / "config.json", model_type=model_type)
    rewrite(qwen_folder / "tokenizer_config.json", **settings)
    assert_like_auto_tokenizer(qwen_folder)


SPLITS_OF_NEWER_QWENS = {
    "type": "Split",
    "pattern": {"Regex": r"[\p{L}\p{M}]+|\s+"},
    "behavior": "Isolated",
    "invert": False,
}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLITS_OF_NEWER_QWENS, QWENS_BYTES]}},
        {"pre_tokenizer": QWENS_BYTES},
        {"decoder": None},
        {"post_processor": None},
        {"post_processor": PUTS_A_TOKEN_FIRST},
        {"added_tokens": []},
        {"added_tokens": [{**PLAIN_TOKEN, "id": 395, "content": "<tool call>"}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("declares", [True, False])
def test_what_qwens_class_builds_anew_is_not_taken_from_the_file(
    qwen_folder: Path, parts: dict[str, Any], declares: bool
) -> None:
    rewrite(qwen_folder / "tokenizer.json", **parts)
    if not declares:
        named = {"additional_special_tokens": ..., "eos_token": None, "pad_token": None}
        rewrite(qwen_folder / "tokenizer_config.json", added_tokens_decoder=..., **named)
    assert_like_auto_tokenizer(qwen_folder)


def test_files_beside_the_settings_mean_what_they_mean_to_auto_tokenizer(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[-1].content }}")
    assert_like_auto_tokenizer(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}))
    assert_like_auto_tokenizer(folder)


def test_a_length_baked_into_tokenizer_json_cuts_and_pads_nothing(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    assert_like_auto_tokenizer(folder)


@pytest.mark.parametrize("kind", ["folder", "qwen_folder"])
def test_a_plain_folder_needs_neither_transformers_nor_torch(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    program = (
        "import sys; from pathlib import Path\n"
        "import aioengine.text\n"
        "assert 'tokenizers' not in sys.modules\n"
        "from aioengine.text.tokenizer import Tokenizer\n"
        "Tokenizer.load(Path(sys.argv[1])).encode('hello')\n"
        "sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program, str(folder)]).returncode == 0


def test_long_texts_have_the_same_ids_as_short_ones(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    words = tokenizer.encode(" fox", add_special_tokens=False)
    num_words = MAX_CHARS_HOLDING_GIL
    assert tokenizer.encode(" fox" * num_words) == [tokenizer.bos_token_id, *words * num_words]
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|ünknown end|>"]
    assert tokenizer.special_tokens.keys() == {tokenizer.get_vocab()[token] for token in special}


def tokenizer_of(backend: Backend) -> Tokenizer:
    return Tokenizer(LoadedTokenizer(backend=backend))


@pytest.mark.parametrize(
    ("backend", "spaced", "together"),
    [
        (word_piece(), "fox [CLS] [CLS] fox [CLS]", "fox [CLS][CLS] fox [CLS]"),
        (without_decoder(), "fox [CLS] [CLS] fox [CLS]", "fox [CLS][CLS] fox [CLS]"),
        (byte_fallback(), "fox[CLS][CLS]fox[CLS]", "fox[CLS][CLS]fox[CLS]"),
        (byte_level(), "fox[CLS][CLS]fox[CLS]", "fox[CLS][CLS]fox[CLS]"),
    ],
    ids=["word piece", "no decoder", "byte fallback", "byte level"],
)
def test_special_tokens_are_joined_if_asked_for(backend: Backend, spaced: str, together: str) -> None:
    backend.add_special_tokens(["[CLS]"])
    backend.add_tokens(["fox"])
    fox, special = backend.token_to_id("fox"), backend.token_to_id("[CLS]")
    tokenizer = tokenizer_of(backend)
    table = tokenizer.token_table(skip_special_tokens=False)
    texts = []
    for contents in ({}, tokenizer.joined_special_tokens):
        detokenizer = make_detokenizer(table, joined=contents)
        texts.append("".join(texts_of(detokenizer, [fox, special, special, fox, special])))
    assert texts == [spaced, together]


def test_a_special_token_of_half_characters_is_joined_where_others_need_not_be() -> None:
    plain = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<s>", "</s>"])
    assert tokenizer_of(plain).joined_special_tokens == {}
    plain.add_special_tokens(["<é>"])  # as bytes, é is half a character
    assert tokenizer_of(plain).joined_special_tokens == {1: "<s>", 2: "</s>", 3: "<é>"}


# Bad words


@pytest.mark.parametrize(
    ("backend", "num_beginnings"),
    [(byte_level(), 2), (byte_fallback(), 2), (unigram(), 1), (word_piece(), 1)],
    ids=["byte level", "byte fallback", "metaspace", "word piece"],
)
def test_a_bad_word_is_encoded_with_and_without_a_space_each_once(backend: Backend, num_beginnings: int) -> None:
    tokenizer = tokenizer_of(backend)
    for word in ("fox", " fox", "  lazy dog", "日本茶", "😀"):
        forms = [word.lstrip(), " " + word.lstrip()]
        expected = [tuple(backend.encode(form, add_special_tokens=False).ids) for form in forms]
        assert tokenizer.encode_bad_words([word]) == tuple(dict.fromkeys(expected))
    assert len(tokenizer.encode_bad_words(["fox"])) == num_beginnings
    assert tokenizer.encode_bad_words(["fox", " fox", "dog", "dog"]) == tokenizer.encode_bad_words(["fox", "dog"])
    assert tokenizer.encode_bad_words([]) == ()


def test_a_word_without_tokens_forbids_nothing_and_one_that_cannot_be_is_the_callers_fault() -> None:
    backend = word_piece()
    backend.normalizer = normalizers.BertNormalizer(clean_text=True)
    tokenizer = tokenizer_of(backend)
    assert tokenizer.encode_bad_words(["\x00", "fox"]) == tokenizer.encode_bad_words(["fox"])
    with pytest.raises(InvalidRequest, match="surrogate") as raised:
        tokenizer.encode_bad_words(["a", "\ud800"])
    assert raised.value.param == "bad_words"


def test_several_threads_may_use_one_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text, words = "The quick brown fox 😀 " * 500, [f"fox {number} dog" for number in range(200)]
    ids, bad_words = tokenizer.encode(text), tokenizer.encode_bad_words(words)

    def work() -> None:
        assert all(tokenizer.encode(text) == ids for _ in range(5))
        assert tokenizer.encode_bad_words(words) == bad_words

    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work) for _ in range(3)]
        while not all(future.done() for future in working):
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert [future.result() for future in working] == [None] * 3


def test_a_tokenizer_that_is_a_python_class_works_too(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(str(tmp_path))
    tokenizer = Tokenizer.load(tmp_path)
    text = "Naïve 😀 café"
    ids = tokenizer.encode(text)
    assert ids == auto_tokenizer(tmp_path)(text)["input_ids"]
    assert tokenizer.decode([*ids, 10**6], skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == ids[-1]
    texts = texts_of(make_detokenizer(tokenizer.token_table()), ids)
    assert "".join(texts) == text
    assert texts[0] == "N"
    assert tokenizer.encode_bad_words(["ab"]) == ((100, 101), (35, 100, 101))
    contents = tokenizer.joined_special_tokens
    assert {"</s>", "<pad>"} <= set(contents.values())
    detokenizer = make_detokenizer(tokenizer.token_table(skip_special_tokens=False), joined=contents)
    assert "".join(texts_of(detokenizer, [100, *[tokenizer.eos_token_id] * 3, 101])) == "a</s></s></s>b"


def test_a_vocabulary_and_merges_are_a_tokenizer_and_one_without_the_other_says_what_it_needs(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: token_id for token_id, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": len(tokens)}))
    assert load_tokenizer(tmp_path).backend.encode("hello").tokens == ["he", "l", "l", "o"]
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ModelLoadError, match=r"vocab\.json needs merges\.txt beside it"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_or_its_vocabulary_says_what_is_missing(folder: Path) -> None:
    assert has_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    for tokenizer_class in ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer"):
        rewrite(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)
        with pytest.raises(ModelLoadError, match=r"no vocabulary; one of these is missing: tokenizer\.json"):
            Tokenizer.load(folder)
    (folder / "tokenizer_config.json").unlink()
    assert not has_tokenizer(folder)
    with pytest.raises(ModelLoadError, match=r"has no tokenizer .* prompts as token ids"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b"[]"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load_tokenizer(folder)


def test_code_of_a_folder_is_never_run(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load_tokenizer(folder)


def test_what_is_no_text_is_the_callers_fault(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", chat_template=...)
    tokenizer = Tokenizer.load(folder)
    calls: list[tuple[Callable[[], object], str]] = [
        *((partial(tokenizer.encode, text), "surrogate") for text in ("a \ud800 b", "\udfff" * 1001)),
        (partial(tokenizer.encode, 5), "must be a str, not int"),
        (partial(chat_ids, tokenizer, MESSAGES), r"chat_template\.jinja"),
    ]
    for call, problem in calls:
        with pytest.raises(InvalidRequest, match=problem) as raised:
            call()
        assert raised.value.param == "prompt"


# Tokenizers at which their library fails


MISSING = {"SpecialToken": {"id": "<missing>", "type_id": 0}}
REPLACES_NOTHING = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SLOW_REGEX = {"type": "Split", "pattern": {"Regex": r"(\w+\s*)+\d$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [MISSING], "pair": [], "special_tokens": {}}},
            "does not work: no entry found for key",
        ),
        ({"normalizer": REPLACES_NOTHING}, "does not work: index out of bounds"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "does not work: chunk size"),
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 12}}, "more than 1000 characters of one"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "more than 1000 characters of one"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}}, "is cut short"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "could not be loaded"),
        ({"model": {"type": "Novel"}}, "could not be loaded"),
    ],
)
def test_a_tokenizer_that_panics_or_asks_for_all_memory_is_not_loaded(
    folder: Path, changes: dict[str, Any], problem: str
) -> None:
    rewrite(folder / "tokenizer.json", **changes)
    with pytest.raises(ModelLoadError, match=problem):
        Tokenizer.load(folder)


@pytest.mark.parametrize("token_id", [10_000_000, 2**32 - 1])
def test_token_ids_far_beyond_the_models_are_refused(folder: Path, token_id: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["<far>"] = token_id
    far = content["added_tokens"][0] | {"id": token_id, "content": "<far>"}
    rewrite(folder / "tokenizer.json", model=content["model"], added_tokens=[*content["added_tokens"], far])
    with pytest.raises(ModelLoadError, match=f"token id {token_id}, far beyond"):
        Tokenizer.load(folder)
    rewrite(folder / "config.json", vocab_size=400)
    with pytest.raises(ModelLoadError, match="less than 65936 is needed"):
        Tokenizer.load(folder)


def test_a_panic_at_one_text_is_that_texts_error(folder: Path) -> None:
    rewrite(folder / "tokenizer.json", pre_tokenizer=SLOW_REGEX)
    tokenizer = Tokenizer.load(folder)
    for text in ("hello " * 50, "hello " * 500):  # by both ways into the library
        with pytest.raises(InvalidRequest, match="cannot encode this text: Onig") as raised:
            tokenizer.encode(text)
        assert raised.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="bad_words holds a word that cannot be encoded") as raised:
        tokenizer.encode_bad_words(["hello " * 50])
    assert raised.value.param == "bad_words"
    assert tokenizer.decode(tokenizer.encode("a")) == "<s>a"


@pytest.mark.parametrize("kind", [models.WordLevel, models.WordPiece])
def test_a_vocabulary_without_its_unknown_token(kind: Any) -> None:
    tokenizer = tokenizer_of(Backend(kind(vocab={"a": 0}, unk_token="<unk>")))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(InvalidRequest, match=r"cannot encode this text: Word.* Missing"):
        tokenizer.encode("b")


def test_a_decoder_that_panics_is_an_error_of_the_request() -> None:
    class PanicException(BaseException):
        """As Rust's is called."""

    def panic(ids: list[int]) -> str:
        raise PanicException("out of bounds")

    with pytest.raises(InvalidRequest, match="cannot decode these tokens: out of bounds") as refused:
        decoding(panic)([1])
    assert refused.value.param == "token_ids"


def test_interrupts_pass() -> None:
    with pytest.raises(KeyboardInterrupt), failures_as(InvalidRequest):
        raise KeyboardInterrupt
