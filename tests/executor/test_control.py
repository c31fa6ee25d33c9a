"""`TorchExecutor` beside its steps: whose weights it has after each call, and whose memory."""

import asyncio
import gc
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import torch
import transformers
from executor.control_contract import BOTH, ControlContract, Controlled
from executor.late_device import start_late
from executor.plans import PROMPT, PlanWriter, greedy_tokens
from executor.weight_changes import (
    FAMILIES,
    QUERY,
    Checkpoint,
    changed_checkpoint,
    cut_short,
    drawn,
    fail_when_loaded,
    keeping_graphs,
    send,
    without_a_tensor,
)
from hostile_errors import HOSTILE
from models.quantised_checkpoints import gptq
from models.quantised_checkpoints import write as quantised
from nightly import nightly
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.core.control import CommitWeights, ExecuteDummyBatch, SaveShardedState, Sleep, UpdateWeights, WakeUp
from aioengine.core.executor_protocol import DeviceLost
from aioengine.errors import ConfigError, InvalidRequest, ModelLoadError
from aioengine.executor import weights as weights_module
from aioengine.executor.host import HostAccelerator
from aioengine.executor.torch_executor import TorchExecutor
from aioengine.kernels.operations import plain_torch
from aioengine.models import loader, saver
from aioengine.models.checkpoint import EMBEDDING, HEAD, INDEX_FILE, SINGLE_FILE, checkpoint_tensors
from aioengine.models.decoder import Decoder
from aioengine.models.folder import ModelFolder
from aioengine.models.loader import LoadStopped, load_decoder
from doubles.fake_accelerator import FakeAccelerator
from doubles.flipped_operations import flipped_operations


@pytest.fixture(params=["cpu", *nightly("packed"), "late"])
def way(request: pytest.FixtureRequest) -> str:
    """The host's processor, also with weights in a layout of its own, or a device that is always late."""
    return str(request.param)


@asynccontextmanager
async def started(folder: Path, way: str = "cpu", **fields: Any) -> AsyncIterator[TorchExecutor]:
    if way == "late":
        executor = await start_late(folder, FakeAccelerator(), max_model_len=None, **fields)
    else:
        defaults = {"max_num_seqs": 4, "block_size": 4, "kv_cache_memory_bytes": 2**20, "num_threads": 1}
        config = EngineConfig(**{**defaults, **fields})
        model = await asyncio.to_thread(ModelFolder.read, folder)
        accelerator = HostAccelerator()
        accelerator.operations = flipped_operations if way == "packed" else plain_torch
        executor = await TorchExecutor.start(model, config, find_accelerator=lambda: accelerator)
    try:
        yield executor
    finally:
        await executor.aclose()


async def tensors(executor: TorchExecutor) -> dict[str, Tensor]:
    """The weights, as a checkpoint names them."""

    def read(decoder: Decoder) -> dict[str, Tensor]:
        places = checkpoint_tensors(decoder.config)
        return {name: place.read(decoder.dense(place.parameter)).clone() for name, place in places.items()}

    (held,) = await executor.apply_model(read)
    return held


async def assert_same(executor: TorchExecutor, folder: Path, way: str = "cpu", **fields: Any) -> None:
    """It has the weights of that folder, and computes as one that was started there."""
    async with started(folder, way, **fields) as expected:
        theirs = await tensors(expected)
        ours = await tensors(executor)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name
        assert await greedy_tokens(executor) == await greedy_tokens(expected)


SHAPES: dict[str, tuple[int, ...]] = {EMBEDDING: (384, 64), "model.norm.weight": (64,)}


class TestContract(ControlContract):
    @pytest.fixture(autouse=True)
    def _checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    async def start(self, tmp_path: Path, max_in_flight: int) -> Controlled:
        config = EngineConfig(
            max_num_seqs=4, block_size=4, kv_cache_memory_bytes=2**20, num_threads=1, max_in_flight=max_in_flight
        )
        folder = await asyncio.to_thread(ModelFolder.read, self.checkpoint("llama2"))
        executor = await TorchExecutor.start(folder, config)
        return Controlled(executor, self.checkpoint("llama2", seed=1), SHAPES)


