"""Ways to serve requests, and what transformers says about the tiny checkpoints, in float32."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from checkpoints import NUM_SPECIAL, PAD, load_reference, make_checkpoint
from integrity import check_integrity
from tokenizers import Tokenizer, decoders, models
from transformers.generation import logits_process as theirs

from aioengine import Engine, RequestOutput
from aioengine.config import EngineConfig
from aioengine.core.engine_core import EngineCore
from aioengine.models.folder import ModelFolder
from aioengine.models.implementations import read_model_config
from aioengine.outputs import TokenLogprobs

MAX_MODEL_LEN = 256
VOCAB_SIZE = 384
SEED = 20261120
LOGPROB_TOLERANCE = 1e-3
RANK_TOLERANCE = 1e-4
"""Logits nearer than this may change places by rounding alone."""


class Setting(msgspec.Struct, frozen=True):
    """A way to serve requests.

    Attributes:
        one_by_one: each request alone, after the other; otherwise all at once.
        budget: tokens a step; a small odd one cuts prefills anywhere.
        kv_sequences: KV for this many sequences of the greatest length.
        repeats: how often all are served: the second time the prefix cache knows them.
        aborts: requests that are cancelled at random moments run beside them.
    """

    one_by_one: bool = False
    budget: int = 512
    kv_sequences: float = 8
    repeats: int = 1
    aborts: bool = False


SETTINGS = {
    "alone": Setting(one_by_one=True),
    "batched": Setting(),
    "chunked": Setting(budget=23),
    "prefix hits": Setting(repeats=2, kv_sequences=40),
    "preempted": Setting(kv_sequences=1.3, repeats=2),
    "all at once": Setting(budget=23, kv_sequences=1.3, repeats=2, aborts=True),
    "aborts beside": Setting(aborts=True),
}


def starting(folder: Path, depth: int = 2, **fields: Any) -> Engine:
    """An engine of a checkpoint, not yet started."""
    defaults = {"kv_cache_memory_bytes": 2**24, "max_model_len": MAX_MODEL_LEN, "num_threads": 1}
    return Engine(str(folder), max_in_flight=depth, show_progress=False, **{**defaults, **fields})


@asynccontextmanager
async def serving(folder: Path, setting: Setting, depth: int) -> AsyncIterator[tuple[Engine, EngineCore]]:
    """An engine as the setting has it; at the end, that the setting did what it is there for, and left nothing."""
    kv_bytes = int(setting.kv_sequences * MAX_MODEL_LEN * await asyncio.to_thread(bytes_a_token, folder))
    fields = {"max_num_seqs": 16, "max_num_batched_tokens": setting.budget, "kv_cache_memory_bytes": kv_bytes}
    async with starting(folder, depth, **fields) as engine:
        assert engine._runtime is not None
        core = engine._runtime.core
        yield engine, core
        stats = core.stats()
        if setting.kv_sequences < 2:
            assert stats.preemptions > 0, "nothing was preempted: the KV cache is too large for this test"
        if setting.repeats > 1:
            assert stats.prefix_cache_hits > 0, "no prefix was found again"
        assert stats.running == stats.waiting == stats.blocked == 0
        assert stats.free_blocks == stats.num_blocks
        check_integrity(core.scheduler)


def bytes_a_token(folder: Path) -> int:
    model = read_model_config(ModelFolder.read(folder), EngineConfig())
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(count)]


class Oracle:
    """transformers' model of a checkpoint, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = load_reference(folder, dtype=torch.float32)
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


class Case(NamedTuple):
    """A request, and what transformers makes of it."""

    prompt: list[int]
    params: dict[str, Any]
    wanted: Generated | None = None
    """None: it is sampled."""

    def request(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "temperature": 0.0, "logprobs": 2, "ignore_eos": True, **self.params}


Cases = dict[Any, Case]
Outputs = dict[Any, RequestOutput]


async def serve(
    engine: Engine, cases: Cases, setting: Setting, rng: random.Random, others: Sequence[dict[str, Any]]
) -> Outputs:
    """Serve all cases: alone, one after the other; or all at once among others, in any order."""
    if setting.one_by_one:
        return {name: await engine.generate(**case.request()) for name, case in cases.items()}
    requests = [*((name, case.request()) for name, case in cases.items()), *((None, request) for request in others)]
    rng.shuffle(requests)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for name, request in requests:
            if setting.aborts:
                group.create_task(cancelled_soon(engine, request["prompt"], rng))
            tasks.append((name, group.create_task(engine.generate(**request))))
    return {name: task.result() for name, task in tasks if name is not None}


