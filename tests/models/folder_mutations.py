"""Model folders that are wrong in one place, by seed; and, run as a program, what an engine makes of them.

``python folder_mutations.py WORK SEED FIRST LAST`` starts an engine from each folder in turn and prints a line of JSON
for each: its number, what was done to it, how it ended, and the seconds that it took.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BASES = ("llama", "shards", "window", "yarn", "gptq", "compressed")
GGUF_BASES = ("gguf", "gguf of text")
GGUF_FILE = "model.gguf"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
INDEX = "model.safetensors.index.json"
MAX_MEMORY_BYTES = 8 * 2**30
"""Of addresses: an engine that asks for what a number in a file says gets a MemoryError, and is found out."""

BAD_VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 7, -1, -(2**63), 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 10**9, 10**30, 0.0, 0.5,
    -1.5, 1e300, 1e-300, float("nan"), float("inf"), float("-inf"), "", "x", "0", "\ud800", "x" * 10**6,
    "../../etc/passwd", [], [[]], [1], [None], ["x"], {}, {"x": 1}, {"": None}, {"a": {"b": [1, 2]}},
]  # fmt: skip
FURTHER_FIELDS = [
    "num_labels", "id2label", "rope_scaling", "rope_theta", "rope_parameters", "quantization_config", "layer_types",
    "sliding_window", "max_window_layers", "use_sliding_window", "head_dim", "dtype", "torch_dtype", "auto_map",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "model_type", "architectures", "eos_token_id",
    "partial_rotary_factor", "text_config", "transformers_version", "attn_implementation", "rms_norm_eps",
    "pad_token_id", "original_max_position_embeddings", "attention_dropout", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "chat_template", "tokenizer_class", "added_tokens_decoder", "extra_special_tokens",
    "additional_special_tokens", "model_max_length", "bos_token", "eos_token", "unk_token", "pad_token",
    "clean_up_tokenization_spaces", "truncation", "padding", "padding_side", "special_tokens", "metadata", "weight_map",
]  # fmt: skip


ROPE_FIELDS = [
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor",
]  # fmt: skip


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _template(single: list[Any], special_tokens: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special_tokens}


def _charsmap(content: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def _added(token_id: int, content: str = "<x>", **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": content, **plain, **flags}


A, MISSING = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<missing>", "type_id": 0}}
GROWING = {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "a" * 10)] * 12}
COMPONENTS: list[tuple[str, Any]] = [
    *(("normalizer", _replace({"String": ""}, content)) for content in ("x", "", "x" * 10**5)),
    *(("normalizer", _replace({"Regex": regex}, "x")) for regex in ("", "a*", "^", r"\b", "(?=a)", "(a|a)*$", "(")),
    ("normalizer", {"type": "Prepend", "prepend": ""}),
    ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}),
    ("normalizer", GROWING),
    *(("normalizer", _charsmap(b)) for b in (b"", b"\0" * 4, b"\xff" * 64, struct.pack("<I", 2**31) + b"\0" * 64)),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ("pre_tokenizer", {"type": "FixedLength", "length": 10**30}),
    *(
        ("pre_tokenizer", {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": invert})
        for pattern in ({"String": ""}, {"Regex": ""}, {"Regex": "a*"}, {"Regex": r"(\w+\s*)+\d$"})
        for invert in (False, True)
    ),
    ("pre_tokenizer", {"type": "CharDelimiterSplit", "delimiter": ""}),
    *(("decoder", _replace({kind: ""}, "x")) for kind in ("String", "Regex")),
    *(("decoder", {"type": "Strip", "content": "h", "start": a, "stop": b}) for a in (0, 2**63, 100) for b in (0, 3)),
    ("decoder", {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
    ("decoder", {"type": "WordPiece", "prefix": "", "cleanup": True}),
    ("post_processor", _template([MISSING, A], {})),
    ("post_processor", _template([A], {"<x>": {"id": "<x>", "ids": [2**32 - 1], "tokens": ["<x>"]}})),
    ("post_processor", _template([{"Sequence": {"id": "B", "type_id": 0}}], {})),
    ("post_processor", {"type": "RobertaProcessing", "sep": ["</s>", 2**32 - 1], "cls": ["<s>", 0]}),
    ("truncation", {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 10}),
    ("padding", {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
    *(("added_tokens", [_added(token_id)]) for token_id in (383, 384, 10**5, 2**31, 2**32 - 1, 2**32, -1)),
    ("added_tokens", [_added(5000, " ", lstrip=True, rstrip=True, normalized=True)]),
    ("added_tokens", [_added(5000, "")]),
    ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}),
    ("model", {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}),
    ("model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "max_input_chars_per_word": 0}),
    ("model", {"type": "Unigram", "vocab": [], "unk_id": None}),
    ("model", {"type": "Unigram", "vocab": [["", -1.0]], "unk_id": 0}),
    ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"}),
    ("model", {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "continuing_subword_prefix": "x" * 9}),
]  # fmt: skip
"""Parts of a tokenizer.json that its library's own code takes badly: panics, aborts, memory without end."""


