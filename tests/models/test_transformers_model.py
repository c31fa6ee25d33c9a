"""Models that transformers' own code computes: what is found of them, what is refused, and their weights' life."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import NUM_SPECIAL, OTHERS, load_reference, save_byte_tokenizer
from models.reference import edit_tensors, refused
from nightly import few, nightly

from aioengine import ConfigError, Engine, ModelLoadError
from aioengine.config import EngineConfig
from aioengine.executor.model_info import read_model_info
from aioengine.models.decoder_config import quiet_transformers
from aioengine.models.folder import ModelFolder
from aioengine.models.implementations import choose_path, load_model, read_model_config
from aioengine.models.loader import LoadStopped
from aioengine.models.saver import save_checkpoint
from aioengine.models.transformers.transformers_config import TransformersConfig

Checkpoint = Callable[..., Path]


def read(folder: Path, **fields: Any) -> Any:
    return read_model_config(ModelFolder.read(folder), EngineConfig(**fields))


def starting(folder: Path, **fields: Any) -> Engine:
    defaults = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 2**22, "max_model_len": 96}
    return Engine(str(folder), show_progress=False, **{**defaults, **fields})


def prompt_of(seed: int, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(NUM_SPECIAL, 384) for _ in range(length)]


async def tokens_of(engine: Engine, prompt: list[int]) -> list[int]:
    output = await engine.generate(prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
    return list(output.outputs[0].token_ids)


def greedy(folder: Path, prompt: list[int], count: int = 12) -> list[int]:
    model, ids = load_reference(folder, dtype=torch.float32), list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", few(["gpt2", "cohere2", "deepseek-v3"], of=OTHERS))
def test_the_shape_is_found_without_weights(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family)
    found = read(folder)
    assert isinstance(found, TransformersConfig)
    theirs = load_reference(folder)
    assert found.vocab_size == 384
    assert found.num_layers == theirs.config.num_hidden_layers
    assert found.hidden_size == theirs.config.hidden_size
    assert choose_path(ModelFolder.read(folder), EngineConfig()).path == "transformers"


def test_windows_are_those_of_the_masks_that_transformers_makes(checkpoint: Checkpoint) -> None:
    assert read(checkpoint("cohere2")).windows == (8, None)
    assert read(checkpoint("starcoder2")).windows == (24, 24)
    assert read(checkpoint("gpt2")).windows == (None, None)


async def test_a_native_family_is_equal_by_transformers(checkpoint: Checkpoint) -> None:
    folder, prompt = checkpoint("llama3", tokenizer=True), prompt_of(1)
    async with starting(folder) as native, starting(folder, model_path="transformers") as other:
        assert await tokens_of(native, prompt) == await tokens_of(other, prompt) == greedy(folder, prompt)


@pytest.mark.parametrize("family", few(["gpt2"], of=OTHERS))
async def test_bfloat16_is_as_near_as_transformers_own(checkpoint: Checkpoint, family: str) -> None:
    folder, prompt = checkpoint(family, tokenizer=True), prompt_of(2, 40)
    exact, near = (load_reference(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        exact, near = (model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1) for model in (exact, near))
    async with starting(folder, dtype="bfloat16", max_num_batched_tokens=13, max_num_seqs=8) as engine:
        output = await engine.generate(prompt, temperature=0.0, max_tokens=1, prompt_logprobs=0)
    lines = (output.prompt_logprobs or [])[1:]
    found = torch.tensor(
        [line[token].logprob for line, token in zip(lines, prompt[1:], strict=True) if line is not None]
    )
    at = torch.tensor(prompt[1:])[:, None]
    errors = [(each - exact.gather(1, at)[:, 0]).abs() for each in (found, near.gather(1, at)[:, 0])]
    assert errors[0].mean() < 1.5 * errors[1].mean() + 0.01


@pytest.mark.parametrize("family", few(["gpt2"], of=OTHERS))
async def test_weights_sleep_are_saved_and_replaced(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    folder, prompt = checkpoint(family, tokenizer=True), prompt_of(3)
    other = checkpoint(family, seed=5, tokenizer=True)
    first, second = greedy(folder, prompt), greedy(other, prompt)
    assert first != second
    async with starting(folder) as engine:
        assert await tokens_of(engine, prompt) == first
        for level in (1, 2):
            await engine.sleep(level)
            await engine.wake_up()
            assert await tokens_of(engine, prompt) == first
        await engine.update_weights(str(other))
        assert await tokens_of(engine, prompt) == second
        await engine.save_sharded_state(str(tmp_path / "saved"))
        tensors = {name: value.clone() for name, value in load_reference(folder).named_parameters()}
        await engine.update_weights(tensors=tensors)
        assert await tokens_of(engine, prompt) == first
        (kind,) = await engine.apply_model(lambda model: type(model.model).__name__)
        assert kind == type(load_reference(folder)).__name__
    async with starting(tmp_path / "saved") as engine:
        assert await tokens_of(engine, prompt) == second


async def test_random_weights_need_no_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint("gpt2") / "config.json").read_text())
    save_byte_tokenizer(tmp_path)
    async with starting(tmp_path, load_format="dummy") as engine, starting(tmp_path, load_format="dummy") as again:
        assert await tokens_of(engine, prompt_of(4)) == await tokens_of(again, prompt_of(4))


def test_loading_tells_how_far_it_is_and_stops(checkpoint: Checkpoint) -> None:
    folder, progress = ModelFolder.read(checkpoint("gpt2")), []
    load_model(folder, EngineConfig(), on_progress=lambda done, total: progress.append((done, total)))
    (total,) = {total for _, total in progress}
    assert progress[0] == (0, total)
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)
    with pytest.raises(LoadStopped):
        load_model(folder, EngineConfig(), should_stop=lambda: True)


@pytest.mark.parametrize("most", [1, *nightly(1000)])
def test_the_default_dtype_changes_in_a_load_at_a_time(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """It is that of all threads, which compute meanwhile. So many others are loaded, one behind each tensor."""
    folder, config, seen = ModelFolder.read(checkpoint("gpt2")), EngineConfig(dtype="bfloat16"), []
    others: list[int] = []
    set_dtype = torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: (seen.append(dtype), set_dtype(dtype)))
    read_model_config(folder, config)
    assert seen == []

    def load_another(done: int, _: int) -> None:
        if done and len(others) < most:
            others.append(done)
            with pytest.raises(LoadStopped):
                load_model(folder, config, should_stop=lambda: True)

    load_model(folder, config, on_progress=load_another)
    assert others
    assert seen == [torch.bfloat16, torch.float32]


def test_transformers_speaks_again_when_the_last_of_several_silences_ends() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    first, second = quiet_transformers(), quiet_transformers()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logging.get_verbosity() == logging.CRITICAL
    second.__exit__(None, None, None)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


REFUSED: dict[str, tuple[Any, str]] = {
    "an encoder": (transformers.T5Config(vocab_size=384), "only decoders"),
    "tokens that see those behind them": (
        transformers.BertConfig(
            vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        ),
        "encoder.* generates no text",
    ),
    "a decoder made an encoder": (
        transformers.Gemma3TextConfig(
            vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            use_bidirectional_attention=True,
        ),
        "encoder.* generates no text",
    ),
    "experts that ask for their tokens": (
        transformers.DbrxConfig(
            vocab_size=384, d_model=64, n_heads=4, n_layers=2,
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        ),
        "depends on the values of its tokens",
    ),
    "no decoder": (transformers.ViTConfig(), "no causal language model"),
    "a recurrent state": (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2), "not keys and values"),
    "layers without keys": (
        transformers.RecurrentGemmaConfig(vocab_size=384, hidden_size=64, num_hidden_layers=3, num_attention_heads=4),
        "of the 3 layers",
    ),
    "heads of several sizes": (
        transformers.Gemma4TextConfig(
            vocab_size=384, hidden_size=64, hidden_size_per_layer_input=0, head_dim=16, global_head_dim=32,
            intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "heads of several numbers or sizes",
    ),
    "rotations by length": (
        transformers.PhiConfig(
            vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        "change with the length",
    ),
    **{
        f"attention of its own: {name}": (config, f"{name}ForCausalLM .*through transformers' attention interface")
        for name, config in (
            ("Falcon", transformers.FalconConfig(vocab_size=384, hidden_size=64, num_hidden_layers=2)),
            ("Bloom", transformers.BloomConfig(vocab_size=384, hidden_size=64, n_layer=2, n_head=4)),
            ("Mpt", transformers.MptConfig(vocab_size=384, d_model=64, n_heads=4, n_layers=2)),
            ("GPTNeo", transformers.GPTNeoConfig(vocab_size=384, hidden_size=64, num_heads=4)),
            ("XGLM", transformers.XGLMConfig(vocab_size=384, d_model=64, num_layers=2, attention_heads=4)),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    config, reason = REFUSED[case]
    config.architectures = [f"{case.partition(': ')[2] or 'Some'}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        read(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "llama2"])
def test_the_head_of_a_classifier_is_refused(copied: Checkpoint, family: str) -> None:
    folder = copied(family)
    edit_tensors(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 64)}))
    for read_all in (lambda config: load_model(ModelFolder.read(folder), config), read_model_info):
        with pytest.raises(ModelLoadError, match=r"score\.weight .* classifies"):
            read_all(EngineConfig(model=str(folder)))


def test_the_architecture_of_a_known_type_is_named(copied: Checkpoint) -> None:
    folder = copied("llama2", {"architectures": ...})
    with pytest.raises(ModelLoadError, match=r'architectures=None.*"architectures": \["LlamaForCausalLM"\]'):
        choose_path(ModelFolder.read(folder), EngineConfig())


def test_what_a_path_has_not_is_refused(checkpoint: Checkpoint) -> None:
    folder = ModelFolder.read(checkpoint("gpt2"))
    with pytest.raises(ModelLoadError, match="no native path"):
        choose_path(folder, EngineConfig(model_path="native"))
    with pytest.raises(ConfigError, match="native model"):
        load_model(folder, EngineConfig(quantization="int8"))
    with pytest.raises(ConfigError, match="max_model_len=999"):
        read(folder.path, max_model_len=999)


LACKING: dict[str, tuple[str, dict[str, Any], str]] = {
    "an activation": ("llama2", {"hidden_act": "gelu"}, "activation 'gelu'"),
    "clipped projections": ("olmoe", {"clip_qkv": 2.0}, "clip_qkv=2.0"),
}
"""Native families with what the decoder has not: family, changes of its config, and what is said of them."""


@pytest.mark.parametrize("case", LACKING)
async def test_what_the_decoder_lacks_goes_by_transformers_and_is_an_error_on_the_native_path(
    checkpoint: Checkpoint, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    family, change, reason = LACKING[case]
    folder, prompt = checkpoint(family, tokenizer=True, **change), prompt_of(6)
    with caplog.at_level("INFO", logger="aioengine"):
        async with starting(folder) as engine:
            assert await tokens_of(engine, prompt) == greedy(folder, prompt)
    assert f"the native decoder lacks what its config.json describes: {reason}" in caplog.text
    config = EngineConfig(model=str(folder), device="cpu")
    info = await asyncio.to_thread(read_model_info, config, memory_bytes=2**30)
    assert (info.path, reason in info.why) == ("transformers", True)
    with pytest.raises(ModelLoadError, match=re.escape(reason)):
        await asyncio.to_thread(read, folder, model_path="native")


def test_what_neither_path_can_run_is_refused_with_both_reasons(copied: Checkpoint) -> None:
    folder = copied("llama2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}})
    with pytest.raises(ModelLoadError, match=r"change with the length .* since the native decoder lacks .*'dynamic'"):
        read(folder)


def test_attention_to_what_comes_is_refused_by_either_path(checkpoint: Checkpoint) -> None:
    folder = checkpoint("gemma3", use_bidirectional_attention=True)
    for path in ("auto", "transformers"):
        with pytest.raises(ModelLoadError, match="use_bidirectional_attention makes an encoder of it"):
            read(folder, model_path=path)


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("lacks tensor", lambda tensors: tensors.pop("transformer.h.0.ln_1.bias")),
        ("has unexpected tensor", lambda tensors: tensors.update({"transformer.h.0.extra": torch.zeros(3)})),
        ("has another shape", lambda tensors: tensors.update({"transformer.h.0.ln_1.bias": torch.zeros(3)})),
    ],
)
def test_tensors_that_do_not_fit_are_named(copied: Checkpoint, problem: str, change: Callable[..., object]) -> None:
    folder = copied("gpt2")
    edit_tensors(folder, change)
    refused(folder, problem)


def test_the_text_part_of_a_wrapper_is_saved_as_it_was(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, config = ModelFolder.read(checkpoint("gemma3-images")), EngineConfig(model_path="transformers")
    model = load_model(folder, config)
    save_checkpoint(model, folder, tmp_path / "saved", max_shard_bytes=2**30)
    again = load_model(ModelFolder.read(tmp_path / "saved"), config)
    assert model.config.architecture == again.config.architecture == "Gemma3ForConditionalGeneration"
    assert all(map(torch.equal, model.weights(), again.weights()))


def test_buffers_of_other_dtypes_are_passed_over(copied: Checkpoint) -> None:
    """As in Pythia's files."""
    folder, attention = copied("gpt-neox", tokenizer=True), "gpt_neox.layers.0.attention"
    buffers = {"bias": torch.ones(1, 1, 8, 8).bool(), "masked_bias": torch.tensor(-1e9).double()}
    edit_tensors(folder, lambda held: held.update({f"{attention}.{name}": each for name, each in buffers.items()}))
    load_model(ModelFolder.read(folder), EngineConfig())
    assert {each.format for each in read_model_info(EngineConfig(model=str(folder))).formats} >= {"F32"}


