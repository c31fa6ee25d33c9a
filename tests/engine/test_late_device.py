"""Requests of all kinds through the public engine on a GPU that is always late: the outputs of the CPU's executor."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import FAMILIES, NUM_SPECIAL, OTHERS, cached_checkpoints
from executor.late_device import start_late
from integrity import check_integrity
from layouts import layout_of

from aioengine import ConfigError, Engine, LogitsRow, RequestOutput, StepFailed
from aioengine.config import EngineConfig
from aioengine.executor.accelerator import DeviceMemory
from aioengine.executor.memory import num_kv_blocks
from aioengine.executor.runner import Runner
from aioengine.kernels.triton import triton_operations
from aioengine.models.folder import DEMO_MODEL, ModelFolder
from aioengine.models.implementations import read_model_config
from doubles.fake_accelerator import FakeAccelerator

DEMO = DEMO_MODEL
MAX_MODEL_LEN = 96
LOGPROB_TOLERANCE = 1e-3
NEAR = 2e-3
"""Log-probabilities that are no further apart may change places."""
SETTINGS = list(itertools.product((1, 2, 4), ("off", "lazy", "start")))
"""(depth, graphs)"""
STORMS = [
    pytest.param(family, setting, marks=() if family == "mistral" else pytest.mark.nightly)
    for family, setting in zip((*FAMILIES, "demo", *OTHERS), itertools.cycle(SETTINGS))
]

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    return cached_checkpoints(tmp_path_factory.mktemp("gpu-engine"))


@pytest.fixture
def folder(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("qwen3", tokenizer=True, num_hidden_layers=1)


COMMON: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 6, "max_num_batched_tokens": 48}


@asynccontextmanager
async def serving(
    folder: Path, accelerator: FakeAccelerator | None = None, **fields: Any
) -> AsyncIterator[tuple[Engine, Any]]:
    """An engine on a GPU, with its executor."""
    fields = {**COMMON, "block_size": 8, "kv_cache_memory_bytes": 2**24, **fields}
    executor = await start_late(folder, accelerator or FakeAccelerator(), **fields)
    async with Engine(str(folder), executor=executor, **fields) as engine:
        yield engine, executor


def core_of(engine: Engine) -> Any:
    assert engine._runtime is not None
    return engine._runtime.core


def check_nothing_is_held(engine: Engine) -> None:
    core = core_of(engine)
    check_integrity(core.scheduler)
    stats = core.stats()
    assert stats.free_blocks == stats.num_blocks
    assert stats.running == stats.waiting == stats.blocked == 0


# A storm of all that may be asked


def follow(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    """Depends on the output so far."""
    for line, row in zip(logits, rows, strict=True):
        for nth, token in enumerate(row.output_token_ids.tolist()[-3:]):
            line[(token * 7 + nth + row.choice) % len(line)] += 8.0


class RaisesLate:
    def __init__(self, num_tokens: int, choice: int) -> None:
        self._at = num_tokens, choice

    def __call__(self, logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
        if any((len(row.output_token_ids), row.choice) == self._at for row in rows):
            raise KeyError("late")
        return logits * 0.9


def shorten(logits: torch.Tensor, rows: list[LogitsRow]) -> torch.Tensor:
    return logits[:, :-1] if len(rows[0].output_token_ids) == 3 else logits


def mask_all(logits: torch.Tensor, rows: list[LogitsRow]) -> None:
    if len(rows[0].output_token_ids) > 1:
        logits.fill_(-torch.inf)


class Wish(NamedTuple):
    prompt: Any
    params: dict[str, Any]
    priority: int


def make_wish(rng: random.Random, shared: list[int], vocab: int) -> Wish:
    def ids(count: int) -> list[int]:
        return [rng.randrange(NUM_SPECIAL, vocab) for _ in range(count)]

    def word() -> str:
        return "".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 3)))

    prompt = shared[: rng.choice([0, 0, 20, 40])] + ids(rng.choice([1, 3, 8, 30]))
    params: dict[str, Any] = {
        "max_tokens": rng.randint(1, 14), "seed": rng.randrange(1000), "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
    }  # fmt: skip
    few = sorted(set(ids(8)))
    others: list[dict[str, Any]] = [
        {"top_k": rng.choice([1, 5, 50])},
        {"top_p": rng.choice([0.3, 0.9]), "min_p": rng.choice([0.0, 0.05])},
        {"repetition_penalty": rng.choice([0.8, 1.6])},
        {"frequency_penalty": 1.1, "presence_penalty": -0.7},
        {"stop_token_ids": ids(vocab // 3), "min_tokens": rng.randint(0, 5)},
        {"stop": [word(), word()], "min_tokens": rng.randint(0, 5)},
        {"logit_bias": {token: rng.uniform(-30, 30) for token in ids(6)}},
        {"bad_words": [word() for _ in range(12)]},
        {"allowed_token_ids": few},
        {"logits_processors": rng.choice([[follow], [follow], [RaisesLate(3, rng.randint(0, 1))], [shorten]])},
        {"n": rng.randint(2, 4)},
        {"n": rng.randint(2, 8), "temperature": 1.2},
        {"logprobs": rng.choice([0, 1, 5, 6, 20])},
        {"logprobs": 1, "logprob_token_ids": ids(3)},
        {"prompt_logprobs": rng.choice([0, 2])},
        {"max_tokens": None, "ignore_eos": True},
    ]
    for other in rng.sample(others, rng.choice([0, 1, 1, 2, 3, 5])):
        params.update(other)
    if params.get("logits_processors", [follow]) != [follow]:
        # Seen when the next step is launched: whether that one fails, and with it other choices, is a matter of time.
        params.pop("stop", None)
    if "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"] or 1)
    return Wish(prompt, params, rng.choice([0, 0, 0, 1, -1]))


async def outcome_of(engine: Engine, wish: Wish) -> RequestOutput | Exception:
    try:
        return await engine.generate(wish.prompt, priority=wish.priority, **wish.params)
    except StepFailed as error:
        return error


async def wish_cancelled(engine: Engine, wish: Wish, patience: int) -> None:
    async with engine.stream(wish.prompt, **wish.params) as stream:
        try:
            async for _ in stream:
                patience -= 1
                if patience < 0:
                    return
        except StepFailed:
            return


async def serve(engine: Engine, wishes: list[Wish], rng: random.Random | None = None) -> list[Any]:
    """All at once; with ``rng`` others come and leave meanwhile."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for wish in wishes:
            tasks.append(group.create_task(outcome_of(engine, wish)))
            if rng is not None and rng.random() < 0.3:
                group.create_task(wish_cancelled(engine, rng.choice(wishes), rng.randint(0, 5)))
            for _ in range(rng.choice([0, 0, 3, 20]) if rng is not None else 0):
                await asyncio.sleep(0)
    return [task.result() for task in tasks]


