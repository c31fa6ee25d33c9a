"""What transformers says about the tiny checkpoints: greedy tokens and log-probabilities, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from checkpoints import NUM_SPECIAL, cached_checkpoints

MAX_MODEL_LEN = 256
VOCAB_SIZE = 384
SEED = 20261120


class Case(NamedTuple):
    """One prompt and what has to follow it."""

    prompt: list[int]
    max_tokens: int
    token_ids: list[int]
    logprobs: torch.Tensor
    """float32 [max_tokens, vocab]: of each position's next token."""


class Reference(NamedTuple):
    folder: Path
    cases: list[Case]


def make_prompts() -> list[tuple[list[int], int]]:
    """(prompt, max_tokens) of odd lengths around block and chunk boundaries; three share 37 tokens, two are equal."""
    rng = random.Random(SEED)

    def ids(count: int) -> list[int]:
        return [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(count)]

    shared = ids(37)
    prompts = [ids(n) for n in (1, 7, 16, 31, 123)] + [shared + ids(n) for n in (3, 11, 60)]
    prompts.append(list(prompts[4]))
    return [(prompt, rng.randint(24, 56)) for prompt in prompts]


def greedy(model: transformers.PreTrainedModel, prompt: list[int], max_tokens: int) -> Case:
    """One sequence, one token at a time, with transformers' own cache."""
    ids, cache, chosen, lines = torch.tensor([prompt]), None, [], []
    with torch.inference_mode():
        for _ in range(max_tokens):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            line = out.logits[0, -1].float().log_softmax(-1)
            chosen.append(int(line.argmax()))
            lines.append(line)
            ids = torch.tensor([[chosen[-1]]])
    return Case(prompt, max_tokens, chosen, torch.stack(lines))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Family → its checkpoint and what transformers makes of the prompts; each is made once."""
    checkpoint = cached_checkpoints(tmp_path_factory.mktemp("equality"))
    made: dict[str, Reference] = {}

    def make(family: str) -> Reference:
        if family not in made:
            folder = checkpoint(family)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            made[family] = Reference(folder, [greedy(model, *prompt) for prompt in make_prompts()])
        return made[family]

    return make
