"""Finding a model on this machine, and reading its small files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from checkpoints import save_byte_tokenizer
from huggingface_hub import constants

from aioengine import Engine
from aioengine.config import EngineConfig
from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.models.folder import ModelFolder
from aioengine.models.loader import load_decoder
from aioengine.structured.constraints import Choice

Checkpoint = Callable[..., Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def put_in_cache(cache: Path, source: Path, *, ref: str = "main") -> Path:
    """Store a folder as org/name, in the cache's own layout: files are links to blobs."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in source.iterdir():
        shutil.copy(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(os.path.relpath(repo / "blobs" / file.name, snapshot))
    (repo / "refs").mkdir()
    (repo / "refs" / ref).write_text(COMMIT)
    return snapshot


def folder_with(path: Path, *, config: dict[str, Any] | None = None, generation: Any = None) -> ModelFolder:
    (path / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelFolder.read(path)


# Finding it


def test_the_bundled_model_is_called_demo_where_no_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ModelFolder.resolve("demo").path == ModelFolder.resolve(None).path
    (tmp_path / "demo").write_text("")
    with pytest.raises(ModelLoadError, match="demo is a file"):
        ModelFolder.resolve("demo")


def test_a_folder_is_itself(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama2")
    folder = ModelFolder.resolve(str(path))
    assert folder.path == path
    assert folder.config["architectures"] == ["LlamaForCausalLM"]
    assert folder.eos_token_ids == (2,)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_hub_id_is_found_in_the_cache_without_a_network(checkpoint: Checkpoint, hub_cache: Path, shards: int) -> None:
    snapshot = put_in_cache(hub_cache, checkpoint("qwen3", shards=shards))
    folder = ModelFolder.resolve("org/name")
    assert folder.path == snapshot
    assert load_decoder(folder, EngineConfig()).config.architecture == "Qwen3ForCausalLM"


def test_a_revision_is_found_by_its_ref_and_by_its_commit(checkpoint: Checkpoint, hub_cache: Path) -> None:
    snapshot = put_in_cache(hub_cache, checkpoint("llama2"), ref="v2")
    assert ModelFolder.resolve("org/name", revision="v2").path == snapshot
    assert ModelFolder.resolve("org/name", revision=COMMIT).path == snapshot
    with pytest.raises(ModelLoadError, match="org/name at revision main"):
        ModelFolder.resolve("org/name", revision="main")


def test_the_cache_serves_when_nobody_answers(
    checkpoint: Checkpoint, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: refused at once
    snapshot = put_in_cache(hub_cache, checkpoint("llama2"))
    assert ModelFolder.resolve("org/name").path == snapshot


@pytest.mark.parametrize("model", ["org/other", "plain-name", "not a name"])
def test_what_is_nowhere_says_where_it_was_looked_for(hub_cache: Path, model: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        ModelFolder.resolve(model)
    for text in (repr(model), str(hub_cache), "HF_HUB_OFFLINE", "path of a folder"):
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        *((f, {}, "no folder") for f in ("/no/such/folder", "./missing", "../missing", "~/no-such-folder", "a/b/c")),
        ("{folder}/model.safetensors", {}, "is a file; give the folder"),
        ("{folder}", {"revision": "main"}, "is for hub models"),
    ],
)
def test_a_path_that_is_no_folder_is_no_hub_id(
    checkpoint: Checkpoint, model: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        ModelFolder.resolve(model.format(folder=checkpoint("llama2")), **options)


@pytest.mark.parametrize("with_weights", [True, False])
def test_only_what_loading_needs_is_downloaded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, with_weights: bool
) -> None:
    files = [
        "config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "tokenizer.model", "merges.txt",
        "chat_template.jinja", "original/params.json", "consolidated.safetensors", "README.md", "model.gguf",
    ]  # fmt: skip
    asked: list[str] = []

    def download(model: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: object) -> str:
        asked.extend(
            huggingface_hub.utils.filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(checkpoint("llama2"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    ModelFolder.resolve("org/name", with_weights=with_weights)
    weights = ["model-00001-of-00002.safetensors"] if with_weights else []
    assert sorted(asked) == sorted(["config.json", "tokenizer.model", "merges.txt", "chat_template.jinja", *weights])


def test_files_that_torch_saved_are_downloaded_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(folder_with(tmp_path).path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    ModelFolder.resolve("org/name")
    assert "*.safetensors" in asked[0]
    assert "pytorch_model*.bin" not in asked[0]
    assert "pytorch_model*.bin" in asked[1]


def test_reading_a_folder_needs_no_torch(checkpoint: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path; from aioengine.models.folder import ModelFolder;"
        f"ModelFolder.resolve({str(checkpoint('llama2'))!r}).sampling_defaults;"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Its small files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_broken_json_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        ModelFolder.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": 8}, (8,)),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, (8, 9)),
        ({"eos_token_id": [0, 7]}, {}, (0, 7)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({}, {}, ()),
    ],
)
def test_eos_tokens(tmp_path: Path, config: dict[str, Any], generation: Any, expected: tuple[int, ...]) -> None:
    assert folder_with(tmp_path, config=config, generation=generation).eos_token_ids == expected


NAMED = {"eos_token": "<|im_end|>"}
ADDED = {"added_tokens": [{"id": 5, "content": "<|im_end|>"}], "model": {"type": "BPE", "vocab": {"a": 0}}}
EOS_FILES: dict[str, dict[str, Any]] = {
    "an added token": {"tokenizer_config.json": NAMED, "tokenizer.json": ADDED},
    "an object": {"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer.json": ADDED},
    "declared": {"tokenizer_config.json": {**NAMED, "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}},
    "named in a file of its own": {"special_tokens_map.json": NAMED, "tokenizer.json": ADDED},
}


@pytest.mark.parametrize("case", EOS_FILES)
@pytest.mark.parametrize(("generation", "expected"), [({"eos_token_id": [8, 9]}, (8, 9, 5)), ({}, (5,))])
def test_the_tokenizers_own_eos_ends_a_text_too(
    case: str, generation: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    for name, content in EOS_FILES[case].items():
        (tmp_path / name).write_text(json.dumps(content))
    assert folder_with(tmp_path, config={"vocab_size": 10}, generation=generation).eos_token_ids == expected
    assert folder_with(tmp_path, config={"vocab_size": 5}, generation={}).eos_token_ids == ()


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": "{"},
        {"tokenizer_config.json": "[" * 10_000},
        {"tokenizer_config.json": json.dumps(NAMED), "tokenizer.json": '{"added_tokens": 7}'},
        {"tokenizer_config.json": json.dumps(NAMED), "tokenizer.json": json.dumps(ADDED).replace("5", "-5")},
        {
            "tokenizer_config.json": json.dumps(
                {**NAMED, "added_tokens_decoder": {"9" * 5000: {"content": "<|im_end|>"}}}
            )
        },
        {"tokenizer_config.json": json.dumps({"eos_token": ["a"]})},
    ],
)
def test_a_damaged_tokenizer_names_no_eos(files: dict[str, str], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert folder_with(tmp_path, generation={"eos_token_id": 3}).eos_token_ids == (3,)


async def test_an_answer_ends_at_the_tokenizers_eos_unless_it_is_ignored(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("llama2"), tmp_path / "model")
    save_byte_tokenizer(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": None}))
    async with Engine(str(folder), kv_cache_memory_bytes=2**24, show_progress=False, num_threads=1) as engine:
        eos_id = engine.get_tokenizer().eos_token_id
        only_eos: dict[str, Any] = {"allowed_token_ids": [eos_id], "max_tokens": 3}
        ended, ignored = [await engine.generate("a", ignore_eos=ignores, **only_eos) for ignores in (False, True)]
        assert (ended.outputs[0].finish_reason, len(ended.outputs[0].token_ids)) == ("stop", 1)
        assert (ignored.outputs[0].finish_reason, len(ignored.outputs[0].token_ids)) == ("length", 3)
        with pytest.raises(InvalidRequest, match="holds only tokens that end the output"):
            await engine.generate("a", min_tokens=2, **only_eos)
        constrained = await engine.generate("a", max_tokens=9, structured=Choice(["yes"]))
        assert (constrained.outputs[0].text, constrained.outputs[0].finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({"do_sample": False}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.0}, {"temperature": 0.0}),
        ({"top_k": 20, "min_p": 0, "repetition_penalty": 1.1}, {"top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1}),
        ({"temperature": None, "top_p": 1}, {"top_p": 1.0}),
    ],
)
def test_sampling_defaults(tmp_path: Path, generation: Any, expected: dict[str, Any]) -> None:
    assert folder_with(tmp_path, generation=generation).sampling_defaults == expected


BAD_EOS: tuple[Any, ...] = ("</s>", -1, [1, "2"], True, 1.5)


@pytest.mark.parametrize(
    ("attribute", "generation"),
    [
        *(("eos_token_ids", {"eos_token_id": value}) for value in BAD_EOS),
        *(
            ("sampling_defaults", {name: value})
            for name, value in {"temperature": -1, "top_p": 0, "top_k": 1.5, "min_p": "low"}.items()
        ),
    ],
)
def test_what_is_out_of_range_is_the_files_fault(tmp_path: Path, attribute: str, generation: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {next(iter(generation))}"):
        getattr(folder_with(tmp_path, generation=generation), attribute)


# Files that are none


def put_in_place_of(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"zeros": "/dev/zero", "loop": file.name, "nothing": "no-such-file"}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "zeros", "loop", "nothing"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
)
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    assert ModelFolder.read(tmp_path).config == {}, "links to regular files are followed"
    put_in_place_of(tmp_path / name, kind)
    with pytest.raises(ModelLoadError, match=name):
        ModelFolder.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "too deep"),
        (b'{"\\ud800": 1}', "lone surrogate"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON"),
    ],
)
def test_json_that_no_model_has_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"config\.json.* {problem}"):
        ModelFolder.read(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / name).open("ab") as file:
        file.truncate(2**40)  # without a block on the disk
    with pytest.raises(ModelLoadError, match=rf"{name} has"):
        ModelFolder.read(tmp_path)
