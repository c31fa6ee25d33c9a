"""The settings of an engine and of its process: one definition for keywords, flags and the wire."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from aioengine.errors import ConfigError
from aioengine.validation import IMPORT_PATH, Bytes, check_fields, check_known_fields, import_path_of, shorten
from aioengine.vllm_names import NEUTRAL_CONFIG, without_neutral

Name = Annotated[str, Meta(min_length=1)]
MAX_TEMPLATE_CHARS = 2**18
"""Seven times the largest known chat template. Bounded, since compiling a template holds the GIL."""

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]

MODEST_HOST_SHARE, MOST_HOST_SHARE = 0.1, 0.4
"""Shares of the host's free memory for a CPU's KV cache, unless the config sets one; the second if one sequence of
``max_model_len`` tokens needs more than the first."""

DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")


def _refused(_: str, message: str) -> ConfigError:
    return ConfigError(message)


def is_template(text: str) -> bool:
    """Whether this is the text of a chat template, rather than a file's path."""
    return any(mark in text for mark in "{}\n")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keywords of `Engine`; a bad value is a `ConfigError` that names the field."""

    model: Annotated[Name | None, Meta(description="hub id, folder or GGUF file; absent: the bundled model")] = None
    revision: Annotated[str, Meta(description="branch, tag or commit of a hub model")] | None = None
    model_path: Annotated[
        Literal["auto", "native", "transformers"],
        Meta(
            description="what computes the model: the native decoder, or transformers' code; auto: the first that can"
        ),
    ] = "auto"
    trust_remote_code: Annotated[bool, Meta(description="run Python code that comes with the model")] = False
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
        Bytes[Count | None],
        Meta(description="bytes for the KV cache, also as 4GiB, 512MB, 2G; absent: by (gpu_)memory_utilization"),
    ] = None  # type: ignore[assignment]
    memory_utilization: Annotated[
        Share | None,
        Meta(
            description="share of the host's free memory that a CPU's KV cache may take; absent: a tenth, or what one "
            "sequence of max_model_len needs, up to 0.4"
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        Share, Meta(description="share of a GPU's memory that may be in use, other programs' included")
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Meta(description="auto: the model's; in about half the memory: fp8 (e4m3) on GPUs from 8.9 on, int8 on a CPU"),
    ] = "auto"
    scheduler: Annotated[
        str,
        Meta(
            pattern=rf"^(fcfs|priority|fair|{IMPORT_PATH})$",
            description="what goes first: by priority, fcfs (by age alone), fair (tenants share alike) or module:Class",
        ),
    ] = "priority"
    logits_processors: Annotated[
        tuple[Annotated[str, Meta(pattern=rf"^{IMPORT_PATH}$")], ...],
        Meta(description="module:function that makes a logits processor of a request's arguments (its extra_args)"),
    ] = ()
    cuda_graphs: Annotated[
        Literal["start", "lazy", "off"],
        Meta(
            description="when decode steps become CUDA graphs: all sizes at the start, or each at its second use; "
            "on a CPU programs, at the second use, unless off"
        ),
    ] = "start"
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prompt beginnings")] = True
    tool_format: Annotated[
        Name, Meta(description="how the model writes tool calls; auto: as its chat template tells; none: not at all")
    ] = "auto"
    reasoning_format: Annotated[
        Name, Meta(description="how the model marks its reasoning; auto: as its chat template tells; none: not at all")
    ] = "auto"
    chat_template: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None,
        Meta(description="Jinja text, or on the command line its file, in place of the model's own chat template"),
    ] = None
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
    show_progress: (
        Annotated[bool, Meta(description="show a bar while loading, in a notebook, too; absent: on a terminal")] | None
    ) = None
    dump_dir: Annotated[str, Meta(description="folder for the reports of failed steps; absent: no files")] | None = None

    def __post_init__(self) -> None:
        scheduler: object = self.scheduler
        if isinstance(scheduler, type):
            msgspec.structs.force_setattr(self, "scheduler", import_path_of(scheduler))
        if isinstance(self.logits_processors, list | tuple):
            paths = [import_path_of(given) if callable(given) else given for given in self.logits_processors]
            msgspec.structs.force_setattr(self, "logits_processors", paths)
        check_fields(self, _refused)
        if self.chat_template is not None and not is_template(self.chat_template):
            shown = shorten(self.chat_template)
            raise ConfigError(
                f"chat_template={shown}: it is no Jinja text; of a file give the text: Path(...).read_text()"
            )
        names = [path.partition(":")[2] for path in self.logits_processors]
        if len(set(names)) < len(names):
            raise ConfigError(f"logits_processors={list(self.logits_processors)}: requests could not tell two apart")
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
    """The fields of `EngineConfig` except the model, as keywords for type checkers; a test keeps the two equal."""

    revision: str | None
    model_path: Literal["auto", "native", "transformers"]
    trust_remote_code: bool
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
    kv_cache_memory_bytes: int | str | None
    memory_utilization: float | None
    gpu_memory_utilization: float
    kv_cache_dtype: Literal["auto", "fp8", "int8"]
    scheduler: str | type
    logits_processors: list[str] | tuple[str, ...]
    cuda_graphs: Literal["start", "lazy", "off"]
    enable_prefix_caching: bool
    tool_format: str
    reasoning_format: str
    chat_template: str | None
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
    """Make a config from keywords; those of vLLM may have values without effect (`NEUTRAL_CONFIG`).

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
        Annotated[str, Meta(pattern=f"^{IMPORT_PATH}$")] | None,
        Meta(description="module:function that makes the device side there, from the EngineConfig; absent: torch's"),
    ] = None
    start_timeout_s: Annotated[Seconds, Meta(description="seconds until it must be ready, loading included")] = 600.0
    stop_timeout_s: Annotated[
        float, Meta(ge=0.0, le=3600.0, description="seconds that it has to end when it is asked to; then it is killed")
    ] = 10.0

    def __post_init__(self) -> None:
        check_fields(self, _refused)