@pytest.mark.nightly
class TestContractOnALateDevice(TestContract):
    async def start(self, tmp_path: Path, max_in_flight: int) -> Controlled:
        executor = await start_late(self.checkpoint("llama2"), FakeAccelerator(), max_in_flight=max_in_flight)
        return Controlled(executor, self.checkpoint("llama2", seed=1), SHAPES)


@pytest.mark.nightly
@pytest.mark.asyncio(loop_factories=["uvloop"])
class TestContractOnUvloop(TestContract):
    """On the other loop."""


ALL_FAMILIES = [*FAMILIES, *nightly(("qwen2", torch.float32))]
ONE_FAMILY = [*nightly(FAMILIES[0]), *ALL_FAMILIES[1:]]
"""In `make check` one with a tied head, in bfloat16."""


# From a folder


@pytest.mark.parametrize(("family", "dtype"), ONE_FAMILY)
async def test_the_weights_of_a_folder_are_those_of_an_executor_started_there(
    checkpoint: Checkpoint, way: str, family: str, dtype: torch.dtype
) -> None:
    other = checkpoint(family, dtype=dtype, seed=1)
    async with started(checkpoint(family, dtype=dtype), way) as executor:
        async with keeping_graphs(executor):
            await executor.perform(UpdateWeights(other))
        await assert_same(executor, other, way)
        await executor.perform(UpdateWeights(checkpoint(family, dtype=dtype, seed=2, shards=3)))
        await assert_same(executor, checkpoint(family, dtype=dtype, seed=2), way)


async def test_the_weights_of_a_folder_come_in_the_models_dtype(checkpoint: Checkpoint, way: str) -> None:
    wide, narrow = checkpoint("qwen3", seed=1), checkpoint("qwen3", dtype=torch.bfloat16)
    for own, dtype, other in ((narrow, "bfloat16", wide), (wide, "float32", narrow)):
        async with started(own, way) as executor:
            async with keeping_graphs(executor):
                await executor.perform(UpdateWeights(other))
            await assert_same(executor, other, way, dtype=dtype)