def make_bases(root: Path) -> Path:
    """The good folders that are mutated, under ``root``."""
    from checkpoints import make_checkpoint
    from gguf import GGMLQuantizationType
    from gguf_checkpoints import save_sentencepiece, write_gguf
    from models.quantised_checkpoints import compressed_tensors, gptq, write

    families = {
        "llama": ("llama2", 1),
        "shards": ("qwen3", 2),
        "window": ("qwen2-window", 1),
        "yarn": ("llama-yarn", 1),
    }
    for base, (family, shards) in families.items():
        make_checkpoint(root / base, family, shards=shards, tokenizer=True, num_hidden_layers=2)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    coded, _ = write(root / "llama", root / "of gptq", gptq(4, 32), config)
    coded.rename(root / "gptq")
    fields = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    coded, _ = compressed_tensors(root / "llama", root / "of compressed", **fields)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "llama" / file, coded)
    coded.rename(root / "compressed")
    write_gguf(root / "yarn", root / "gguf" / GGUF_FILE)
    source = make_checkpoint(root / "text", "llama3", num_hidden_layers=2)
    save_sentencepiece(source)
    write_gguf(source, root / "gguf of text" / GGUF_FILE, kind=GGMLQuantizationType.Q8_0)
    return root


def mutate(bases: Path, folder: Path, seed: int) -> str:
    """Make ``folder`` a copy of one of the bases that is wrong in one place; returns in which."""
    rng = random.Random(seed)
    base = rng.choice([*BASES, *GGUF_BASES])
    kinds = GGUF_KINDS if base in GGUF_BASES else KINDS
    kind = rng.choices(list(kinds), [weight for _, weight in kinds.values()])[0]
    shutil.copytree(bases / base, folder)
    return f"{base}, {kind}: {kinds[kind][0](folder, rng)}"


def _of_field(folder: Path, rng: random.Random) -> str:
    """Any value of a JSON file, also an inner one, is another or left out."""
    file = _json_file(folder, rng)
    content = json.loads(file.read_text())
    holder, key = rng.choice(list(_places(content)))
    value = rng.choice([*BAD_VALUES, ...])
    if value is ...:
        del holder[key]
    else:
        holder[key] = value
    file.write_text(json.dumps(content))
    return f"{file.name} {key} {'left out' if value is ... else json.dumps(value)[:40]}"


def _set(file: Path, field: str, value: Any) -> str:
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    return f"{file.name} {field} {json.dumps(value)[:200]}"


def _of_further_field(folder: Path, rng: random.Random) -> str:
    return _set(_json_file(folder, rng), rng.choice(FURTHER_FIELDS), rng.choice(BAD_VALUES))


def _of_size(folder: Path, rng: random.Random) -> str:
    """The numbers that decide how much memory is needed."""
    values = [0, -1, 1, 3, 10**5, 2**31 - 1, 2**31, 10**9, 2**62, 10**30, 1.5, "8"]
    content = json.loads((folder / "config.json").read_text())
    sizes = [key for key, value in content.items() if type(value) is int]
    return _set(folder / "config.json", rng.choice([*sizes, "num_labels"]), rng.choice(values))


def _of_rope(folder: Path, rng: random.Random) -> str:
    kind = rng.choice(["default", "linear", "llama3", "yarn", "dynamic", "longrope", "x"])
    rope = {field: rng.choice(BAD_VALUES) for field in rng.sample(ROPE_FIELDS, rng.randint(1, 6))}
    name = rng.choice(["rope_parameters", "rope_scaling"])
    return _set(folder / "config.json", name, {"rope_type": kind, **rope})


