"""Train the demo model from nothing: corpus, tokenizer, a small Llama, and the folder that the engine loads.

Run ``python -m demo_model.train``; it needs one CPU core and about two hours. ``--smoke`` takes the same way
in under a minute with few steps. The same seed gives the same corpus (its hash is recorded), and a held-out loss within
`LOSS_TOLERANCE` of the recorded one on other machines: float32 and bf16 sums are ordered differently there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from aioengine.models.folder import DEMO_MODEL
from demo_model.grammar import Document, corpus_hash, documents
from demo_model.template import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, TEXT_MARKS

LOSS_TOLERANCE = 0.05
"""How far the final held-out loss (nats a target token) may be from the recorded one for the same recipe and seed."""

IGNORED = -100
CLIP_NORM = 1.0
CHECKPOINT_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One warm-up and a cosine over documents of its own.

    A later stage begins with the weights that the one before it wrote, in bf16, and with fresh optimizers, so that it
    can be run by itself.

    Attributes:
        decay_steps: the step at which the cosine ends; None is the stage's last one, and with 0 the rate stays.
    """

    num_documents: int
    steps: int
    learning_rate: float
    warmup_steps: int = 40
    decay_steps: int | None = None
    sums_share: float = 0.0
    copies_share: float = 0.0
    any_share: float = 0.0
    facts_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what comes out.

    Attributes:
        num_held_out: documents to test on, made with another seed.
        num_tokenizer_documents: so many documents of the first stage make the tokenizer.
        documents_per_step: about 6000 tokens.
        stages: the second is for sums, which need far more examples than anything else, the third for copying, the
            fourth for copying any names, and for facts. The second stops while its rate is high: without practice,
            names of tools were guessed there still.
    """

    seed: int = 0
    num_held_out: int = 400
    num_tokenizer_documents: int = 8_000
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_position_embeddings: int = 1024
    documents_per_step: int = 30
    weight_decay: float = 0.1
    stages: tuple[Stage, ...] = (
        Stage(num_documents=30_000, steps=1000, learning_rate=3e-3, decay_steps=0),
        Stage(num_documents=12_000, steps=400, learning_rate=3e-3, decay_steps=850, sums_share=0.25),
        Stage(num_documents=15_000, steps=500, learning_rate=2.5e-3, sums_share=0.12, copies_share=0.3),
        Stage(num_documents=15_000, steps=500, learning_rate=2.5e-3, sums_share=0.06, any_share=0.35, facts_share=0.2),
    )


SMOKE = Recipe(
    num_held_out=20,
    num_tokenizer_documents=1500,
    documents_per_step=8,
    stages=(
        Stage(num_documents=1500, steps=8, warmup_steps=2, learning_rate=4e-3),
        Stage(
            num_documents=100,
            steps=4,
            warmup_steps=1,
            learning_rate=2e-3,
            sums_share=0.2,
            any_share=0.3,
            facts_share=0.2,
        ),
    ),
)
ENCODE_CHUNK = 1000


_MARKS = re.compile("|".join(map(re.escape, (END_OF_TEXT, IM_START, IM_END, *TEXT_MARKS))))


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over ``texts``; every digit is a token of its own, so that sums are spelt alike everywhere.

    The marks of the template are tokens, the last of the vocabulary those that are part of the text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TEXT_MARKS),
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Between the marks, or else words are made of their parts.
    tokenizer.train_from_iterator((part for text in texts for part in _MARKS.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TEXT_MARKS])
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} is a special token of every tokenizer that train_tokenizer makes"
    return token_id


@dataclass(frozen=True)
class Encoded:
    """One document as token ids, and for each id whether the model learns to produce it."""

    ids: list[int]
    is_target: list[bool]


def encode(tokenizer: Tokenizer, corpus: Sequence[Document]) -> list[Encoded]:
    """Each document as a prompt is encoded, in one piece; a token is learned if any of its letters is."""
    encoded = []
    # In chunks: an encoding also holds offsets and strings, gigabytes for the whole corpus.
    for start in range(0, len(corpus), ENCODE_CHUNK):
        chunk = corpus[start : start + ENCODE_CHUNK]
        texts = [document.text for document in chunk]
        for document, encoding in zip(chunk, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            is_learned = [s.is_target for s in document.segments for _ in s.text]
            is_target = [any(is_learned[first:last]) for first, last in encoding.offsets]
            encoded.append(Encoded(encoding.ids, is_target))
    return encoded


@dataclass(frozen=True)
class Batch:
    """Documents of like length, each in a row of its own: ``inputs`` and ``targets`` are [documents, tokens] int64.

    A row begins where a prompt does, and nothing stands before a document that could distract from it. A target that is
    not learned, padding included, is `IGNORED`.
    """

    inputs: Tensor
    targets: Tensor

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORED).sum())


def make_batch(group: Sequence[Encoded], max_tokens: int, pad_id: int) -> Batch:
    """Pad the documents to the longest; what is longer than ``max_tokens`` is cut at its end."""
    width = min(max_tokens, max(len(document.ids) - 1 for document in group))
    inputs = torch.full((len(group), width), pad_id, dtype=torch.int64)
    targets = torch.full((len(group), width), IGNORED, dtype=torch.int64)
    for row, document in enumerate(group):
        ids = torch.tensor(document.ids[: width + 1])
        inputs[row, : len(ids) - 1] = ids[:-1]
        learned = torch.tensor(document.is_target[1 : width + 1])
        targets[row, : len(ids) - 1] = torch.where(learned, ids[1:], IGNORED)
    return Batch(inputs, targets)


def grouped(documents_: Sequence[Encoded], num_groups: int, max_tokens: int, pad_id: int) -> list[Batch]:
    """Sort the documents by length and cut them into batches of about as many tokens each, so that little is padded."""
    by_length = sorted(documents_, key=lambda document: len(document.ids))
    ends = list(itertools.accumulate(min(len(document.ids), max_tokens) for document in by_length))
    group_of = [min(num_groups - 1, (end - 1) * num_groups // ends[-1]) for end in ends]
    groups = itertools.groupby(range(len(by_length)), key=group_of.__getitem__)
    return [make_batch([by_length[index] for index in group], max_tokens, pad_id) for _, group in groups]


def build_model(recipe: Recipe, vocab_size: int, eos_ids: list[int], pad_id: int) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def summed_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Cross entropy summed over the learned targets, in nats. The head runs on those positions only."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        learned = batch.targets != IGNORED
        logits = model.lm_head(hidden[learned])
    return F.cross_entropy(logits.float(), batch.targets[learned], reduction="sum")


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, held_out: Sequence[Batch]) -> float:
    """Mean cross entropy over the learned targets of all batches, in nats."""
    total = sum(float(summed_loss(model, batch)) for batch in held_out)
    return total / sum(batch.num_targets for batch in held_out)


def optimizers_for(model: LlamaForCausalLM, weight_decay: float) -> tuple[torch.optim.Optimizer, ...]:
    """Muon (Jordan et al., 2024) for the matrices inside the layers, AdamW for the embedding and the norms.

    With AdamW, and documents packed into shared rows, the model had not learned after 3 million tokens to say a
    character's name again; with Muon and a row for each document it did after 2.5 million.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return (
        torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