async def test_a_folder_needs_no_config(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = checkpoint("llama2", seed=1)
    shutil.copyfile(other / SINGLE_FILE, tmp_path / SINGLE_FILE)
    async with started(checkpoint("llama2")) as executor:
        await executor.perform(UpdateWeights(tmp_path))
        await assert_same(executor, other)


def with_another_shape(folder: Path) -> None:
    held = load_file(folder / SINGLE_FILE)
    save_file({**held, QUERY: held[QUERY][:-1].clone()}, folder / SINGLE_FILE)


def with_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


with_shorter_texts = with_config(max_position_embeddings=128)
OTHER_ROTATION = {"rope_type": "default", "rope_theta": 5000.0}


MISFITS: list[tuple[Callable[[Path], None], str]] = [
    (without_a_tensor, "lacks tensor"),
    *nightly((with_another_shape, "has shape"), (cut_short, "cut short")),
    (with_config(rope_parameters=OTHER_ROTATION), "another model than the one that runs: ropes"),
    *nightly(
        (with_shorter_texts, "max_model_len=256"), (with_config(rms_norm_eps=1e-3), "rms_norm_eps 0.001 instead of")
    ),
]


@pytest.mark.parametrize("level", [1, *nightly(0, 2)])
@pytest.mark.parametrize(("damage", "message"), MISFITS)
async def test_a_checkpoint_that_does_not_fit_changes_nothing(
    checkpoint: Checkpoint,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    level: Literal[0, 1, 2],
    way: str,
) -> None:
    misfit = Path(shutil.copytree(checkpoint("llama2", seed=1), tmp_path / "misfit"))
    damage(misfit)
    async with started(checkpoint("llama2"), way) as executor:
        if level:
            await executor.perform(Sleep(level))
        with pytest.raises(ModelLoadError, match=message):
            await executor.perform(UpdateWeights(misfit))
        await executor.perform(WakeUp(BOTH))
        await assert_same(executor, checkpoint("llama2"), way)


async def test_a_loading_that_fails_halfway_changes_nothing(
    checkpoint: Checkpoint, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(checkpoint("qwen3"), way) as executor:
        async with keeping_graphs(executor):
            with monkeypatch.context() as patch:
                patch.setattr(loader, "load_weights", fail_when_loaded)
                with pytest.raises(MemoryError):
                    await executor.perform(UpdateWeights(checkpoint("qwen3", seed=1)))
        await assert_same(executor, checkpoint("qwen3"), way)
        await executor.perform(Sleep(2))
        await executor.perform(WakeUp(BOTH))
        await assert_same(executor, checkpoint("qwen3"), way)


# As tensors


@pytest.mark.parametrize("pieces", [5, *nightly(1)])
@pytest.mark.parametrize(("family", "dtype"), ONE_FAMILY)
async def test_any_tensors_of_any_dtype_make_the_checkpoint_that_has_them(
    checkpoint: Checkpoint, tmp_path: Path, way: str, family: str, dtype: torch.dtype, pieces: int
) -> None:
    folder = checkpoint(family, dtype=dtype)
    held = load_file(folder / SINGLE_FILE)
    names = [
        [QUERY],
        [name for name in held if name.endswith(("k_proj.bias", "q_proj.bias"))],
        [name for name in held if name.endswith(("k_norm.weight", "input_layernorm.weight"))],
        [name for name in held if name.endswith(("gate_proj.weight", "down_proj.weight"))],
        [EMBEDDING],
        [name for name in held if name in (HEAD, "model.norm.weight")],
    ]
    so_far: dict[str, Tensor] = {}
    async with started(folder, way) as executor:
        for number, chosen in enumerate(group for group in names if group):
            sent_as = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
            sent = {name: drawn(tuple(held[name].shape), seed=number).to(sent_as) for name in chosen}
            async with keeping_graphs(executor):
                await send(executor, sent, pieces=pieces)
                await executor.perform(CommitWeights("t"))
            so_far.update(sent)
            await assert_same(executor, changed_checkpoint(folder, tmp_path / str(number), so_far), way)


async def test_a_tied_head_is_the_embedding(checkpoint: Checkpoint, way: str, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    sent = drawn((384, 64))
    expected = changed_checkpoint(folder, tmp_path / "expected", {EMBEDDING: sent})
    for names in ([HEAD], [EMBEDDING, HEAD]):
        async with started(folder, way) as executor:
            async with keeping_graphs(executor):
                await send(executor, dict.fromkeys(names, sent))
                await executor.perform(CommitWeights("t"))
            await assert_same(executor, expected, way)


async def test_a_tied_head_that_differs_is_refused(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("qwen3")) as executor:
        await send(executor, {EMBEDDING: drawn((384, 64)), HEAD: drawn((384, 64), seed=4)})
        with pytest.raises(InvalidRequest, match="the model ties them"):
            await executor.perform(CommitWeights("t"))
        await assert_same(executor, checkpoint("qwen3"))


@pytest.mark.parametrize("num_read", [0, 1])
async def test_a_commit_that_fails_halfway_changes_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_read: int, way: str
) -> None:
    read, calls = weights_module._tensor, []

    def fail_later(staged: Any) -> Tensor:
        calls.append(staged)
        if len(calls) > num_read:
            raise MemoryError
        return read(staged)

    sent = {QUERY: drawn((64, 64)), HEAD: drawn((384, 64)), EMBEDDING: drawn((384, 64), seed=4)}
    async with started(checkpoint("llama2"), way) as executor:
        await send(executor, sent)
        async with keeping_graphs(executor):
            with monkeypatch.context() as patch:
                patch.setattr(weights_module, "_tensor", fail_later)
                with pytest.raises(MemoryError):
                    await executor.perform(CommitWeights("t"))
        await assert_same(executor, checkpoint("llama2"), way)
        await executor.perform(Sleep(2))  # they came from a folder, as before


@pytest.mark.parametrize("quantization", [*nightly("int8"), "int4"])
@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
async def test_quantised_weights_are_replaced_saved_and_come_back_without_a_further_error(
    checkpoint: Checkpoint, tmp_path: Path, family: str, dtype: torch.dtype, quantization: str
) -> None:
    fields = {"quantization": quantization}
    folder, other = checkpoint(family, dtype=dtype), checkpoint(family, dtype=dtype, seed=1)
    async with started(folder) as dense, started(folder, **fields) as executor:
        assert executor.info.weight_bytes < 0.6 * dense.info.weight_bytes
        await executor.perform(UpdateWeights(other))
        await assert_same(executor, other, **fields)
        sent = {QUERY: drawn((128 if family == "qwen3" else 64, 64)), "model.norm.weight": drawn((64,)) + 1}
        await send(executor, sent)
        async with keeping_graphs(executor):
            await executor.perform(CommitWeights("t"))
        changed = changed_checkpoint(other, tmp_path / "changed", sent)
        await assert_same(executor, changed, **fields)
        await executor.perform(UpdateWeights(changed))
        await executor.perform(Sleep(2))
        await executor.perform(WakeUp(BOTH))
        await assert_same(executor, changed, **fields)
        if dtype == torch.float32:  # a narrower one rounds what is saved
            await executor.perform(SaveShardedState(tmp_path / "saved", 2**40))
            await assert_same(executor, tmp_path / "saved", **fields)


@pytest.mark.parametrize("way", [*nightly("cpu"), "late"])
async def test_codes_of_a_checkpoint_are_replaced_by_such_codes_and_saved_dense(
    checkpoint: Checkpoint, tmp_path: Path, way: str
) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    sources = [checkpoint("llama2", seed=seed) for seed in (0, 1)]
    (folder, _), (other, dense) = (quantised(source, tmp_path / source.name, gptq(4, 32), config) for source in sources)
    asymmetric, _ = quantised(sources[1], tmp_path / "zeros", gptq(4, 32, is_symmetric=False), config)
    async with started(folder, way) as executor:
        await executor.perform(UpdateWeights(other))
        await assert_same(executor, other, way)
        for unlike in (dense, asymmetric):
            with pytest.raises(ModelLoadError, match="of another format than the one that runs"):
                await executor.perform(UpdateWeights(unlike))
        await send(executor, {QUERY: drawn((64, 64))})
        with pytest.raises(InvalidRequest, match="from a folder of the same format"):
            await executor.perform(CommitWeights("t"))
        await executor.perform(Sleep(2))
        await executor.perform(WakeUp(BOTH))
        await assert_same(executor, other, way)
        await executor.perform(SaveShardedState(tmp_path / "saved", 2**40))
        assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
        for name, tensor in load_file(tmp_path / "saved" / SINGLE_FILE).items():
            torch.testing.assert_close(tensor, load_file(dense / SINGLE_FILE)[name], rtol=1e-6, atol=0)


async def test_weights_are_quantised_for_the_hosts_processor_alone(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="quantization='int8' is for a CPU"):
        async with started(checkpoint("llama2"), "late", quantization="int8"):
            pass


async def test_a_cancelled_piece_takes_its_transfer_with_it(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("llama2")) as executor:
        await send(executor, {QUERY: drawn((64, 64))})
        with anyio.CancelScope() as scope:
            scope.cancel()
            await send(executor, {EMBEDDING: drawn((384, 64))})
        with pytest.raises(InvalidRequest, match="nothing is staged"):
            await executor.perform(CommitWeights("t"))


# Sleep


async def test_weights_that_cannot_be_read_again_stay_away_until_they_can(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))
    async with started(folder) as executor:
        await executor.perform(Sleep(2))
        shutil.move(folder, tmp_path / "away")
        with pytest.raises(ModelLoadError):
            await executor.perform(WakeUp(BOTH))
        with pytest.raises(AssertionError, match=r"kv_cache.*weights"):
            await executor.launch(PlanWriter(8, 4).plan({})).finish()
        shutil.move(tmp_path / "away", folder)
        await executor.perform(WakeUp(BOTH))
        await assert_same(executor, folder)


async def test_another_model_in_the_old_ones_place_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))
    async with started(folder) as executor:
        await executor.perform(Sleep(2))
        shutil.copytree(checkpoint("qwen3"), folder, dirs_exist_ok=True)
        with pytest.raises(ModelLoadError, match="another model"):
            await executor.perform(WakeUp(BOTH))
        shutil.copytree(checkpoint("llama2"), folder, dirs_exist_ok=True)
        with_shorter_texts(folder)
        await executor.perform(UpdateWeights(checkpoint("llama2", seed=1)))
        await executor.perform(WakeUp(BOTH))
        await assert_same(executor, checkpoint("llama2", seed=1))


