"""Train the demo model from nothing: corpus, tokenizer, a small Llama, and the folder that the engine loads.

Run ``python -m aioengine.demo.train``; it needs one CPU core and about an hour. ``--smoke`` takes the same way in
under a minute with few steps. The same seed gives the same corpus (its hash is recorded), and a held-out loss within
`LOSS_TOLERANCE` of the recorded one on other machines: float32 and bf16 sums are ordered differently there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from aioengine.demo import model_path
from aioengine.demo.grammar import END_OF_TEXT, IM_END, IM_START, ROLES, Document, corpus_hash, documents

LOSS_TOLERANCE = 0.05
"""How far the final held-out loss (nats a target token) may be from the recorded one for the same recipe and seed."""

IGNORED = -100

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in " + repr(ROLES) + " %}"
    "{{- raise_exception('unknown role ' + (message['role'] | string) + ': use system, user or assistant') }}"
    "{%- endif %}"
    "{{- '" + IM_START + "' + message['role'] + '\\n' + message['content'] + '" + IM_END + "\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + IM_START + "assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what comes out.

    Attributes:
        num_documents: size of the training corpus; the held-out one is made with another seed.
        row_tokens, long_row_tokens: documents are packed whole into rows of these lengths.
        long_every: every so many steps the batch is made of long rows.
        batch_tokens: tokens a step.
    """

    seed: int = 0
    num_documents: int = 70_000
    num_held_out: int = 400
    num_tokenizer_documents: int = 8_000
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_position_embeddings: int = 1024
    row_tokens: int = 384
    long_row_tokens: int = 1024
    long_every: int = 8
    batch_tokens: int = 4096
    steps: int = 2400
    warmup_steps: int = 100
    learning_rate: float = 2.5e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0


SMOKE = Recipe(
    num_documents=1500, num_held_out=40, num_tokenizer_documents=1500, steps=16, warmup_steps=4, long_every=5
)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over ``texts``; every digit is a token of its own, so that sums are spelt alike everywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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
    segments = [segment for document in corpus for segment in document.segments]
    encodings = iter(tokenizer.encode_batch([segment.text for segment in segments], add_special_tokens=False))
    encoded = []
    for document in corpus:
        ids: list[int] = []
        is_target: list[bool] = []
        for segment in document.segments:
            segment_ids = next(encodings).ids
            ids += segment_ids
            is_target += [segment.is_target] * len(segment_ids)
        encoded.append(Encoded(ids, is_target))
    return encoded


@dataclass(frozen=True)
class Rows:
    """Packed rows: ``inputs`` and ``targets`` are [rows, tokens] int64; a target that is not learned is `IGNORED`."""

    inputs: Tensor
    targets: Tensor


def pack(documents_: Sequence[Encoded], row_tokens: int, pad_id: int) -> Rows:
    """Put whole documents into rows, best fit among the open rows; what is longer than a row is cut at its end.

    A row begins with the beginning of a document, as a prompt does; what follows another document is learned too.
    """
    open_rows: list[tuple[list[int], list[int]]] = []
    done: list[tuple[list[int], list[int]]] = []
    for document in documents_:
        ids = document.ids[: row_tokens + 1]
        labels = [i if target else IGNORED for i, target in zip(ids, document.is_target, strict=False)]
        fitting = [row for row in open_rows if len(row[0]) + len(ids) <= row_tokens + 1]
        if fitting:
            row = max(fitting, key=lambda row: len(row[0]))
            row[0].extend(ids)
            row[1].extend(labels)
        else:
            open_rows.append((ids, labels))
        if len(open_rows) > 24:
            fullest = max(range(len(open_rows)), key=lambda index: len(open_rows[index][0]))
            done.append(open_rows.pop(fullest))
    done += open_rows
    ids_table = torch.full((len(done), row_tokens + 1), pad_id, dtype=torch.int64)
    label_table = torch.full((len(done), row_tokens + 1), IGNORED, dtype=torch.int64)
    for index, (ids, labels) in enumerate(done):
        ids_table[index, : len(ids)] = torch.tensor(ids)
        label_table[index, : len(ids)] = torch.tensor(labels)
    return Rows(ids_table[:, :-1].contiguous(), label_table[:, 1:].contiguous())