def learning_rate_at(step: int, stage: Stage) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak, unless the stage says otherwise."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    decay_steps = stage.steps if stage.decay_steps is None else stage.decay_steps
    if not decay_steps:
        return stage.learning_rate
    progress = (step - stage.warmup_steps) / max(1, decay_steps - stage.warmup_steps)
    return stage.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: object) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(out: Path, tokenizer: Tokenizer, recipe: Recipe) -> None:
    _write_text(out / "tokenizer.json", tokenizer.to_str(pretty=False) + "\n")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": recipe.max_position_embeddings,
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "additional_special_tokens": [IM_START],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_model(out: Path, model: LlamaForCausalLM, eos_ids: list[int], pad_id: int) -> None:
    """Write config and bf16 weights; each file appears whole, since an engine may be loading from ``out``."""
    config = model.config.to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "use_cache": True}
    config.pop("_name_or_path", None)
    write_json(out / "config.json", config)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    write_json(out / "generation_config.json", {"eos_token_id": eos_ids, "pad_token_id": pad_id, **sampling})
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    temporary = out / "model.safetensors.tmp"
    temporary.write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(temporary, out / "model.safetensors")


def versions() -> dict[str, str]:
    named = {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
    return {"python": platform.python_version(), **named}


@dataclass(frozen=True, kw_only=True)
class Data:
    """The corpus of each stage, tokenized, and the held-out documents as batches."""

    tokenizer: Tokenizer
    pad_id: int
    eos_ids: list[int]
    data_hash: str
    corpora: list[list[Encoded]]
    held_out: list[Batch]


def prepare(recipe: Recipe) -> Data:
    """Make the corpora and the tokenizer. The held-out documents come from another seed."""
    corpora = [
        list(
            documents(
                f"train-{recipe.seed}-{index}" if index else f"train-{recipe.seed}",
                stage.num_documents,
                sums_share=stage.sums_share,
                copies_share=stage.copies_share,
                any_share=stage.any_share,
                facts_share=stage.facts_share,
            )
        )
        for index, stage in enumerate(recipe.stages)
    ]
    held_out = list(documents(f"held-out-{recipe.seed}", recipe.num_held_out))
    tokenizer = train_tokenizer([d.text for d in corpora[0][: recipe.num_tokenizer_documents]], recipe.vocab_size)
    pad_id = special_id(tokenizer, END_OF_TEXT)
    return Data(
        tokenizer=tokenizer,
        pad_id=pad_id,
        eos_ids=[special_id(tokenizer, IM_END), pad_id],
        data_hash=corpus_hash(itertools.chain.from_iterable(corpora)),
        corpora=[encode(tokenizer, corpus) for corpus in corpora],
        held_out=grouped(encode(tokenizer, held_out), 16, recipe.max_position_embeddings, pad_id),
    )


def train_step(model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer], step: Sequence[Batch]) -> float:
    """One optimizer step over all batches of ``step``; returns the mean loss of its targets."""
    num_targets = sum(batch.num_targets for batch in step)
    mean_loss = 0.0
    for batch in step:
        loss = summed_loss(model, batch) / num_targets
        torch.autograd.backward(loss)
        mean_loss += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return mean_loss


