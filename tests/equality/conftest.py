"""What transformers says about the tiny checkpoints: greedy tokens and log-probabilities, in float32."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from checkpoints import NUM_SPECIAL, PAD, cached_checkpoints
from transformers.generation import logits_process as theirs

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


class Oracle:
    """transformers' model of a checkpoint, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=PAD)  # no EOS but those asked for

    def generate(self, prompt: list[int], max_tokens: int, **options: Any) -> Generated:
        """Greedy, by transformers' own loop; ``options`` are those of its ``generate``."""
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **options,
        )
        best = torch.cat(out.scores).topk(2).values
        return Generated(
            out.sequences[0, len(prompt) :].tolist(),
            torch.cat(out.logits).float(),
            float((best[:, 0] - best[:, 1]).min()),
        )

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocab]: after each token, the next one's."""
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


class Generated(NamedTuple):
    """What transformers' ``generate`` gives.

    Attributes:
        token_ids: the new ones.
        logits: float32 [new tokens, vocab]: as the model gave them, before any rule.
        margin: the least lead of a chosen token over the next one, after all rules.
    """

    token_ids: list[int]
    logits: torch.Tensor
    margin: float


class Counted(theirs.LogitsProcessor):
    """Presence and frequency penalty as OpenAI defines them, token by token."""

    def __init__(self, num_prompt_tokens: int, *, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token_id, count in Counter(input_ids[0, self._num_prompt_tokens :].tolist()).items():
            scores[0, token_id] -= count * self._frequency + self._presence
        return scores


def save_character_tokenizer(folder: Path) -> None:
    """Save a tokenizer in which each id is a character: 3 a space, and then one each, so that any ids can be said."""
    from tokenizers import Tokenizer, decoders, models

    specials = ["<pad>", "<s>", "</s>"]
    characters = [" ", *(character_of(token_id) for token_id in range(NUM_SPECIAL + 1, VOCAB_SIZE))]
    vocab = {token: token_id for token_id, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def save_word_tokenizer(folder: Path) -> None:
    """Save a tokenizer in which each id is a word, and whose decoder puts a space before all but the first."""
    from tokenizers import Tokenizer, models

    specials = ["<pad>", "<s>", "</s>"]
    words = [*specials, *(f"w{token_id}" for token_id in range(NUM_SPECIAL, VOCAB_SIZE))]
    tokenizer = Tokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.add_special_tokens(specials)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def character_of(token_id: int) -> str:
    """What `save_character_tokenizer` makes of an id above that of the space."""
    return chr(0x4E00 + token_id)


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
