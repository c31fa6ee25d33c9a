"""How an engine is set up: one definition for keywords, for flags, and later for the wire."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aioengine.errors import ConfigError
from aioengine.validation import check_fields

DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keywords of `Engine`; a bad value is a `ConfigError` that names the field."""

    model: Annotated[str, Meta(min_length=1, description="hub id or folder; absent: the bundled demo model")] | None = (
        None
    )
    revision: Annotated[str, Meta(description="branch, tag or commit of a hub model")] | None = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], Meta(description="dummy: random weights, no files but config.json")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Meta(description="auto: as the model was saved")
    ] = "auto"
    device: Annotated[str, Meta(description="cpu, cuda or cuda:1; auto: the current NVIDIA GPU, else the CPU")] = "auto"
    max_model_len: (
        Annotated[int, Meta(ge=2, description="most tokens of prompt and output together; absent: the model's")] | None
    ) = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="most sequences in one step")] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="most tokens in one step")] = 2048
    max_waiting: Annotated[int, Meta(ge=1, description="most requests accepted and not yet running")] = 1024
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens in one KV block")] = 16
    kv_cache_memory_bytes: (
        Annotated[int, Meta(ge=1, description="bytes for the KV cache; absent: by (gpu_)memory_utilization")] | None
    ) = None
    memory_utilization: Annotated[
        float, Meta(gt=0.0, le=1.0, description="share of the host's free memory that a CPU's KV cache may take")
    ] = 0.4
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0.0, le=1.0, description="share of a GPU's memory that may be in use, other programs' included")
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], Meta(description="auto: the model's; fp8 (e4m3): half the memory, on GPUs from 8.9 on")
    ] = "auto"
    cuda_graphs: Annotated[
        Literal["start", "lazy", "off"],
        Meta(description="when decode steps become CUDA graphs: all sizes at the start, or each when it is first used"),
    ] = "start"
    tune_kernels: Annotated[
        bool, Meta(description="measure launch parameters once a GPU and model shape, at the start")
    ] = True
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prompt beginnings")] = True
    max_logprobs: Annotated[int, Meta(ge=0, description="most likeliest tokens that a request may ask for")] = 20
    max_in_flight: (
        Annotated[int, Meta(ge=1, le=8, description="steps queued on the device; absent: its own")] | None
    ) = None
    num_threads: (
        Annotated[
            int,
            Meta(ge=1, le=1024, description="threads of one CPU operation; absent: torch's number, one in small steps"),
        ]
        | None
    ) = None
    max_n: Annotated[int, Meta(ge=1, description="most choices that a request may ask for")] = 128
    stream_interval: Annotated[
        int, Meta(ge=1, description="tokens of a choice between two deltas of a stream, the first and last aside")
    ] = 1
    stall_after_s: Annotated[
        float, Meta(gt=0.0, le=86400.0, description="seconds at one step after which the engine counts as stalled")
    ] = 30.0
    heartbeat_interval_s: Annotated[
        float, Meta(ge=0.01, le=3600.0, description="seconds between two beats of an engine in another process")
    ] = 1.0
    heartbeat_timeout_s: Annotated[
        float, Meta(ge=0.02, le=86400.0, description="seconds without a beat after which it counts as stalled or dead")
    ] = 10.0
    log_requests: Annotated[bool, Meta(description="log each request's beginning and end, without its texts")] = False
    log_prompts: Annotated[bool, Meta(description="with log_requests: the prompts, too")] = False
    log_stats_interval_s: Annotated[
        float, Meta(ge=0.0, le=86400.0, description="seconds between two log lines about the load; 0: none")
    ] = 10.0
    show_progress: Annotated[bool, Meta(description="show a bar while loading; absent: on a terminal")] | None = None
    dump_dir: Annotated[str, Meta(description="folder for the reports of failed steps; absent: log only")] | None = None

    def __post_init__(self) -> None:
        check_fields(self, lambda _, message: ConfigError(message))
        if not DEVICE.fullmatch(self.device):
            raise ConfigError(f"device={self.device!r} is none: auto, cpu, cuda, or cuda:0 and so on")
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s:g} is less than two beats, "
                f"heartbeat_interval_s={self.heartbeat_interval_s:g} each: raise the first or lower the second"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "each running sequence needs a token a step; raise the first or lower the second"
            )