def _of_component(folder: Path, rng: random.Random) -> str:
    return _set(folder / "tokenizer.json", *rng.choice(COMPONENTS))


def _of_bytes(folder: Path, rng: random.Random) -> str:
    file = rng.choice(_files(folder))
    content = bytearray(file.read_bytes())
    small = max(1, min(len(content), 4096))
    ways: dict[str, Callable[[], object]] = {
        "truncated": lambda: content.__delitem__(slice(rng.randrange(len(content)), None)),
        "truncated early": lambda: content.__delitem__(slice(rng.randrange(small), None)),
        "a byte changed": lambda: content.__setitem__(rng.randrange(small), rng.randrange(256)),
        "bytes swapped": lambda: content.__setitem__(slice(0, small), bytes(rng.sample(content[:small], small))),
        "empty": content.clear,
        "zeros": lambda: content.__setitem__(slice(None), bytes(len(content))),
        "deep list": lambda: content.__setitem__(slice(None), b"[" * 10_000 + b"]" * 10_000),
        "deep dict": lambda: content.__setitem__(slice(None), b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        "deep in a dict": lambda: content.__setitem__(slice(1, 1), b'"x":' + b"[" * 10_000 + b"]" * 10_000 + b","),
        "a long number": lambda: content.__setitem__(slice(1, 1), b'"x":' + b"9" * 100_000 + b","),
        "a lone surrogate": lambda: content.__setitem__(slice(1, 1), b'"\\ud800":"\\udfff",'),
        "a key twice": lambda: content.__setitem__(slice(1, 1), b'"model_type":"gpt2","vocab_size":-1,'),
        "a byte order mark": lambda: content.__setitem__(slice(0, 0), b"\xef\xbb\xbf"),
        "utf-16": lambda: content.__setitem__(slice(None), bytes(content).decode("latin-1").encode("utf-16")),
        "not an object": lambda: content.__setitem__(slice(None), rng.choice([b"null", b"[1]", b'"x"', b"1", b"true"])),
    }
    way = rng.choice(list(ways))
    ways[way]()
    file.write_bytes(content)
    return f"{file.name} {way}"


def _of_header(folder: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.sample(names, 2)
    entry = header[name]
    numbers = [0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1.5, None, "1", len(data), len(data) + 1]
    way = rng.choice(
        ["length", "dtype", "shape", "dim", "offset", "overlap", "name", "twice", "left out", "metadata", "field"]
    )
    if way == "dtype":
        entry["dtype"] = rng.choice(["F64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "I64", "C64", "x", "", None, 1])
    elif way == "shape":
        entry["shape"] = rng.choice(
            [[], [0], None, "x", [10**30], [2**32, 2**32], [1] * 1000, [[1]], list(reversed(entry["shape"]))]
        )
    elif way == "dim":
        entry["shape"][0] = rng.choice(numbers)
    elif way == "offset":
        entry["data_offsets"][rng.randrange(2)] = rng.choice(numbers)
    elif way == "overlap":
        entry["data_offsets"] = header[other]["data_offsets"]
    elif way == "name":
        header[rng.choice(["", "x" * 10**6, "\ud800", "model.layers.0", "model.layers.99.input_layernorm.weight"])] = (
            header.pop(name)
        )
    elif way == "left out":
        del header[name]
    elif way == "metadata":
        header["__metadata__"] = rng.choice([None, 1, [], {"a": 1}, {"a": None}, {"a": "x" * 10**6}])
    elif way == "field":
        entry[rng.choice(list(entry))] = rng.choice(BAD_VALUES)
    raw = json.dumps(header).encode()
    if way == "twice":
        raw = raw[:-1] + b", " + json.dumps(name).encode() + b": " + json.dumps(header[other]).encode() + b"}"
    length = len(raw)
    if way == "length":
        length = rng.choice([0, 1, 7, length - 1, length + 1, len(content), 10**8, 10**9, 2**31, 2**63, 2**64 - 1])
    file.write_bytes(struct.pack("<Q", length) + raw + data)
    return f"{file.name} {way} of {name}: {json.dumps(header.get(name, ''))[:100]}, length {length}"


def _of_kind(folder: Path, rng: random.Random) -> str:
    names = [file.name for file in _files(folder)]
    name = rng.choice(
        [*names, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "tokenizer.model"]
    )
    file = folder / name
    file.unlink(missing_ok=True)
    ways: dict[str, Callable[[], object]] = {
        "a FIFO": lambda: os.mkfifo(file),
        "/dev/zero": lambda: file.symlink_to("/dev/zero"),
        "/dev/tty": lambda: file.symlink_to("/dev/tty"),
        "a folder": file.mkdir,
        "a loop": lambda: file.symlink_to(file.name),
        "a link to nothing": lambda: file.symlink_to("nothing"),
        "missing": lambda: None,
        "a sparse file of 1 TB": lambda: (file.touch(), os.truncate(file, 10**12)),
    }
    way = rng.choice(list(ways))
    ways[way]()
    return f"{name} {way}"


KINDS: dict[str, tuple[Callable[[Path, random.Random], str], float]] = {
    "field": (_of_field, 4),
    "further field": (_of_further_field, 3),
    "size": (_of_size, 2),
    "rope": (_of_rope, 2),
    "component": (_of_component, 2),
    "bytes": (_of_bytes, 2),
    "header": (_of_header, 2),
    "kind of file": (_of_kind, 1),
}


def _of_gguf_header(folder: Path, rng: random.Random) -> str:
    """A length, count, type, number or text of a GGUF file's header is another."""
    from gguf import GGUFReader

    file = folder / GGUF_FILE
    reader = GGUFReader(file)
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    field = rng.choice(fields[3:] if rng.random() < 0.9 else fields)  # the first three: version and counts
    number = rng.randrange(min(len(field.parts), 12))
    at = field.offset + sum(part.nbytes for part in field.parts[:number])
    size = field.parts[number].nbytes
    name = field.name
    del reader, field, fields  # the file is mapped
    values = [0, 1, 2, 3, 8, 9, 10, 31, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, rng.getrandbits(64)]
    value = rng.choice(values).to_bytes(8, "little")[:size].ljust(size, b"\xff")
    content = bytearray(file.read_bytes())
    content[at : at + size] = value
    file.write_bytes(content)
    return f"{GGUF_FILE} {name[:60]!r} part {number}: {value[:8].hex()}"


GGUF_KINDS: dict[str, tuple[Callable[[Path, random.Random], str], float]] = {
    "header": (_of_gguf_header, 8),
    "bytes": (_of_bytes, 2),
    "kind of file": (_of_kind, 1),
}


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _json_file(folder: Path, rng: random.Random) -> Path:
    names = [*JSON_FILES, *([INDEX] * 2 if (folder / INDEX).exists() else [])]
    return folder / rng.choice(names)


def _places(content: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of every value, a few of large lists and dicts."""
    if not isinstance(content, dict | list):
        return []
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    found: list[tuple[Any, Any]] = []
    for key in keys[:24]:
        found += [(content, key), *_places(content[key])]
    return found


async def start(folder: Path) -> str:
    """Start an engine from the folder and use it, if it starts; returns how that ended."""
    from aioengine import Engine
    from aioengine.errors import ConfigError, InvalidRequest, ModelLoadError, StepFailed

    try:
        async with Engine(model=str(folder), max_num_seqs=2, device="cpu", log_stats_interval_s=0) as engine:
            try:
                await engine.generate("a quick brown fox, 12", max_tokens=2, bad_words=["x"])
                ids = await engine.tokenize("hello " * 500)
                await engine.detokenize(ids)
            except (InvalidRequest, StepFailed) as error:
                return f"started, then {type(error).__name__}: {error}"
            return "started"
    except (ModelLoadError, ConfigError) as error:
        str(error).encode()
        return f"{type(error).__name__}: {error}"


def main(work: str, seed: str, first: str, last: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    bases, folder = Path(work) / "bases", Path(work) / "mutated"
    for number in range(int(first), int(last)):
        shutil.rmtree(folder, ignore_errors=True)
        what = mutate(bases, folder, int(seed) + number)
        print(json.dumps({"number": number, "what": what}), flush=True)
        began = time.monotonic()
        try:
            how = asyncio.run(start(folder))
        except BaseException as error:
            how = f"FAULT {type(error).__name__}: {error}"
        print(json.dumps({"how": how[:1000], "took_s": round(time.monotonic() - began, 3)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