async def test_random_weights_come_back_as_they_were(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("llama2"), load_format="dummy") as executor:
        await executor.perform(Sleep(2))
        await executor.perform(WakeUp(BOTH))
        await assert_same(executor, checkpoint("llama2"), load_format="dummy")


async def test_closing_ends_a_loading(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    is_loading = threading.Event()

    def load_slowly(*_: Any, should_stop: Callable[[], bool], **__: Any) -> Decoder:
        is_loading.set()
        while not should_stop():
            pass
        raise LoadStopped

    monkeypatch.setattr(loader, "load_weights", load_slowly)
    async with started(checkpoint("llama2")) as executor, anyio.create_task_group() as tasks:
        with_error: list[BaseException] = []

        async def update() -> None:
            with pytest.raises(DeviceLost) as raised:
                await executor.perform(UpdateWeights(checkpoint("llama2")))
            with_error.append(raised.value)

        tasks.start_soon(update)
        await asyncio.to_thread(is_loading.wait)
        await executor.aclose()
    assert with_error


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


KEPT_BY_GLIBC = 64 * 2**20
"""Of a thread's memory, however much of it is free."""


reads_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the kernel's count of pages")


def save_large_config(folder: Path, num_layers: int = 3, tied: bool = False) -> None:
    """Of a model with more weights than 4 times `KEPT_BY_GLIBC`."""
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)