def check_equal(found: Any, wanted: Any, wish: Wish) -> None:
    assert type(found) is type(wanted), (wish, found, wanted)
    if isinstance(wanted, StepFailed):
        # How many rows of a request a step had, which some messages say, is a matter of time.
        one, other = (re.sub(r"\[\d+, ", "[rows, ", repr(error.__cause__)) for error in (found, wanted))
        assert one == other
        return
    assert found.prompt_token_ids == wanted.prompt_token_ids
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one.token_ids == other.token_ids, wish
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        check_lines(one.logprobs, other.logprobs)
    check_lines(found.prompt_logprobs, wanted.prompt_logprobs)


def check_lines(found: Any, wanted: Any) -> None:
    assert (found is None) == (wanted is None)
    for line, other in zip(found or [], wanted or [], strict=True):
        assert (line is None) == (other is None)
        if line is None:
            continue
        values = sorted((entry.logprob for entry in other.values()), reverse=True)
        for token, entry in line.items():
            if token not in other:  # of two that are nearly as likely either may be the last to be told
                assert any(abs(entry.logprob - value) < NEAR for value in values)
                continue
            assert abs(entry.logprob - other[token].logprob) < LOGPROB_TOLERANCE
            assert abs(entry.rank - other[token].rank) <= 2
            assert entry.decoded_token == other[token].decoded_token