MAX_REPLICAS = 1024


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `Engine` runs its model several times with ``replicas=ReplicaOptions(...)``; ``replicas=4``, or a list of
    addresses, takes these defaults.

    A bad value is a `ConfigError` that names the field.
    """

    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_REPLICAS)]
        | Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_REPLICAS)],
        Meta(
            description="engines that serve the model, a process each; or the addresses of such that serve already: "
            "tcp://a:5555,tcp://b:5555"
        ),
    ] = 1
    keys: Annotated[Name | None, Meta(description="folder of keys for addresses, made by `aioengine keys`")] = None
    client: Annotated[
        Name | None, Meta(description="client whose keys to use; may be left out where they are one client's")
    ] = None
    launcher: Annotated[
        Literal["process", "ray"], Meta(description="what starts them: child processes, or actors of a Ray cluster")
    ] = "process"
    cluster_address: Annotated[
        Name | None,
        Meta(
            description="where further front ends of this user may connect, an ipc:///path such as "
            "ipc:///run/user/1000/aioengine/cluster; absent: none"
        ),
    ] = None
    balance: Annotated[
        Literal["prefix", "load", "round_robin"],
        Meta(
            description="which one gets a request: with its prefix in the cache unless overloaded, least loaded, next"
        ),
    ] = "prefix"
    stall_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds without a beat, or at one step, after which one is killed and replaced; two beats "
            "(heartbeat_interval_s) or more"
        ),
    ] = 60.0
    restart_backoff_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=3600.0,
            description="seconds before one that died is started again; doubles, to 30 at most unless this is more",
        ),
    ] = 0.5
    max_restarts: Annotated[
        int, Meta(ge=0, le=1000, description="starts of one in a row that may fail before it is given up")
    ] = 5
    max_attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="replicas that a request may lose while it runs; four times as many while it waits",
        ),
    ] = 8
    recover_timeout_s: Annotated[
        Seconds, Meta(description="seconds that a request waits for a replica when all are gone")
    ] = 120.0
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0.0, le=86400.0, description="seconds that requests have to end where they are before they are moved"),
    ] = 30.0
    lockstep: Annotated[
        bool, Meta(description="step together, as mixtures of experts that are spread over them will have to")
    ] = False
    ray_address: Annotated[
        Name | None, Meta(description="of the Ray cluster, host:port; absent: RAY_ADDRESS, or the one of this machine")
    ] = None
    ray_num_cpus: Annotated[
        float, Meta(ge=0.0, le=1024.0, description="CPUs of a replica on Ray, and the threads that it computes with")
    ] = 1.0
    ray_num_gpus: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(description="GPUs of a replica on Ray; absent: 1 where the cluster has GPUs and the device is none other"),
    ] = None
    ray_placement_group: Annotated[
        Name | None,
        Meta(description="name of a placement group to put replicas in; absent: this process's, or one for each"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self, _refused)
        if self.cluster_address is not None and not self.cluster_address.startswith("ipc://"):
            # By tcp, any user of the machine would reach it, on loopback too.
            raise ConfigError(
                f"cluster_address={self.cluster_address!r}: what connects there may scale and restart the replicas: "
                "give an ipc:///path in a folder that only you can enter"
            )
        defaults = zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
        of_ray = [name for name, default in defaults if name.startswith("ray_") and getattr(self, name) != default]
        if self.launcher != "ray" and of_ray:
            raise ConfigError(f"{of_ray[0]} is for replicas on Ray: add launcher='ray', or leave it out")
        if self.addresses:
            if self.launcher != "process" or self.lockstep:
                name = "lockstep=True" if self.lockstep else f"launcher={self.launcher!r}"
                raise ConfigError(f"{name} is for replicas that are started here, and not at addresses: leave it out")
            for address in self.addresses:
                if not address.startswith(("tcp://", "ipc://")):
                    message = f"replicas: {shorten(address)} is no address: give tcp://HOST:PORT or ipc:///PATH"
                    raise ConfigError(message)
            if len(set(self.addresses)) < len(self.addresses):
                raise ConfigError("replicas: an address stands there twice: name each engine once")
        elif self.keys is not None or self.client is not None:
            raise ConfigError("keys are for replicas at addresses: give replicas=['tcp://…', …], or leave them out")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the replicas serve; empty: they are started here."""
        return self.replicas if isinstance(self.replicas, tuple) else ()

    @property
    def num_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else len(self.replicas)