def drawn_documents(corpus: Sequence[Encoded], stage: Stage, recipe: Recipe) -> Iterator[list[Encoded]]:
    """The documents of each step, in the corpus's order and from its beginning again when it is used up."""
    endless_corpus = itertools.cycle(corpus)
    for _ in range(stage.steps):
        yield list(itertools.islice(endless_corpus, recipe.documents_per_step))


def train_stage(
    model: LlamaForCausalLM, recipe: Recipe, stage: Stage, data: Data, corpus: Sequence[Encoded], out: Path
) -> float:
    """Take all steps of one stage, write a checkpoint now and then and the result at the end.

    Returns:
        The held-out loss at the end.
    """
    optimizers = optimizers_for(model, recipe.weight_decay)
    num_tokens = 0
    test_loss = math.nan
    started = time.monotonic()
    for step, drawn in enumerate(drawn_documents(corpus, stage, recipe), start=1):
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = learning_rate_at(step - 1, stage)
        loss = train_step(model, optimizers, grouped(drawn, 4, recipe.max_position_embeddings, data.pad_id))
        num_tokens += sum(len(document.ids) for document in drawn)
        if step % 20 == 0 or step == stage.steps:
            rate = num_tokens / (time.monotonic() - started)
            print(f"step {step}/{stage.steps} loss {loss:.4f} {rate:.0f} tokens/s", flush=True)
        if step % CHECKPOINT_EVERY == 0 or step == stage.steps:
            test_loss = held_out_loss(model, data.held_out)
            print(f"step {step} held-out loss {test_loss:.4f}", flush=True)
            write_model(out, model, data.eos_ids, data.pad_id)
    return test_loss


