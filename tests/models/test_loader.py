"""Loading: every tensor in its place, or an error that names what is wrong; nothing left open."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models.reference import edit_json, edit_tensors, refused
from safetensors.torch import load_file
from torch import Tensor

from aioengine.config import EngineConfig
from aioengine.kernels.operations import Operations
from aioengine.kernels.operations import plain_torch as oracles
from aioengine.kernels.packed_weight import PackedWeight
from aioengine.models.checkpoint import EMBEDDING, HEAD, INDEX_FILE, SINGLE_FILE
from aioengine.models.decoder import Decoder, Linear
from aioengine.models.folder import ModelFolder
from aioengine.models.loader import LoadStopped, load_decoder
from doubles.flipped_operations import FlippedOperations, flipped_operations
from tests.checkpoints import READ_HERE

Checkpoint = Callable[..., Path]
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def load(
    folder: Path,
    on_progress: Any = None,
    should_stop: Any = lambda: False,
    operations: Operations = oracles,
    **config: Any,
) -> Decoder:
    return load_decoder(
        ModelFolder.read(folder),
        EngineConfig(**config),
        operations=operations,
        on_progress=on_progress,
        should_stop=should_stop,
    )


Copied = Callable[..., Path]


@pytest.mark.nightly
def test_loading_needs_no_transformers(checkpoint: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from aioengine.config import EngineConfig\n"
        "from aioengine.models.folder import ModelFolder\n"
        "from aioengine.models.loader import load_decoder\n"
        "for folder in sys.argv[1:]: load_decoder(ModelFolder.read(Path(folder)), EngineConfig())\n"
        "sys.exit(bool({'transformers', 'sympy', 'torch._dynamo'} & set(sys.modules)))"
    )
    folders = [str(checkpoint(family)) for family in READ_HERE]
    assert subprocess.run([sys.executable, "-c", code, *folders], check=False).returncode == 0


def assert_same(left: Decoder, right: Decoder) -> None:
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


# What is loaded


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_shards_give_the_same_as_one_file(checkpoint: Checkpoint, family: str) -> None:
    sharded = checkpoint(family, shards=3)
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    assert_same(load(sharded), load(checkpoint(family)))


def test_without_a_stated_dtype_the_files_counts(copied: Copied) -> None:
    folder = copied(dtype=torch.bfloat16)
    edit_tensors(folder, lambda tensors: tensors.update({INV_FREQ: torch.ones(8)}))
    edit_json(folder / "config.json", dtype=None)
    assert load(folder).config.dtype is torch.bfloat16
    assert load(folder, dtype="float32").config.dtype is torch.float32


def test_the_dtype_of_a_file_may_differ_from_the_configs(copied: Copied) -> None:
    folder = copied()
    edit_json(folder / "config.json", dtype="float16")
    weight = load(folder).norm
    assert torch.equal(weight, load_file(folder / SINGLE_FILE)["model.norm.weight"].half())


def test_dummy_weights_need_no_files_and_are_always_the_same(copied: Copied) -> None:
    folder = copied("qwen2")
    (folder / SINGLE_FILE).unlink()
    (folder / "generation_config.json").unlink()
    torchs_own = torch.random.get_rng_state()
    first, second = (load(folder, load_format="dummy") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), torchs_own)
    assert_same(first, second)
    assert 0 < first.layers[0].qkv.weight.abs().max() < 0.1
    assert len(first.embedding.weight.unique()) > 1000
    assert (first.norm == 1).all()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("shards", [1, 3])
def test_progress_climbs_from_nothing_to_everything_unless_it_is_stopped(
    checkpoint: Checkpoint, load_format: str, shards: int
) -> None:
    folder, reports = checkpoint("llama2", shards=shards), list[tuple[int, int]]()
    decoder = load(folder, lambda *progress: reports.append(progress), load_format=load_format)
    done = [progress[0] for progress in reports]
    assert {total for _, total in reports} == {decoder.weight_bytes} == {done[-1]}
    assert done[0] == 0
    assert all(a < b for a, b in itertools.pairwise(done))
    assert len(done) > 20
    reports.clear()
    with pytest.raises(LoadStopped):
        load(folder, lambda *p: reports.append(p), lambda: len(reports) > 3, load_format=load_format)
    assert len(reports) == 4


def test_loading_stops_while_packing_too(checkpoint: Checkpoint) -> None:
    reports: list[tuple[int, int]] = []
    with pytest.raises(LoadStopped):
        load(
            checkpoint("llama2"),
            lambda *p: reports.append(p),
            lambda: bool(reports) and reports[-1][0] == reports[-1][1],
        )


def held_open(folder: Path) -> list[str]:
    """Which of the folder's files this process has open or mapped."""
    targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in [*targets, *maps] if str(folder) in line]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_nothing_stays_open_or_mapped_also_after_a_failure(copied: Copied) -> None:
    folder = copied(shards=3)
    seen: list[str] = []
    decoder = load(folder, lambda *_: seen.extend(held_open(folder)))
    assert seen, "the files are looked for in the wrong place"
    assert decoder.weight_bytes > 0
    assert held_open(folder) == []
    with pytest.raises(LoadStopped):
        load(folder, should_stop=lambda: True)
    max(folder.glob("*.safetensors")).unlink()
    refused(folder)
    assert held_open(folder) == []


