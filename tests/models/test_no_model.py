"""Folders and files that are no model, and near misses: each is refused by its cause, with what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_checkpoints import finish

from aioengine.config import EngineConfig
from aioengine.errors import ModelLoadError
from aioengine.executor.model_info import read_model_info
from aioengine.models.folder import DEMO_MODEL
from aioengine.models.formats.catalogue import read_catalogue
from aioengine.text.loading import load_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943\nsize 988097824\n"
PAGE = "<!DOCTYPE html><html><title>Sign in</title></html>"
WEIGHTS = "model.safetensors"
Change = Callable[[Path], object]


def names(architecture: str, **more: Any) -> Change:
    return lambda folder: (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **more}))


def emptied(*kept: str, **files: str) -> Change:
    """Nothing but these files of the bundled model, and files of these texts, whose names have "__" for a dot."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return change


def renamed(*to: str) -> Change:
    def change(folder: Path) -> None:
        for name in to:
            shutil.copy(folder / WEIGHTS, folder / name)
        (folder / WEIGHTS).unlink()

    return change


def holding(*inner: str) -> Change:
    def change(folder: Path) -> None:
        emptied()(folder)
        for name in inner:
            shutil.copytree(DEMO_MODEL, folder / name)

    return change


def gguf_file(name: str, arch: str, kind: str | None = None) -> Change:
    def change(folder: Path) -> None:
        emptied()(folder)
        writer = gguf.GGUFWriter(folder / name, arch)
        if kind is not None:
            writer.add_type(kind)
        finish(writer)

    return change


CASES: dict[str, tuple[Change, str]] = {
    **{
        f"a pointer for {name}": (
            lambda folder, name=name: (folder / name).write_text(POINTER),
            rf"{name} is a Git LFS pointer in place of the file: run `git lfs pull`, or use `hf download`",
        )
        for name in ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", WEIGHTS)
    },
    "a pointer for a GGUF file": (emptied(model__gguf=POINTER), r"model\.gguf is a Git LFS pointer"),
    "a web page": (lambda folder: (folder / WEIGHTS).write_text(PAGE), "is a web page in place of the file: download"),
    "an adapter": (emptied(adapter_config__json="{}"), r"is an adapter \(LoRA\), and no model: merge it into its base"),
    "an adapter with a config": (
        lambda folder: (renamed("adapter_model.bin")(folder), (folder / "adapter_config.json").write_text("{}")),
        r"has no weights .* is an adapter \(LoRA\), and no model: merge it",
    ),
    "a pipeline": (emptied(model_index__json="{}"), "is a pipeline of diffusers, which makes images and no text"),
    "a part of a pipeline": (
        emptied(config__json='{"_class_name": "UNet2DConditionModel"}'),
        "architectures=None; .* a part of a pipeline of diffusers",
    ),
    "a reranker": (names("Qwen3ForSequenceClassification"), "it classifies, and generates no text"),
    "a classifier of tokens": (names("GPT2ForTokenClassification"), "it classifies, and generates no text"),
    "an extractor of answers": (names("GPT2ForQuestionAnswering"), "it classifies, and generates no text"),
    "a model of rewards": (names("Qwen2ForRewardModel"), "it classifies, and generates no text"),
    "a model that fills in": (names("BertForMaskedLM"), "fills in what is masked, and generates no text"),
    "embeddings": (names("BertModel"), "it is a model without a head, which gives embeddings, and generates no text"),
    "embeddings by a decoder": (names("MistralModel"), "without a head, which gives embeddings"),
    "embeddings of sentence-transformers": (
        lambda folder: (folder / "config_sentence_transformers.json").write_text("{}"),
        "is a model of sentence-transformers, which gives embeddings and no text",
    ),
    "images and texts": (names("CLIPModel"), "it sees images, and generates no text"),
    "boxes in images": (names("DetrForObjectDetection"), "it sees images, and generates no text"),
    "nothing": (emptied(), "is empty: give the folder that has the model"),
    "a folder above": (holding("inner"), "the model is below it: give .*/inner$"),
    "a folder above two": (holding("a", "b"), "2 models are below it: give .*/a$"),
    "a repository in the hub's cache": (holding("snapshots/abc"), "the model is below it: give .*/snapshots/abc$"),
    "a download on its way": (renamed(f"{WEIGHTS}.incomplete"), "of a download that has not ended: download the model"),
    "shards without an index": (
        renamed("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        r"model\.safetensors\.index\.json, the index of model-00001-of-00002\.safetensors and the others, is missing",
    ),
    "pickled shards without an index": (
        renamed("pytorch_model-00001-of-00002.bin"),
        r"pytorch_model\.bin\.index\.json, the index of pytorch_model-00001-of-00002\.bin and the others, is missing",
    ),
    "a later shard of GGUF": (
        gguf_file("m-00002-of-00003.gguf", "llama"),
        r"m-00001-of-00003\.gguf, the first part of the model, is not there: download it, too",
    ),
    "weights alone": (emptied(WEIGHTS), "the weights are there without it: download the small files, too"),
    "another format": (renamed("model.onnx"), r"model\.onnx is another format: save the model as safetensors"),
    "no weights": (emptied("config.json", "tokenizer.json"), "has no weights .*: download the weights, too"),
    "half a file": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:50_000]),
        "is damaged or cut short, .* If it was downloaded, do that again",
    ),
    "a projector of images": (gguf_file("mmproj-model.gguf", "clip"), "its GGUF file is a projector of images"),
    "a projector by another name": (gguf_file("vision.gguf", "clip"), "is the projector of images of a model: give"),
    "embeddings in GGUF": (gguf_file("model.gguf", "bert"), "is an embedding model, and generates no text"),
    "an adapter in GGUF": (gguf_file("model.gguf", "llama", "adapter"), r"is an adapter \(LoRA\), and no model"),
}  # fmt: skip


def look_at(folder: Path) -> None:
    read_model_info(EngineConfig(model=str(folder)))
    read_catalogue(folder)  # a model without weights is none to a report on what it would need


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_model_is_refused_by_what_it_is(case: str, tmp_path: Path) -> None:
    change, problem = CASES[case]
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    change(folder)
    with pytest.raises(ModelLoadError, match=problem) as raised:
        look_at(folder)
    assert len(str(raised.value).split(". ")) <= 2


def test_a_model_that_has_code_of_its_own_may_be_called_a_model(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    auto_map = {"AutoModelForCausalLM": "modeling_x.XModel"}
    (folder / "config.json").write_text(json.dumps({"architectures": ["XModel"], "auto_map": auto_map}))
    with pytest.raises(ModelLoadError, match="this model needs code of its own"):
        read_model_info(EngineConfig(model=str(folder)))


def test_a_missing_package_of_a_vocabulary_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.text.loading.find_spec", lambda name: None)
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0b")
    with pytest.raises(ModelLoadError, match="packages that are not installed: pip install sentencepiece"):
        load_tokenizer(folder)
