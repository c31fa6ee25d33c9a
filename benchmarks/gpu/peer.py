"""transformers' continuous batching, with the same requests on the same device in the same run."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import transformers

from benchmarks.gpu.rows import Result
from benchmarks.gpu.running import Job, Setting, engine, make_jobs
from benchmarks.gpu.sizes import Model
from benchmarks.gpu.workloads import throughput

ROW = "256 requests, against transformers"
TIMEOUT_S = 600.0


def make_model(model: Model, setting: Setting) -> Any:
    """With transformers' random weights, on the device."""
    config = transformers.AutoConfig.from_pretrained(model.save(setting.folder / model.family, setting.dtype))
    dtype = getattr(torch, setting.dtype)
    with torch.device(setting.device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return made.eval()


async def peer(setting: Setting) -> None:
    await setting.attempt(ROW, compare(setting))


async def compare(setting: Setting) -> Result:
    """First the other, then the engine, each alone on the device; the second of two runs each."""
    sizes = setting.sizes
    model = make_model(sizes.small, setting)
    theirs = [batched_rate(model, make_jobs(sizes.small, sizes, seed)) for seed in range(2)]
    attention = str(getattr(model.config, "_attn_implementation", ""))
    del model
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    longest = min(sizes.small.max_len, 2 * sizes.request_tokens[1])
    async with engine(setting, sizes.small, max_num_seqs=sizes.num_requests, max_model_len=longest) as opened:
        ours = (await throughput(setting, opened)).value
    assert ours is not None
    return setting.result(
        ROW,
        value=ours,
        unit="tokens/s",
        bound=theirs[-1],
        bound_of=f"transformers {transformers.__version__}, tokens/s",
        ratio=ours / theirs[-1],
        details={"transformers, first run": theirs[0], "its attention": attention},
    )


def batched_rate(model: Any, jobs: list[Job]) -> float:
    """Output tokens a second, from the first request given to the last one that ends.

    Raises:
        RuntimeError: a request failed, or brought another number of tokens than asked for.
    """
    sampling = transformers.GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0)
    sampling.max_new_tokens = max(job.max_tokens for job in jobs)
    lengths = {}
    # On a CPU it would take most of the memory for its cache, and write to all of it.
    little = {} if model.device.type == "cuda" else {"num_blocks": 16, "max_batch_tokens": 256}
    config = transformers.ContinuousBatchingConfig(**little)
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=config) as manager:
        begin = time.perf_counter()
        wanted = {
            manager.add_request(job.prompt, max_new_tokens=job.max_tokens, eos_token_id=-1): job.max_tokens
            for job in jobs
        }
        while len(lengths) < len(wanted):
            answer = manager.get_result(timeout=1)
            if answer is not None and answer.is_finished():
                if answer.error is not None:
                    raise RuntimeError(f"transformers: {answer.error}")
                lengths[answer.request_id] = len(answer.generated_tokens)
            if answer is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended")
            if time.perf_counter() - begin > TIMEOUT_S:
                raise RuntimeError(f"transformers' continuous batching took more than {TIMEOUT_S:g} s")
        seconds = time.perf_counter() - begin
    if lengths != wanted:
        raise RuntimeError("transformers brought another number of tokens than asked for")
    return sum(lengths.values()) / seconds