@pytest.mark.parametrize(("family", "setting"), STORMS)
async def test_a_storm_brings_the_cpus_outputs(
    checkpoint: MakeCheckpoint, family: str, setting: tuple[int, str]
) -> None:
    depth, graphs = setting
    layers = {"num_hidden_layers": 2} if family in FAMILIES else {}
    folder = DEMO if family == "demo" else checkpoint(family, tokenizer=True, **layers)
    vocab = 2048 if family == "demo" else 384
    rng = random.Random(family)
    shared = [rng.randrange(NUM_SPECIAL, vocab) for _ in range(40)]
    wishes = [make_wish(rng, shared, vocab) for _ in range(12)]
    wishes += [Wish([n + 5], {"max_tokens": 70, "ignore_eos": True, "seed": n}, 0) for n in range(3)]
    wishes.append(Wish(shared, {"max_tokens": 9, "n": 3, "seed": 1, "logits_processors": [RaisesLate(3, 1)]}, 0))
    wishes.append(Wish(shared, {"max_tokens": 9, "seed": 1, "logits_processors": [mask_all]}, 0))
    fields = {**COMMON, "block_size": 8, "dtype": "float32"}
    async with Engine(
        str(folder), device="cpu", num_threads=1, show_progress=False, kv_cache_memory_bytes=2**25, **fields
    ) as engine:
        wanted = await serve(engine, wishes)
    accelerator = FakeAccelerator()
    executor = await start_late(
        folder,
        accelerator,
        kv_cache_memory_bytes=await asyncio.to_thread(small_cache, folder),
        max_in_flight=depth,
        cuda_graphs=graphs,
        **fields,
    )
    async with Engine(str(folder), executor=executor, **fields) as engine:
        for _ in range(2 if family == "qwen3" else 1):
            found = await serve(engine, wishes, rng)
            for wish, one, other in zip(wishes, found, wanted, strict=True):
                check_equal(one, other, wish)
        check_nothing_is_held(engine)
        stats = core_of(engine).stats()
    assert stats.preemptions > 0, "the KV cache is too large for this test"
    assert stats.prefix_cache_hits > 0
    assert bool(accelerator.graphs) == (graphs != "off" and family not in OTHERS)


def small_cache(folder: Path) -> int:
    """Bytes for a little more than the longest sequence, if all layers kept all of it."""
    model = read_model_config(ModelFolder.read(folder), EngineConfig())
    bytes_a_token = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    return int(1.1 * MAX_MODEL_LEN * bytes_a_token)


# The kernels, in Triton's interpreter

MAX_TOKENS = 3

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_k": 7, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
]
"""All of these share steps, prefill and decode."""


async def outputs(engine: Engine) -> list[Any]:
    async with engine:
        prompts = [[(7 * i + 3 * request) % 90 + 3 for i in range(9 + request)] for request in range(len(REQUESTS))]
        outs = await asyncio.gather(
            *(
                engine.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **request)
                for prompt, request in zip(prompts, REQUESTS, strict=True)
            )
        )
    return [out.outputs[0] for out in outs]


# The interpreter computes with numpy, which says so where a hash wraps around.
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
async def test_the_kernels_bring_the_cpus_tokens(checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is compiled here, and to rehearse each kind of step takes minutes.
    monkeypatch.setattr(Runner, "warm_up", lambda self, *, captures_all, on_capture: None)
    folder = checkpoint("qwen3", num_hidden_layers=1, vocab_size=97, tokenizer=True)
    fields = {"dtype": "float32", "cuda_graphs": "off", "max_num_batched_tokens": 32}
    executor = await start_late(folder, FakeAccelerator(), triton_operations(), **fields)
    common = {"dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    expected = await outputs(Engine(str(folder), device="cpu", **common))
    found = await outputs(Engine(str(folder), executor=executor, **common))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.token_ids) == MAX_TOKENS
    for of_ours, of_theirs in zip(found[1].logprobs, expected[1].logprobs, strict=True):
        assert of_ours.keys() == of_theirs.keys()
        for token, line in of_ours.items():
            assert line.rank == of_theirs[token].rank
            assert line.logprob == pytest.approx(of_theirs[token].logprob, abs=1e-4)


# What can be had


async def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=rf"device='{device}' needs an NVIDIA GPU.*Use device='cpu'"):
            await Engine.start(str(folder), device=device, show_progress=False)
    with pytest.raises(ConfigError, match="device"):
        EngineConfig(device="gpu")
    async with Engine(str(folder), device="auto", show_progress=False) as engine:
        assert core_of(engine).info.device == "cpu"
        assert core_of(engine).info.max_in_flight == 1