@pytest.mark.nightly
@reads_proc
@pytest.mark.parametrize(("dtype", "num_layers", "tied"), [("float32", 3, False), *nightly(("bfloat16", 8, True))])
async def test_a_sleep_gives_the_memory_back(tmp_path: Path, dtype: str, num_layers: int, tied: bool) -> None:
    save_large_config(tmp_path, num_layers, tied)
    fields = {"dtype": dtype, "load_format": "dummy", "kv_cache_memory_bytes": 192 * 2**20, "max_model_len": 256}
    async with started(tmp_path, **fields, block_size=128, max_num_seqs=64) as executor:
        attention = executor._device.runner._attention
        assert attention is not None
        with torch.inference_mode():
            attention.caches[0].fill_(1.0)
        del attention
        await executor.perform(ExecuteDummyBatch())
        info = executor.info
        assert info.weight_bytes > 4 * KEPT_BY_GLIBC
        awake = resident_bytes()
        await executor.perform(Sleep(1))
        light = resident_bytes()
        assert awake - light > 0.9 * info.kv_cache_bytes
        for _ in range(2):
            await executor.perform(Sleep(2))
            assert light - resident_bytes() > info.weight_bytes - KEPT_BY_GLIBC
            await executor.perform(WakeUp(BOTH))
            await executor.perform(ExecuteDummyBatch())
            assert resident_bytes() - light < KEPT_BY_GLIBC