CODE = """
from transformers import GPT2Config, GPT2LMHeadModel

class OddConfig(GPT2Config):
    model_type = "odd"

class OddModel(GPT2LMHeadModel):
    config_class = OddConfig
"""


@pytest.fixture
def folder_with_code(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(checkpoint("gpt2", tokenizer=True), tmp_path / "odd_model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "architectures": ["OddModel"]}
    config["auto_map"] = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(CODE)
    return folder


def test_code_that_comes_with_a_model_is_run_when_it_is_trusted_only(folder_with_code: Path) -> None:
    with pytest.raises(ModelLoadError, match="trust_remote_code=True"):
        read(folder_with_code)
    model = load_model(ModelFolder.read(folder_with_code), EngineConfig(trust_remote_code=True))
    assert type(model.model).__name__ == "OddModel"  # type: ignore[attr-defined]


MASKING = """
        for block in self.transformer.h:
            block.attn.register_forward_pre_hook(self.mask, with_kwargs=True)

    @staticmethod
    def mask(module, given, options):
        count = given[0].shape[1]
        mask = torch.full((count, count), -1e9, device=given[0].device)
        return given, options | {"attention_mask": mask.triu(1) + mask.tril(-3)}
"""


def test_code_with_masks_of_its_own_is_refused(folder_with_code: Path) -> None:
    init = "\n    def __init__(self, config):\n        super().__init__(config)"
    (folder_with_code / "odd.py").write_text(f"import torch\n{CODE}{init}{MASKING}")
    with pytest.raises(ModelLoadError, match="a mask of the model's own"):
        read(folder_with_code, trust_remote_code=True)


def test_code_of_another_repository_is_refused(folder_with_code: Path) -> None:
    path = folder_with_code / "config.json"
    path.write_text(path.read_text().replace("odd.OddModel", "someone/else--odd.OddModel"))
    with pytest.raises(ModelLoadError, match="another repository"):
        read(folder_with_code, trust_remote_code=True)


@pytest.mark.parametrize(
    "where", ["import no_such_package\n", "\n    def __init__(self, config):\n        import no_such_package"]
)
def test_a_package_that_the_code_needs_is_named(folder_with_code: Path, where: str) -> None:
    (folder_with_code / "odd.py").write_text(where + CODE if where.startswith("import") else CODE + where)
    with pytest.raises(ModelLoadError, match="pip install no_such_package"):
        read(folder_with_code, trust_remote_code=True)
