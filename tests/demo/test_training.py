"""The recipe of the demo model, taken with few steps: the same way, the same result."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from aioengine.models.folder import DEMO_MODEL
from demo_model import train
from demo_model.grammar import Document, Segment
from demo_model.train import (
    IGNORED,
    LOSS_TOLERANCE,
    SMOKE,
    Encoded,
    Recipe,
    Stage,
    check_reproduced,
    encode,
    learning_rate_at,
    make_batch,
)

SMOKE_DATA_HASH = "a917dafd0b46d521afcba2e7f8844e77"
SMOKE_HELD_OUT_LOSS = 5.8583
UNTRAINED_LOSS = 7.6  # ln 2048


TINY = replace(
    SMOKE,
    num_held_out=2,
    num_tokenizer_documents=60,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    stages=tuple(replace(stage, num_documents=60, steps=2) for stage in SMOKE.stages),
)


@pytest.mark.nightly
def test_the_smoke_run_reproduces_corpus_and_loss(tmp_path: Path) -> None:
    num_threads = torch.get_num_threads()
    try:
        assert train.main(["--smoke", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(num_threads)
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["data_hash"] == SMOKE_DATA_HASH
    assert abs(report["held_out_loss"] - SMOKE_HELD_OUT_LOSS) < LOSS_TOLERANCE
    assert report["held_out_loss"] < UNTRAINED_LOSS - 1


def test_a_training_in_stages_writes_the_folder_of_one_at_once_which_transformers_loads(tmp_path: Path) -> None:
    at_once = train.train(TINY, tmp_path / "at_once")
    train.train(replace(TINY, stages=TINY.stages[:1]), tmp_path / "in_two")
    assert train.train(TINY, tmp_path / "in_two", from_stage=1) == at_once
    first, second = (tmp_path / name / "model.safetensors" for name in ("at_once", "in_two"))
    assert first.read_bytes() == second.read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "at_once")
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == at_once["parameters"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "at_once")) == model.config.vocab_size
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_shipped_model_was_made_by_the_recipe_in_the_code() -> None:
    recorded = json.loads((DEMO_MODEL / "training.json").read_text())
    assert recorded["recipe"] == json.loads(json.dumps(asdict(Recipe())))


def test_what_is_not_reproduced_is_said() -> None:
    recorded = {"recipe": {"seed": 0}, "data_hash": "a", "held_out_loss": 1.0}
    assert check_reproduced(recorded, recorded) == []
    assert check_reproduced(recorded | {"held_out_loss": 1.0 + LOSS_TOLERANCE / 2}, recorded) == []
    assert "within" in check_reproduced(recorded | {"held_out_loss": 1.0 + LOSS_TOLERANCE * 2}, recorded)[0]
    assert "hash" in check_reproduced(recorded | {"data_hash": "b"}, recorded)[0]
    assert "recipe" in check_reproduced(recorded | {"recipe": {"seed": 1}}, recorded)[0]


def test_a_batch_has_targets_one_place_on_learns_no_padding_and_cuts_what_is_too_long() -> None:
    short, long = Encoded([1, 2, 3], [False, True, True]), Encoded([4, 5, 6, 7, 8], [True, True, False, True, True])
    batch = make_batch([short, long], 4, 0)
    assert batch.inputs.tolist() == [[1, 2, 0, 0], [4, 5, 6, 7]]
    assert batch.targets.tolist() == [[2, 3, IGNORED, IGNORED], [5, IGNORED, 7, 8]]
    assert batch.num_targets == 5
    assert make_batch([long], 2, 0).inputs.tolist() == [[4, 5]]


def test_a_token_is_learned_if_any_of_its_letters_is() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    forced = (('{"animal": "', False), ('fox"', True), (', "legs": ', False), ("4", True), ("}", False))
    document = Document(tuple(Segment(*part) for part in forced))
    [encoded] = encode(tokenizer, [document])
    assert encoded.ids == tokenizer.encode(document.text, add_special_tokens=False).ids
    learned = [i for i, is_target in zip(encoded.ids, encoded.is_target, strict=True) if is_target]
    assert tokenizer.decode(learned) == 'fox",4'  # the mark and the comma are one token


def test_the_learning_rate_rises_and_then_falls_to_almost_nothing() -> None:
    stage = Stage(num_documents=1, steps=40, warmup_steps=10, learning_rate=1e-3)
    rates = [learning_rate_at(step, stage) for step in range(stage.steps + 1)]
    assert rates.index(max(rates)) in (9, 10)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.02 * stage.learning_rate)