# Tied embeddings


@pytest.mark.parametrize("is_both", [False, True])
def test_a_tied_head_may_be_saved_beside_the_embedding_or_in_its_place(copied: Copied, is_both: bool) -> None:
    folder = copied("qwen3")
    expected = load(folder)
    with_tensor(HEAD, torch.clone)(folder)
    if not is_both:
        without_tensor("model.embed_tokens.weight")(folder)
    assert load(folder).head is None
    assert_same(load(folder), expected)


# Packed for some operations


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_each_matrix_is_packed_before_the_next_is_read(checkpoint: Checkpoint, load_format: str) -> None:
    folder, reports, packed_at = checkpoint("llama2"), [0], list[int]()

    def pack(*arguments: Any) -> PackedWeight:
        packed_at.append(reports[-1])
        return flipped_operations.pack(*arguments)

    operations: Any = FlippedOperations()
    operations.pack = pack
    decoder = load(folder, lambda done, _: reports.append(done), load_format=load_format, operations=operations)
    embedding_bytes = decoder.embedding.weight.nbytes
    ends = [embedding_bytes, 2 * embedding_bytes + decoder.norm.nbytes]
    for layer in decoder.layers:
        linears = [module for module in layer.modules() if isinstance(module, Linear)]
        sizes = [sum(each.nbytes for each in linear.parameters()) for linear in linears]
        norms = sum(each.nbytes for each in layer.parameters()) - sum(sizes)
        ends += itertools.accumulate(sizes[1:], initial=ends[-1] + norms + sizes[0])
    assert packed_at == ends
    assert {linear.packed.layout for linear in decoder.linears()} == {"flipped"}
    plain = load(folder, load_format=load_format)
    for name, values in plain.named_parameters():
        assert torch.equal(decoder.dense(name), values), name


# What is refused


class Damage(NamedTuple):
    """Attributes:
    do: to a copy of the checkpoint.
    named: texts of the error, with ``{folder}``, and ``{file}`` for its last file of weights before the damage.
    """

    do: Callable[[Path], object]
    named: tuple[str, ...]
    family: str = "llama2"
    shards: int = 1
    load_format: str = "auto"


def last_file(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def cut(num_bytes: int) -> Callable[[Path], object]:
    return lambda folder: last_file(folder).write_bytes(last_file(folder).read_bytes()[:num_bytes])


def with_tensor(name: str, make: Callable[..., Tensor]) -> Callable[[Path], object]:
    """With another tensor of this name, made of the embedding."""
    return lambda folder: edit_tensors(folder, lambda held: held.update({name: make(held[EMBEDDING])}))


def without_tensor(name: str) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(folder, lambda held: held.pop(name))


def with_config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **fields)


