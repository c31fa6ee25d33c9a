"""How an engine and its process are set up: one definition for keywords, for flags and for the wire."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from aioengine.errors import ConfigError
from aioengine.validation import NOT_YET, Neutral, check_fields, check_known_fields, without_neutral

TEXT_ALONE = "this engine takes text alone"
IN_CONFIG = "change it in the config.json of a copy of the folder"
WITH_MODEL = "the tokenizer is that of the model's folder: put other files there"
NO_REMOTE_CODE = "no code that comes with a model is run"
ONE_DEVICE = "an engine computes on one device; start one for each, in processes of their own"
NEUTRAL_CONFIG = {
    **dict.fromkeys(("speculative_config", "kv_transfer_config"), Neutral((None,), NOT_YET)),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), Neutral((None, 1), ONE_DEVICE)
    ),
    **dict.fromkeys(
        ("disable_custom_all_reduce", "max_seq_len_to_capture", "swap_space", "enable_sleep_mode", "max_log_len"),
        Neutral(None),
    ),
    "runner": Neutral((None, "auto", "generate"), NOT_YET),
    "task": Neutral((None, "auto", "generate"), NOT_YET),
    "convert": Neutral((None, "auto", "none"), NOT_YET),
    "model_impl": Neutral((None, "auto"), "there is one implementation of each family"),
    "tokenizer": Neutral((None,), WITH_MODEL),
    "tokenizer_mode": Neutral((None, "auto"), WITH_MODEL),
    "tokenizer_revision": Neutral((None,), WITH_MODEL),
    "skip_tokenizer_init": Neutral((None, False), "give token ids, and detokenize=False where no text is wanted"),
    "trust_remote_code": Neutral((None, False), NO_REMOTE_CODE),
    "code_revision": Neutral((None,), NO_REMOTE_CODE),
    "config_format": Neutral((None, "auto", "hf"), "a config.json is needed"),
    "hf_config_path": Neutral((None,), IN_CONFIG),
    "hf_overrides": Neutral((None, {}), IN_CONFIG),
    "rope_scaling": Neutral((None, {}), IN_CONFIG),
    "rope_theta": Neutral((None,), IN_CONFIG),
    "disable_sliding_window": Neutral((None, False), IN_CONFIG),
    "hf_token": Neutral((None,), "set HF_TOKEN in the environment"),
    "download_dir": Neutral((None,), "set HF_HOME in the environment"),
    "use_tqdm_on_load": Neutral((None, True), "give show_progress=False"),
    "enable_expert_parallel": Neutral((None, False), ONE_DEVICE),
    "distributed_executor_backend": Neutral((None, "uni", "mp"), ONE_DEVICE),
    "enforce_eager": Neutral((None, False), "give cuda_graphs='off'"),
    "compilation_config": Neutral((None, {}), "give cuda_graphs: 'start', 'lazy' or 'off'"),
    "cpu_offload_gb": Neutral((None, 0), NOT_YET),
    "num_gpu_blocks_override": Neutral((None,), "give kv_cache_memory_bytes"),
    "enable_chunked_prefill": Neutral(
        (None, True), "long prompts are always computed in chunks; raise max_num_batched_tokens for longer ones"
    ),
    "scheduling_policy": Neutral((None, "fcfs", "priority"), "requests go by priority, equal ones by age"),
    "async_scheduling": Neutral((None, True), "give max_in_flight=1"),
    "generation_config": Neutral((None, "auto"), "give each request the values that it is to have"),
    "override_generation_config": Neutral((None, {}), "give each request the values that it is to have"),
    "logits_processors": Neutral((None, []), "give them to each request"),
    "enable_lora": Neutral((None, False), NOT_YET),
    "structured_outputs_config": Neutral((None, {}), "there is one backend, llguidance"),
    "guided_decoding_backend": Neutral((None, "auto", "guidance"), "there is one backend, llguidance"),
    "reasoning_parser": Neutral((None, ""), "give reasoning_format"),
    "tool_call_parser": Neutral((None, ""), "give tool_format"),
    "enable_auto_tool_choice": Neutral((None, False, True), "tools need no setting"),
    "limit_mm_per_prompt": Neutral((None, {}, {"image": 0}), TEXT_ALONE),
    "mm_processor_kwargs": Neutral((None, {}), TEXT_ALONE),
    "allowed_local_media_path": Neutral((None, ""), TEXT_ALONE),
    "served_model_name": Neutral((None,), "it is the server's: --served-model-name, or ServerConfig"),
    "disable_log_stats": Neutral((None, False, True), "give log_stats_interval_s, 0 for no line"),
    "disable_log_requests": Neutral((None, True), "give log_requests=True"),
    "enable_log_requests": Neutral((None, False), "give log_requests=True"),
}
"""vLLM's engine arguments that this engine has not, with the values at which they have no effect."""

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]

DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")