@pytest.mark.nightly
@reads_proc
async def test_other_weights_take_no_more_memory(tmp_path: Path) -> None:
    save_large_config(tmp_path)
    fields = {"dtype": "float32", "load_format": "dummy", "max_model_len": 256}
    async with started(tmp_path, **fields, kv_cache_memory_bytes=192 * 2**20) as executor:
        await executor.perform(SaveShardedState(tmp_path / "saved", 2**26))
        before, most = resident_bytes(), executor.info.weight_bytes // 2  # a copy that was kept would be all of them
        for _ in range(2):
            await executor.perform(UpdateWeights(tmp_path / "saved"))
            assert resident_bytes() - before < most
        await send(executor, {EMBEDDING: drawn((8192, 1024)), "model.layers.1.mlp.up_proj.weight": drawn((4096, 1024))})
        await executor.perform(CommitWeights("t"))
        assert resident_bytes() - before < most


# Saving


@pytest.mark.parametrize("max_shard_bytes", [100_000, *nightly(2**30)])
@pytest.mark.parametrize(("family", "dtype"), ALL_FAMILIES)
async def test_what_was_saved_is_what_runs_for_us_and_for_transformers(
    checkpoint: Checkpoint, way: str, tmp_path: Path, family: str, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    folder = checkpoint(family, dtype=dtype, tokenizer=True)
    sent = {QUERY: drawn(tuple(load_file(folder / SINGLE_FILE)[QUERY].shape))}
    saved = tmp_path / "saved"
    async with started(folder, way) as executor:
        await send(executor, sent)
        await executor.perform(CommitWeights("t"))
        names = await executor.perform(SaveShardedState(saved, f"{max_shard_bytes}B"))
        assert (len(names) > 1) == (max_shard_bytes < 2**30)
        await assert_same(executor, saved, way)
        await assert_same(executor, changed_checkpoint(folder, tmp_path / "expected", sent), way)
        expected = await greedy_tokens(executor)
    assert sorted(names) == names == sorted(path.name for path in saved.glob("*.safetensors"))
    small = {path.name for path in folder.iterdir()} - {SINGLE_FILE}
    assert {path.name for path in saved.iterdir()} - {INDEX_FILE, *names} == small >= {"tokenizer.json"}
    original = load_file(folder / SINGLE_FILE)
    written = {name: tensor for file in names for name, tensor in load_file(saved / file).items()}
    assert {name: (t.dtype, t.shape) for name, t in written.items()} == {
        name: (t.dtype, t.shape) for name, t in original.items()
    }
    if dtype == torch.float32:  # in bfloat16 its roundings are others
        assert of_transformers(saved) == expected


def of_transformers(folder: Path) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)
    generated: list[int] = output[0, len(PROMPT) :].tolist()
    return generated


