"""What each format of quantised checkpoints costs the bundled model: ``python benchmarks/quality.py``.

Its matrices are quantised by the formats' own libraries where these can, else rounded to nearest and written by the
published layouts, as in the tests; the head, which is the embedding, stays. The rounding is the plainest: what GPTQ and
AWQ do to lose less is not in it. Texts are of the model's kind, and it was not trained on them. Wants '.[dev,nightly]'.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "recipes"))

from models.quantised_checkpoints import (
    awq,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    compressed_tensors,
    fp8,
    gptq,
    write,
)
from models.reference import load, logprobs
from tokenizers import Tokenizer

from aioengine.models.folder import DEMO_MODEL
from demo_model.grammar import documents

Write = Callable[[Path, Path], tuple[Path, Path]]
MAX_TOKENS = 300
"""Of a text."""


def of_layout(encode: Any, **config: Any) -> Write:
    return lambda source, folder: write(source, folder, encode, config)


def of_library(**scheme: Any) -> Write:
    return lambda source, folder: compressed_tensors(source, folder, **scheme)


def of_gptq(bits: int, *, is_symmetric: bool = True) -> Write:
    return of_layout(gptq(bits, 64, is_symmetric=is_symmetric), quant_method="gptq", bits=bits, group_size=64)


FORMATS: dict[str, Write] = {
    "fp8, blocks of 128 × 128": of_layout(
        fp8(128, 128, ".weight_scale_inv"), quant_method="fp8", weight_block_size=[128, 128]
    ),
    "fp8, a scale an output": of_layout(fp8(1, None, ".weight_scale", (-1, 1)), quant_method="fbgemm_fp8"),
    "compressed-tensors int8, a scale an output": of_library(num_bits=8, type="int", strategy="channel"),
    "compressed-tensors int4, groups of 64": of_library(num_bits=4, type="int", strategy="group", group_size=64),
    "compressed-tensors nvfp4": of_library(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    ),
    "compressed-tensors mxfp4": of_library(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
    ),
    "gptq of 8 bits, groups of 64": of_gptq(8),
    "gptq of 4 bits, groups of 64": of_gptq(4),
    "gptq of 4 bits, groups of 64, with zeros": of_gptq(4, is_symmetric=False),
    "awq of 4 bits, groups of 64": of_layout(awq(64), quant_method="awq", bits=4, group_size=64, version="gemm"),
    "bitsandbytes int8": of_layout(bitsandbytes_8bit, quant_method="bitsandbytes", load_in_8bit=True),
    "bitsandbytes nf4": of_layout(bitsandbytes_4bit("nf4"), quant_method="bitsandbytes", load_in_4bit=True),
    "bitsandbytes nf4, quantised twice": of_layout(
        bitsandbytes_4bit("nf4", is_nested=True), quant_method="bitsandbytes", load_in_4bit=True
    ),
    "bitsandbytes fp4": of_layout(bitsandbytes_4bit("fp4"), quant_method="bitsandbytes", load_in_4bit=True),
}


def texts(count: int) -> list[Tensor]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    made = documents("quantisation", count)
    return [torch.tensor(tokenizer.encode(document.text).ids[:MAX_TOKENS], dtype=torch.int32) for document in made]


def computed(folder: Path, ids: list[Tensor], **config: Any) -> tuple[int, list[Tensor]]:
    """Bytes of the weights as they are kept, and the log-probabilities after each token of each text."""
    decoder = load(folder, **config)
    return decoder.weight_bytes, [logprobs(decoder, each) for each in ids]


def row(ids: list[Tensor], exact: list[Tensor], num_bytes: int, found: list[Tensor]) -> str:
    losses = [-rows[:-1].gather(1, each[1:, None].long()) for each, rows in zip(ids, found, strict=True)]
    ours, theirs = torch.cat(found), torch.cat(exact)
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    divergence = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    perplexity = math.exp(torch.cat(losses).mean())
    return f"{num_bytes / 1e6:.2f} MB | {perplexity:.3f} | {100 * agreement:.1f} % | {divergence:.4f} |"


def rows(num_texts: int) -> Iterator[str]:
    ids = texts(num_texts)
    num_bytes, exact = computed(DEMO_MODEL, ids, dtype="float32")
    yield "| weights | kept in | perplexity | greedy agreement | KL divergence |"
    yield "|---|---|---|---|---|"
    yield f"| float32 | {row(ids, exact, num_bytes, exact)}"
    yield f"| bfloat16 | {row(ids, exact, *computed(DEMO_MODEL, ids))}"
    for quantization in ("int8", "int4"):
        found = computed(DEMO_MODEL, ids, quantization=quantization)
        yield f'| `quantization="{quantization}"`, the head too | {row(ids, exact, *found)}'
    for name, write_format in FORMATS.items():
        with TemporaryDirectory() as folder:
            coded, _ = write_format(DEMO_MODEL, Path(folder))
            yield f"| {name} | {row(ids, exact, *computed(coded, ids))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100)
    logging.disable()
    for line in rows(parser.parse_args().texts):
        print(line, flush=True)


if __name__ == "__main__":
    main()