def _refused(_: str, message: str) -> ConfigError:
    return ConfigError(message)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keywords of `Engine`; a bad value is a `ConfigError` that names the field."""

    model: Annotated[Name | None, Meta(description="hub id or folder; absent: the bundled demo model")] = None
    revision: Annotated[str, Meta(description="branch, tag or commit of a hub model")] | None = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], Meta(description="dummy: random weights, no files but config.json")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Meta(description="auto: as the model was saved")
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        Meta(description="of the layers' weights, made at load on a CPU: half or a third of bfloat16's memory"),
    ] = None
    device: Annotated[str, Meta(description="cpu, cuda or cuda:1; auto: the current NVIDIA GPU, else the CPU")] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="most tokens of prompt and output; absent: the model's")
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="most sequences in one step")] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="most tokens in one step")] = 2048
    max_mixed_prefill_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="most prompt tokens in a step in which other sequences decode; absent: on a CPU 64, with "
            "AVX-512's bfloat16 products 128, of small models more; no limit on a GPU"
        ),
    ] = None
    max_waiting: Annotated[Count, Meta(description="most sequences (n a request) accepted and not running yet")] = 1024
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens in one KV block")] = 16
    kv_cache_memory_bytes: Annotated[
        Count | None, Meta(description="bytes for the KV cache; absent: by (gpu_)memory_utilization")
    ] = None
    memory_utilization: Annotated[
        Share, Meta(description="share of the host's free memory that a CPU's KV cache may take")
    ] = 0.4
    gpu_memory_utilization: Annotated[
        Share, Meta(description="share of a GPU's memory that may be in use, other programs' included")
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Meta(description="auto: the model's; in about half the memory: fp8 (e4m3) on GPUs from 8.9 on, int8 on a CPU"),
    ] = "auto"
    cuda_graphs: Annotated[
        Literal["start", "lazy", "off"],
        Meta(
            description="when decode steps become CUDA graphs: all sizes at the start, or each at its second use; "
            "on a CPU programs, at the second use, unless off"
        ),
    ] = "start"
    tune_kernels: Annotated[bool, Meta(description="measure launch parameters of a GPU's kernels at the start")] = True
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prompt beginnings")] = True
    tool_format: Annotated[
        Name, Meta(description="how the model writes tool calls; auto: as its chat template tells")
    ] = "auto"
    reasoning_format: Annotated[
        Name, Meta(description="how the model marks its reasoning; auto: as its chat template tells; none: not at all")
    ] = "auto"
    max_logprobs: Annotated[int, Meta(ge=0, description="most likeliest tokens that a request may ask for")] = 20
    max_in_flight: Annotated[
        Annotated[int, Meta(ge=1, le=8)] | None, Meta(description="steps queued on the device; absent: its own")
    ] = None
    num_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="threads of a CPU's steps; absent: torch's number, one in small steps"),
    ] = None
    max_n: Annotated[int, Meta(ge=1, description="most choices that a request may ask for")] = 128
    stream_interval: Annotated[
        int, Meta(ge=1, description="tokens of a choice between two deltas of a stream, the first and last aside")
    ] = 1
    load_timeout_s: Annotated[
        Seconds, Meta(description="seconds of loading without progress after which it has failed")
    ] = 600.0
    chat_template_timeout_s: Annotated[
        float, Meta(gt=0.0, le=3600.0, description="seconds that a chat template may take over one prompt")
    ] = 10.0
    stall_after_s: Annotated[
        Seconds, Meta(description="seconds at one step or control call after which the engine counts as stalled")
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
        check_fields(self, _refused)
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


class ConfigKeywords(TypedDict, total=False):
    """The fields of `EngineConfig` but the model, for type checkers, as keywords; a test holds the two together."""

    revision: str | None
    load_format: Literal["auto", "safetensors", "dummy"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["int8", "int4"] | None
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_mixed_prefill_tokens: int | None
    max_waiting: int
    block_size: int
    kv_cache_memory_bytes: int | None
    memory_utilization: float
    gpu_memory_utilization: float
    kv_cache_dtype: Literal["auto", "fp8", "int8"]
    cuda_graphs: Literal["start", "lazy", "off"]
    tune_kernels: bool
    enable_prefix_caching: bool
    tool_format: str
    reasoning_format: str
    max_logprobs: int
    max_in_flight: int | None
    num_threads: int | None
    max_n: int
    stream_interval: int
    load_timeout_s: float
    chat_template_timeout_s: float
    stall_after_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    log_requests: bool
    log_prompts: bool
    log_stats_interval_s: float
    show_progress: bool | None
    dump_dir: str | None


def make_config(model: str | None, given: Mapping[str, Any]) -> EngineConfig:
    """The config of keywords, vLLM's included where they have no effect (`NEUTRAL_CONFIG`).

    Raises:
        ConfigError: a keyword is unknown, or its value is bad.
    """

    if model is not None and given.get("tokenizer") == model:
        given = {**given, "tokenizer": None}
    fields = without_neutral(NEUTRAL_CONFIG, given, _refused)
    check_known_fields(EngineConfig, fields, _refused)
    return EngineConfig(model=model, **fields)


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `Engine` runs its core with ``process=ProcessOptions(...)``; ``process=True`` takes these defaults.

    A bad value is a `ConfigError` that names the field.
    """

    visible_devices: Annotated[
        tuple[int | str, ...] | None, Meta(description="CUDA_VISIBLE_DEVICES of the process; absent: as in this one")
    ] = None
    plugins: Annotated[
        tuple[Name, ...], Meta(description="modules that it imports first, such as those with worker functions")
    ] = ()
    executor: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None,
        Meta(description="module:function that makes the device side there, from the EngineConfig; absent: torch's"),
    ] = None
    start_timeout_s: Annotated[Seconds, Meta(description="seconds until it must be ready, loading included")] = 600.0
    stop_timeout_s: Annotated[
        float, Meta(ge=0.0, le=3600.0, description="seconds that it has to end when it is asked to; then it is killed")
    ] = 10.0

    def __post_init__(self) -> None:
        check_fields(self, _refused)