def batches(rows: Rows, batch_tokens: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of shuffled rows, epoch after epoch, without end."""
    size = max(1, batch_tokens // rows.inputs.shape[1])
    while True:
        order = torch.randperm(rows.inputs.shape[0], generator=generator)
        for start in range(0, max(1, len(order) - size + 1), size):
            index = order[start : start + size]
            yield rows.inputs[index], rows.targets[index]


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


def loss_of(model: LlamaForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the learned targets, in nats. The head runs on those positions only."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        learned = targets != IGNORED
        logits = model.lm_head(hidden[learned])
    return F.cross_entropy(logits.float(), targets[learned])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: Rows) -> float:
    model.eval()
    total = num_targets = 0.0
    for inputs, targets in zip(torch.split(rows.inputs, 8), torch.split(rows.targets, 8), strict=True):
        count = int((targets != IGNORED).sum())
        total += float(loss_of(model, inputs, targets)) * count
        num_targets += count
    model.train()
    return total / num_targets


def optimizer_for(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    kept = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


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
    """The corpus, tokenized and packed: short rows and long rows to train on, rows to test on."""

    tokenizer: Tokenizer
    data_hash: str
    num_tokens: int
    short_rows: Rows
    long_rows: Rows
    test_rows: Rows


def prepare(recipe: Recipe) -> Data:
    """Make the corpus and the tokenizer, and pack. The held-out documents come from another seed."""
    corpus = list(documents(f"train-{recipe.seed}", recipe.num_documents))
    held_out = list(documents(f"held-out-{recipe.seed}", recipe.num_held_out))
    tokenizer = train_tokenizer([d.text for d in corpus[: recipe.num_tokenizer_documents]], recipe.vocab_size)
    pad_id = special_id(tokenizer, END_OF_TEXT)
    encoded = encode(tokenizer, corpus)
    # Long rows take every document that fits no other row, and a share of the others to stand between them.
    is_long = [len(d.ids) > recipe.row_tokens + 1 or i % recipe.long_every == 0 for i, d in enumerate(encoded)]
    return Data(
        tokenizer=tokenizer,
        data_hash=corpus_hash(corpus),
        num_tokens=sum(len(document.ids) for document in encoded),
        short_rows=pack(list(itertools.compress(encoded, map(operator.not_, is_long))), recipe.row_tokens, pad_id),
        long_rows=pack(list(itertools.compress(encoded, is_long)), recipe.long_row_tokens, pad_id),
        test_rows=pack(encode(tokenizer, held_out), recipe.long_row_tokens, pad_id),
    )


def scheduled_batches(recipe: Recipe, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """The batch of every step in order: each ``long_every``-th one is made of long rows."""
    generator = torch.Generator().manual_seed(recipe.seed)
    short_batches = batches(data.short_rows, recipe.batch_tokens, generator)
    long_batches = batches(data.long_rows, recipe.batch_tokens, generator)
    for step in range(recipe.steps):
        yield next(long_batches if step % recipe.long_every == recipe.long_every - 1 else short_batches)


def train(recipe: Recipe, out: Path, *, checkpoint_every: int = 200) -> dict[str, Any]:
    """Train by ``recipe`` and write the model folder ``out``; from the first checkpoint on it can be loaded.

    Returns:
        What is also written to ``training.json``: recipe, data hash, tokens, losses, versions.
    """
    torch.set_num_threads(1)
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    data = prepare(recipe)
    print(f"corpus {data.data_hash}: {data.num_tokens} tokens, {time.monotonic() - started:.0f} s", flush=True)
    pad_id = special_id(data.tokenizer, END_OF_TEXT)
    eos_ids = [special_id(data.tokenizer, IM_END), pad_id]
    model = build_model(recipe, data.tokenizer.get_vocab_size(), eos_ids, pad_id)
    optimizer = optimizer_for(model, recipe)
    write_tokenizer(out, data.tokenizer, recipe)
    num_tokens = 0
    loop_started = time.monotonic()
    for step, (inputs, targets) in enumerate(scheduled_batches(recipe, data), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step - 1, recipe)
        loss = loss_of(model, inputs, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += inputs.numel()
        if step % 20 == 0 or step == recipe.steps:
            rate = num_tokens / (time.monotonic() - loop_started)
            print(f"step {step}/{recipe.steps} loss {loss.item():.4f} {rate:.0f} tokens/s", flush=True)
        if step % checkpoint_every == 0 and step < recipe.steps:
            print(f"step {step} held-out loss {held_out_loss(model, data.test_rows):.4f}", flush=True)
            write_model(out, model, eos_ids, pad_id)
    write_model(out, model, eos_ids, pad_id)
    report = {
        "recipe": asdict(recipe),
        "data_hash": data.data_hash,
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus_tokens": data.num_tokens,
        "trained_tokens": num_tokens,
        "held_out_loss": round(held_out_loss(model, data.test_rows), 4),
        "loss_tolerance": LOSS_TOLERANCE,
        "wall_s": round(time.monotonic() - started),
        "versions": versions(),
    }
    write_json(out / "training.json", report)
    print(
        f"held-out loss {report['held_out_loss']}, {report['parameters']} parameters, {report['wall_s']} s", flush=True
    )
    return report


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
    parser = argparse.ArgumentParser(prog="python -m aioengine.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-model"), help="folder to write (default: ./demo-model)")
    parser.add_argument("--smoke", action="store_true", help="the same way with few steps: under a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps; the cosine is planned over them")
    parser.add_argument(
        "--check", action="store_true", help="compare with the shipped training.json, exit 1 on a difference"
    )
    options = parser.parse_args(arguments)
    recipe = replace(SMOKE if options.smoke else Recipe(), seed=options.seed)
    if options.steps:
        recipe = replace(recipe, steps=options.steps)
    report = train(recipe, options.out)
    if not options.check:
        return 0
    recorded = json.loads((model_path() / "training.json").read_text(encoding="utf-8"))
    differences = check_reproduced(report, recorded)
    print("\n".join(differences) or "reproduced: same corpus, same loss within the tolerance")
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