@pytest.mark.parametrize("device", ["cpu", "auto"])
async def test_a_cache_of_8_bits_needs_a_gpu(folder: Path, device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8' needs a GPU; on a CPU use 'int8' or 'auto'"):
        await Engine.start(str(folder), device=device, kv_cache_dtype="fp8", show_progress=False)


async def test_an_int8_cache_needs_a_cpu(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8' needs a CPU; on a GPU use 'fp8'"):
        await start_late(folder, FakeAccelerator(), kv_cache_dtype="int8")


async def test_a_gpu_that_is_too_old_for_8_bits_says_so_and_a_newer_one_has_twice_the_blocks(folder: Path) -> None:
    accelerator = FakeAccelerator()
    accelerator.capability = 86
    with pytest.raises(ConfigError, match=r"fp8.*8\.9 or newer; fake is older"):
        await start_late(folder, accelerator, kv_cache_dtype="fp8")
    assert accelerator.num_releases > 0, "what was loaded is gone"
    fields = {"kv_cache_memory_bytes": 2**16, "max_num_seqs": 16}
    async with serving(folder, **fields) as (engine, executor):
        blocks = executor.info.num_blocks
    async with serving(folder, kv_cache_dtype="fp8", **fields) as (engine, executor):
        assert executor.info.num_blocks > 3 * blocks, "of float32"
        out = await engine.generate([5, 6, 7], max_tokens=20, temperature=0.0, ignore_eos=True)
        assert len(out.outputs[0].token_ids) == 20


def kv_blocks(total: int = 10_000, free: int = 8_000, peak: int = 1_000, **fields: Any) -> int:
    config = EngineConfig(**{"block_size": 16, "max_num_seqs": 64, **fields})
    memory, layout = DeviceMemory(total, free, 0), layout_of(None, block_bytes=100)
    [num_blocks] = num_kv_blocks(config, layout, max_model_len=64, memory=memory, peak_bytes=peak)
    return num_blocks


def test_a_share_of_the_gpu_counts_what_others_have_and_what_steps_take() -> None:
    assert kv_blocks(gpu_memory_utilization=0.9) == (9_000 - 2_000 - 1_000) // 100
    assert kv_blocks(gpu_memory_utilization=0.5) == 20
    assert kv_blocks(gpu_memory_utilization=1.0) == 70
    assert kv_blocks(gpu_memory_utilization=0.9, free=10_000, peak=0) == 90
    assert kv_blocks(gpu_memory_utilization=0.9, max_num_seqs=2) == 8, "no more than all sequences could use"


def test_an_absolute_size_is_taken_as_it_is_if_it_is_there() -> None:
    assert kv_blocks(kv_cache_memory_bytes=1_299) == 12
    assert kv_blocks(kv_cache_memory_bytes=7_000) == 70
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=7100 is more than the 7000 bytes that are free"):
        kv_blocks(kv_cache_memory_bytes=7_100)


def test_a_gpu_without_room_says_what_takes_it() -> None:
    with pytest.raises(ConfigError) as error:
        kv_blocks(gpu_memory_utilization=0.33)
    message = str(error.value)
    for part in ("gpu_memory_utilization=0.33 of 10000 bytes", "2000 in use", "1000 for the steps", "grants 300"):
        assert part in message
    assert "set max_model_len to 48 at most" in message
    with pytest.raises(ConfigError, match=r"grants 0: grant more"):
        kv_blocks(free=500)


async def test_a_gpu_gives_the_cache_what_it_has_left(folder: Path) -> None:
    accelerator = FakeAccelerator(total_bytes=4_000_000, free_bytes=3_000_000)
    fields = {"kv_cache_memory_bytes": None, "max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 256}
    fields["cuda_graphs"] = "off"
    async with serving(folder, accelerator, gpu_memory_utilization=0.5, **fields) as (_, executor):
        info = executor.info
        assert info.kv_cache_bytes == info.num_blocks * info.kv_cache_bytes // info.num_blocks
        assert 0 <= 1_000_000 - info.kv_cache_bytes < info.kv_cache_bytes // info.num_blocks
        assert info.max_in_flight == 2
        assert info.device == "fake"