def with_index(weight_map: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / INDEX_FILE, weight_map=weight_map)


QUERY_NORM = "model.layers.0.self_attn.q_norm.weight"
UNEXPECTED = ("model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "other")
NO_MAPS: tuple[Any, ...] = (None, {}, [], {"a": 3}, {"a": "../secret.safetensors"}, {"a": "/etc/passwd"})
DAMAGES: dict[str, Damage] = {
    "no weights": Damage(lambda folder: (folder / SINGLE_FILE).unlink(), ("{folder} has no weights", SINGLE_FILE)),
    **{f"cut to {size} bytes": Damage(cut(size), ("{file}", "damaged")) for size in (0, 4, 100, -1, -1000)},
    "a shard cut short": Damage(cut(-8), ("{file}", "damaged"), shards=3),
    "a missing shard": Damage(lambda folder: last_file(folder).unlink(), ("{file} is missing",), shards=3),
    **{f"an index of {m!r}": Damage(with_index(m), (INDEX_FILE, "weight_map"), shards=3) for m in NO_MAPS},
    "an index that is not JSON": Damage(
        lambda folder: (folder / INDEX_FILE).write_text("{"), (INDEX_FILE, "not JSON"), shards=3
    ),
    "a missing tensor": Damage(without_tensor(QUERY), (f"lacks tensor {QUERY}",)),
    "missing tensors": Damage(with_config(num_hidden_layers=4), ("lacks tensor model.layers.3.", "and 8 more")),
    "a missing head": Damage(without_tensor(HEAD), (f"lacks tensor {HEAD}", "tie_word_embeddings")),
    "a tied head that differs": Damage(
        with_tensor(HEAD, lambda embedding: embedding + 1), (HEAD, "tie_word_embeddings"), family="qwen3"
    ),
    **{
        f"unexpected {name}": Damage(with_tensor(name, lambda _: torch.ones(64)), (f"unexpected tensor {name}",))
        for name in UNEXPECTED
    },
    "another shape": Damage(
        with_tensor(QUERY, lambda _: torch.zeros(32, 64)), (QUERY, SINGLE_FILE, "[32, 64]", "[64, 64]")
    ),
    "a norm that would broadcast": Damage(
        with_tensor(QUERY_NORM, lambda _: torch.ones(1)), (QUERY_NORM, "[1]", "[32]"), family="qwen3"
    ),
    **{
        str(dtype): Damage(
            with_tensor(QUERY, lambda _, dtype=dtype: torch.zeros(64, 64).to(dtype)),
            (QUERY, SINGLE_FILE, "supported: F32, BF16, F16", "quantization_config"),
        )
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.float64)
    },
    "more than there is memory": Damage(
        with_config(vocab_size=2**24, hidden_size=2**20), ("no memory",), load_format="dummy"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_is_named(copied: Copied, damage: Damage) -> None:
    folder = copied(damage.family, shards=damage.shards)
    file = last_file(folder)
    damage.do(folder)
    refused(folder, *(text.format(folder=folder, file=file) for text in damage.named), load_format=damage.load_format)


@pytest.mark.parametrize("is_twice", [False, True])
def test_a_shard_that_is_not_as_the_index_says_is_named(copied: Copied, is_twice: bool) -> None:
    folder = copied(shards=3)
    shard = json.loads((folder / INDEX_FILE).read_text())["weight_map"][QUERY]
    other = next(path.name for path in folder.glob("*.safetensors") if path.name != shard)
    if is_twice:
        edit_tensors(folder, lambda tensors: tensors.update({QUERY: torch.zeros(64, 64)}), other)
    else:
        edit_tensors(folder, lambda tensors: tensors.pop(QUERY), shard)
    refused(folder, QUERY, shard, other if is_twice else INDEX_FILE)


def test_config_json_is_looked_at_before_the_files(copied: Copied) -> None:
    folder = copied()
    edit_json(folder / "config.json", architectures=["FalconForCausalLM"])
    (folder / SINGLE_FILE).unlink()
    refused(folder, "FalconForCausalLM")