async def test_saved_files_hold_no_more_than_they_may_and_are_readable_as_any(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    async with started(checkpoint("llama2")) as executor:
        names = await executor.perform(SaveShardedState(saved, 50_000))
    held = [load_file(saved / name) for name in names]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in held]
    assert all(size <= 50_000 or len(file) == 1 for size, file in zip(sizes, held, strict=True))
    index = json.loads((saved / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert set(index["weight_map"].values()) == set(names)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert saved.stat().st_mode == (tmp_path / "folder").stat().st_mode
    assert {path.stat().st_mode for path in saved.iterdir()} == {(tmp_path / "file").stat().st_mode}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
async def test_a_model_that_runs_in_another_dtype_is_saved_in_that(
    checkpoint: Checkpoint, tmp_path: Path, key: str
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, key: "float32"}))
    async with started(folder, dtype="bfloat16") as executor:
        await executor.perform(SaveShardedState(tmp_path / "saved", 2**30))
        await assert_same(executor, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written == {**config, key: "bfloat16"}


@pytest.mark.parametrize(
    ("first", "second"), [(2**30, 60_000), (100_000, 2**30), *nightly((100_000, 60_000), (2**30, 2**30))]
)
async def test_a_checkpoint_that_is_there_is_replaced(
    checkpoint: Checkpoint, tmp_path: Path, first: int, second: int
) -> None:
    saved = tmp_path / "saved"
    async with started(checkpoint("llama2")) as executor:
        await executor.perform(SaveShardedState(saved, first))
        (saved / "notes.md").write_text("mine")
        await executor.perform(UpdateWeights(checkpoint("llama2", seed=1)))
        names = await executor.perform(SaveShardedState(saved, second))
        await assert_same(executor, saved)
        assert sorted(path.name for path in saved.glob("*.safetensors")) == names
        assert (saved / INDEX_FILE).exists() == (len(names) > 1)
        assert (saved / "notes.md").read_text() == "mine"


async def test_a_model_is_saved_in_the_folder_that_it_came_from(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))
    async with started(folder) as executor:
        await send(executor, {QUERY: drawn((64, 64))})
        await executor.perform(CommitWeights("t"))
        await executor.perform(SaveShardedState(folder, 2**30))
        await assert_same(executor, folder)


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_saving_that_fails_leaves_all_as_it_was(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    saved = tmp_path / "saved"
    async with started(checkpoint("llama2")) as executor:
        if is_there:
            await executor.perform(SaveShardedState(saved, 100_000))
        before = contents(tmp_path)
        await executor.perform(UpdateWeights(checkpoint("llama2", seed=1)))
        written: list[Path] = []

        def fail_later(tensors: Any, path: Path, **options: Any) -> None:
            written.append(path)
            if len(written) == 2:
                raise OSError(28, "No space left on device")
            save_file(tensors, path, **options)

        monkeypatch.setattr(saver, "save_file", fail_later)
        with pytest.raises(OSError, match="No space left"):
            await executor.perform(SaveShardedState(saved, 100_000))
        assert contents(tmp_path) == before
        assert saved.exists() == is_there
        await assert_same(executor, checkpoint("llama2", seed=1))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_model_from_no_folder_cannot_be_saved(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = EngineConfig(max_num_seqs=4, kv_cache_memory_bytes=2**20, num_threads=1)
    load = partial(load_decoder, await asyncio.to_thread(ModelFolder.read, checkpoint("llama2")), config)
    executor = await TorchExecutor.start(None, config, load=load)
    with pytest.raises(InvalidRequest, match="no folder"):
        await executor.perform(SaveShardedState(tmp_path / "saved", 2**30))
    await executor.aclose()


# Functions


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_a_function_cannot_end_the_loop(checkpoint: Checkpoint, error: type[BaseException]) -> None:
    def leave(decoder: Decoder) -> None:
        raise error

    async with started(checkpoint("llama2")) as executor:
        with pytest.raises(RuntimeError, match=error.__name__):
            await executor.apply_model(leave)
        assert await executor.apply_model(lambda decoder: threading.current_thread().name) == ["aioengine-device"]
        assert len(await greedy_tokens(executor)) == 6


async def test_a_function_may_raise_what_breaks_those_who_look_at_it(checkpoint: Checkpoint) -> None:
    async with started(checkpoint("llama2")) as executor:
        for what, raise_it in HOSTILE.items():
            with anyio.fail_after(20):
                try:
                    await executor.apply_model(lambda decoder, raise_it=raise_it: raise_it())
                    pytest.fail(f"{what}: it raised nothing")
                except Exception as error:
                    del error
                assert len(await greedy_tokens(executor)) == 6, what