async def cancelled_soon(engine: Engine, prompt: list[int], rng: random.Random) -> None:
    """A request with a prompt like this one, left after a random number of deltas."""
    patience = rng.randint(0, 8)
    async with engine.stream(prompt[: rng.randint(1, len(prompt))], max_tokens=100, ignore_eos=True) as stream:
        async for _ in stream:
            patience -= 1
            if patience < 0:
                break


class Checkpoint(NamedTuple):
    folder: Path
    oracle: Oracle
    cases: Cases


class Round(NamedTuple):
    """One time that all cases were served, and how many tokens the device computed for it."""

    outputs: Outputs
    num_computed_tokens: int


class Runs:
    """What the engine made of all cases, by (family, setting, depth); each checkpoint and each run is made once.

    Args:
        make_cases: of a checkpoint.
        make_others: requests that run beside the cases.
    """

    def __init__(
        self,
        root: Path,
        make_cases: Callable[[Oracle], Cases],
        make_others: Callable[[Cases, random.Random], list[dict[str, Any]]] = lambda cases, rng: [],
    ) -> None:
        self._root = root
        self._make_cases = make_cases
        self._make_others = make_others
        self._checkpoints: dict[str, Checkpoint] = {}
        self._logits: dict[tuple[str | int, ...], torch.Tensor] = {}
        self._rounds: dict[tuple[str, str, int], list[Round]] = {}

    def checkpoint(self, family: str) -> Checkpoint:
        if family not in self._checkpoints:
            folder = make_checkpoint(self._root / family, family)
            save_tokenizer(folder, {token_id: character_of(token_id) for token_id in range(NUM_SPECIAL, VOCAB_SIZE)})
            oracle = Oracle(folder)
            self._checkpoints[family] = Checkpoint(folder, oracle, self._make_cases(oracle))
        return self._checkpoints[family]

    def logits(self, family: str, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocab]: those that each of the output tokens is drawn from, by transformers."""
        key = (family, *prompt, *token_ids)
        if key not in self._logits:
            logits = self.checkpoint(family).oracle.logits([*prompt, *token_ids])
            self._logits[key] = logits[len(prompt) - 1 : -1]
        return self._logits[key]

    async def rounds(self, family: str, name: str, depth: int) -> list[Round]:
        """What comes each time that the setting serves all cases."""
        key = (family, name, depth)
        if key not in self._rounds:
            folder, _, cases = self.checkpoint(family)
            setting, rng = SETTINGS[name], random.Random(SEED)
            rounds = self._rounds[key] = []
            async with serving(folder, setting, depth) as (engine, core):
                for _ in range(setting.repeats):
                    before = core.executor.stats.num_computed_tokens
                    outputs = await serve(engine, cases, setting, rng, self._make_others(cases, rng))
                    rounds.append(Round(outputs, core.executor.stats.num_computed_tokens - before))
        return self._rounds[key]

    async def outputs(self, family: str, name: str, depth: int) -> list[tuple[Case, RequestOutput]]:
        """Each case with each of its outputs."""
        cases = self.checkpoint(family).cases
        rounds = await self.rounds(family, name, depth)
        return [(cases[case], output) for round_ in rounds for case, output in round_.outputs.items()]


def check_lines(
    lines: Sequence[TokenLogprobs],
    token_ids: list[int],
    logprobs: torch.Tensor,
    *,
    asked: Sequence[int] = (),
    num_top: int,
) -> None:
    """Each line has its token first, the likeliest and those asked for; and all figures are right.

    Args:
        logprobs: float32 [lines, vocab], what transformers says.
    """
    assert [next(iter(line)) for line in lines] == token_ids
    entries = [(place, token_id, found) for place, line in enumerate(lines) for token_id, found in line.items()]
    if not entries:
        return
    places, ids, found = (list(column) for column in zip(*entries, strict=True))
    whole, wanted = logprobs[places], logprobs[places, ids]
    assert torch.allclose(torch.tensor([entry.logprob for entry in found]), wanted, atol=LOGPROB_TOLERANCE, rtol=0)
    ranks = torch.tensor([entry.rank for entry in found])
    assert (ranks > (whole > wanted[:, None] + RANK_TOLERANCE).sum(-1)).all()
    assert (ranks <= (whole > wanted[:, None] - RANK_TOLERANCE).sum(-1)).all()
    for line in lines:
        assert set(range(1, num_top + 1)) <= {entry.rank for entry in line.values()}
        assert set(asked) <= set(line)


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def save_tokenizer(folder: Path, tokens: dict[int, str]) -> None:
    """Save a tokenizer of these tokens behind the special ones."""
    specials = ["<pad>", "<s>", "</s>"]
    vocab = {token: token_id for token_id, token in enumerate([*specials, *tokens.values()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def character_of(token_id: int) -> str:
    """An id as a character, so that any ids can be said; the first that is not special is a space."""
    return " " if token_id == NUM_SPECIAL else chr(0x4E00 + token_id)