def train(recipe: Recipe, out: Path, *, from_stage: int = 0, is_compiled: bool = False) -> dict[str, Any]:
    """Train by ``recipe`` and write the model folder ``out``; from the first checkpoint on it can be loaded.

    Args:
        from_stage: skip the stages before this one and go on with the weights that they left in ``out``.
        is_compiled: a third faster, where there is a C++ compiler.
    Returns:
        What is also written to ``training.json``: recipe, data hash, tokens, loss, versions.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    data = prepare(recipe)
    num_tokens = [
        sum(len(document.ids) for document in itertools.chain.from_iterable(drawn_documents(corpus, stage, recipe)))
        for corpus, stage in zip(data.corpora, recipe.stages, strict=True)
    ]
    print(f"corpus {data.data_hash}: {num_tokens} tokens to train on, stage by stage", flush=True)
    model = build_model(recipe, data.tokenizer.get_vocab_size(), data.eos_ids, data.pad_id)
    if is_compiled:
        model.model.compile(dynamic=True)
    write_tokenizer(out, data.tokenizer, recipe)
    test_loss = math.nan
    for index, stage in enumerate(recipe.stages[from_stage:], start=from_stage):
        if index:
            model.load_state_dict(load_file(out / "model.safetensors"), strict=False)
        test_loss = train_stage(model, recipe, stage, data, data.corpora[index], out)
    report = {
        "recipe": asdict(recipe),
        "data_hash": data.data_hash,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_tokens": sum(num_tokens),
        "held_out_loss": round(test_loss, 4),
        "loss_tolerance": LOSS_TOLERANCE,
        "versions": versions(),
    }
    write_json(out / "training.json", report)
    # As it reads back from the file, so that it compares equal to a recorded one.
    return dict(json.loads(json.dumps(report)))


def check_reproduced(report: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Compare a training report with a recorded one; the differences in words, none if it was reproduced."""
    differences = []
    if report["recipe"] != recorded["recipe"]:
        differences.append("the recipe is another one: nothing to compare")
    elif report["data_hash"] != recorded["data_hash"]:
        differences.append(f"the corpus hash is {report['data_hash']}, recorded is {recorded['data_hash']}")
    elif abs(report["held_out_loss"] - recorded["held_out_loss"]) > LOSS_TOLERANCE:
        differences.append(
            f"held-out loss {report['held_out_loss']} is not within {LOSS_TOLERANCE} of {recorded['held_out_loss']}"
        )
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-model"), help="folder to write (default: ./demo-model)")
    parser.add_argument("--smoke", action="store_true", help="the same way with few steps: under a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs="+", help="optimizer steps of each stage, instead of the recipe's")
    parser.add_argument("--from-stage", type=int, default=0, help="begin with this stage, on the model in --out")
    parser.add_argument("--compile", action="store_true", help="compile it: faster, needs a C++ compiler")
    parser.add_argument(
        "--check", action="store_true", help="compare with the shipped training.json, exit 1 on a difference"
    )
    options = parser.parse_args(arguments)
    recipe = replace(SMOKE if options.smoke else Recipe(), seed=options.seed)
    if options.steps:
        if len(options.steps) != len(recipe.stages):
            parser.error(f"--steps needs {len(recipe.stages)} numbers, one a stage")
        stages = (replace(stage, steps=steps) for stage, steps in zip(recipe.stages, options.steps, strict=True))
        recipe = replace(recipe, stages=tuple(stages))
    report = train(recipe, options.out, from_stage=options.from_stage, is_compiled=options.compile)
    if not options.check:
        return 0
    recorded = json.loads((DEMO_MODEL / "training.json").read_text(encoding="utf-8"))
    differences = check_reproduced(report, recorded)
    print("\n".join(differences) or "reproduced: same corpus, same loss within the tolerance")
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
