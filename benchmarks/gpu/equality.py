"""Greedy tokens against transformers' own forward pass in float32, position by position.

The reference is given the engine's own tokens: at each position it says which one it would have taken after the same
ones. Where that is another, its two logits are compared: within ε they are as good as equal, and rounding decides. So
each of the tokens is judged, and none is lost because an earlier one differed.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import torch
import transformers

from aioengine import Engine
from benchmarks.gpu.rows import Result
from benchmarks.gpu.running import Setting, make_prompt

ROW = "greedy equality"
EPSILON = {"bfloat16": 0.25, "float32": 1e-3}
"""Of logits whose deviation is about 3. bf16 has 8 bits: what 28 layers round differently moves a logit by 1 to 2 %."""


async def equality(setting: Setting) -> None:
    await setting.attempt(ROW, compare(setting))


async def compare(setting: Setting) -> Result:
    sizes = setting.sizes
    num_prompts, num_tokens = sizes.equality
    folder = save_checkpoint(setting)
    rng = random.Random(0)
    prompts = [make_prompt(sizes.small, rng, rng.randint(4, 2 * num_tokens)) for _ in range(num_prompts)]
    fields: dict[str, Any] = {"kv_cache_memory_bytes": setting.sizes.equality_kv_bytes, "dtype": setting.dtype}
    fields["device"] = setting.device
    longest = 3 * num_tokens + 1
    async with Engine(folder, max_num_seqs=num_prompts, max_model_len=longest, log_stats_interval_s=0.0, **fields) as e:
        outputs = await asyncio.gather(
            *(e.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=num_tokens) for prompt in prompts)
        )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).to(setting.device)
    gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        gaps += lost_logits(reference, prompt, list(output.outputs[0].token_ids))
    assert len(gaps) == num_prompts * num_tokens
    epsilon = EPSILON[setting.dtype]
    distinct = len({token for output in outputs for token in output.outputs[0].token_ids})
    return setting.result(
        ROW,
        value=sum(gap > epsilon for gap in gaps),
        unit=f"tokens of {len(gaps)}",
        details={
            "ε": epsilon,
            "others within ε": sum(0 < gap <= epsilon for gap in gaps),
            "largest difference of two logits": max(gaps),
            "different tokens": distinct,
            "dtype": setting.dtype,
        },
    )


@torch.inference_mode()
def lost_logits(reference: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """For each token by how much its logit is below the highest one."""
    ids = torch.tensor([prompt + tokens[:-1]], device=reference.device)
    logits = reference(ids, logits_to_keep=len(tokens)).logits[0].float()
    taken = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    lost: list[float] = (logits.max(dim=-1).values - taken).tolist()
    return lost


def save_checkpoint(setting: Setting) -> Path:
    """Random weights, large enough that a token depends on all the context, and outputs are diverse."""
    model, folder = setting.sizes.small, setting.folder / "checkpoint"
    config = transformers.AutoConfig.from_pretrained(model.save(setting.folder / "config", setting.dtype))
    dtype = getattr(torch, setting.dtype)
    with torch.device(setting.device):
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
                else:
                    gain = 3.2 if "embed_tokens" in name or "lm_head" in name else 1.6
                    parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
    made.save_pretrained(folder)
    return folder
