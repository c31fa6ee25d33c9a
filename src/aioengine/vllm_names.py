"""Arguments and methods of vLLM's that this engine has not: where they ask for nothing they pass, else an error
names a replacement."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from aioengine.errors import InvalidRequest
from aioengine.validation import ELSEWHERE, shorten

NOT_YET = "this engine cannot do it yet"


class Neutral(NamedTuple):
    """A name of vLLM's that this engine has not, or not in that form.

    Attributes:
        values: those that have no effect; None: all values.
        instead: what to do where another value was meant; empty for a name that the struct itself has.
    """

    values: tuple[Any, ...] | None
    instead: str = ""


OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing. 0 equals False."""


def _off(instead: str, names: str, *values: Any) -> dict[str, Neutral]:
    """A part of a table: names with spaces between them, that are `OFF` or have one of these values."""
    return dict.fromkeys(names.split(), Neutral((*OFF, *values), instead))


_TEXT_ALONE = "this engine takes text alone"
_IN_CONFIG = "change it in the config.json of a copy of the folder"
_WITH_MODEL = "the tokenizer is that of the model's folder: put other files there"
_ONE_DEVICE = "an engine computes on one device: give replicas for one on each, in processes of their own"
_ONE_BACKEND = "there is one backend, llguidance"
_OF_REQUESTS = "give each request the values that it is to have"
_TRACES = "set OpenTelemetry up in the program: each request has a span"

_WITHOUT_MEANING = """
    all2all_backend cp_kv_cache_interleave_size data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_rpc_port data_parallel_start_rank dbo_decode_token_threshold
    dbo_prefill_token_threshold disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_ep_weight_filter
    eplb_config eplb_log_balancedness eplb_step_interval eplb_window_size expert_placement_strategy
    fault_tolerance_config master_addr master_port max_parallel_loading_workers num_redundant_experts numa_bind
    ray_workers_use_nsight ubatch_size worker_use_ray

    additional_config attention_backend attention_config cuda_graph_sizes cudagraph_capture_sizes
    disable_async_output_proc disable_cascade_attn disable_hybrid_kv_cache_manager enable_flashinfer_autotune
    gdn_prefill_backend ignore_patterns ir_op_priority kernel_config kv_offloading_backend kv_sharing_fast_prefill
    linear_backend max_context_len_to_capture max_cudagraph_capture_size max_long_partial_prefills
    max_num_partial_prefills max_seq_len_to_capture moe_backend multi_step_stream_outputs num_lookahead_slots
    num_scheduler_steps optimization_level override_attention_dtype performance_mode preemption_mode
    prefix_caching_hash_algo prefix_match_unit pt_load_map_location renderer_num_workers safetensors_load_strategy
    scheduler_delay_factor swap_space tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type
    use_v2_block_manager watermark

    disable_chunked_mm_input disable_mm_preprocessor_cache enable_lora_bias enable_mamba_cache_stochastic_rounding
    enable_multimodal_encoder_data_parallel enable_sleep_mode fully_sharded_loras language_model_only lora_dtype
    lora_extra_vocab_size mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
    mamba_config mamba_ssm_cache_dtype max_cpu_loras max_lora_rank max_loras max_prompt_adapter_token
    max_prompt_adapters mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
    mm_shm_cache_max_object_size_mb skip_mm_profiling video_pruning_rate

    aggregate_engine_logging cudagraph_metrics enable_layerwise_nvtx_tracing enable_logging_iteration_details
    enable_mfu_metrics enable_mm_processor_stats fail_on_environ_validation guided_decoding_disable_fallback
    kv_cache_metrics kv_cache_metrics_sample max_log_len show_hidden_metrics_for_version shutdown_timeout
"""
"""Numbers of devices; the speed of absent parts; adapters, images and state-space layers; logs and metrics."""

NEUTRAL_CONFIG = {
    **dict.fromkeys(_WITHOUT_MEANING.split(), Neutral(None)),
    **dict.fromkeys(
        ("block_size", "enable_prefix_caching", "logits_processors", "max_num_batched_tokens", "max_num_seqs"),
        Neutral((None,)),
    ),
    **_off(
        NOT_YET,
        "speculative_config speculative_model num_speculative_tokens spec_method spec_model spec_tokens "
        "kv_transfer_config kv_events_config ec_transfer_config diffusion_config io_processor_plugin profiler_config "
        "pooler_config override_pooler_config default_mm_loras reasoning_config weight_transfer_config "
        "enable_prompt_embeds enable_prompt_adapter enable_return_routed_experts calculate_kv_scales enable_lora "
        "enable_fault_tolerance tokens_only kv_offloading_size cpu_offload_gb guided_decoding_disable_any_whitespace "
        "guided_decoding_disable_additional_properties",
    ),
    **_off(NOT_YET, "runner task", "auto", "generate"),
    **_off(NOT_YET, "convert", "auto", "none"),
    **_off(
        _ONE_DEVICE,
        "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size nnodes",
        1,
    ),
    **_off(_ONE_DEVICE, "node_rank enable_dbo enable_eplb enable_expert_parallel"),
    **_off(_ONE_DEVICE, "distributed_executor_backend", "uni", "mp"),
    **_off("give replicas", "data_parallel_size", 1),
    **_off("give replicas; on several machines their addresses, or launcher='ray'", "data_parallel_size_local", 1),
    **_off("give replicas: each request goes to one of them", "data_parallel_rank"),
    **_off("there is one; ProcessOptions(executor=...) takes another's place", "worker_cls", "auto"),
    **_off("register functions with aioengine.worker_function", "worker_extension_cls"),
    **_off("give it to requests, as logprobs_mode", "logprobs_mode", "raw", "raw_logprobs"),
    **_off("name those that requests may ask for in logits_processors", "logits_processor_pattern"),
    **_off("give max_mixed_prefill_tokens", "long_prefill_token_threshold"),
    **_off("there is one loader", "model_loader_extra_config"),
    **_off(_TRACES, "otlp_traces_endpoint collect_detailed_traces"),
    **_off(
        _TEXT_ALONE,
        "allowed_media_domains enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs "
        "allowed_local_media_path",
    ),
    **_off(_TEXT_ALONE, "limit_mm_per_prompt", {"image": 0}),
    **_off("give reasoning_format", "enable_reasoning reasoning_parser"),
    **_off("give tool_format", "tool_call_parser"),
    **_off("tools need no setting", "enable_auto_tool_choice", True),
    **_off("give model_path", "model_impl", "auto"),
    **_off(_WITH_MODEL, "tokenizer tokenizer_revision tokenizer_mode", "auto"),
    **_off("give token ids, and detokenize=False where no text is wanted", "skip_tokenizer_init"),
    **_off("code is read where the model is: give revision", "code_revision"),
    **_off("a config.json is needed", "config_format", "auto", "hf"),
    **_off(_IN_CONFIG, "hf_config_path rope_theta hf_overrides rope_scaling disable_sliding_window"),
    **_off("set HF_TOKEN in the environment", "hf_token"),
    **_off("set HF_HOME in the environment", "download_dir"),
    **_off("give cuda_graphs='off'", "enforce_eager"),
    **_off("give cuda_graphs: 'start', 'lazy' or 'off'", "compilation_config"),
    **_off("give kv_cache_memory_bytes", "num_gpu_blocks_override"),
    **_off("give scheduler: 'fcfs', 'priority' or 'fair'", "scheduling_policy", "fcfs", "priority"),
    **_off("give scheduler: a class of yours, or 'module:Class'", "scheduler_cls"),
    **_off(_OF_REQUESTS, "generation_config override_generation_config", "auto"),
    **_off(_ONE_BACKEND, "structured_outputs_config guided_decoding_backend", "auto", "guidance"),
    **_off("it is the server's: --served-model-name, or ServerConfig", "served_model_name"),
    **_off("give log_stats_interval_s, 0 for no line", "disable_log_stats", True),
    **_off("give log_requests=True", "enable_log_requests"),
    # On where vLLM is used without a word.
    "disable_log_requests": Neutral((None, True), "give log_requests=True"),
    "use_tqdm_on_load": Neutral((None, True), "give show_progress=False"),
    "async_scheduling": Neutral((None, True), "give max_in_flight=1"),
    "enable_chunked_prefill": Neutral(
        (None, True), "long prompts are always computed in chunks; raise max_num_batched_tokens for longer ones"
    ),
}
"""Arguments of vLLM's engine."""

NEUTRAL_PARAMS = {
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words", "logits_processors"), Neutral((None,))),
    **_off(
        NOT_YET,
        "prompt_logprob_token_ids repetition_detection trace_decode_token_ids routed_experts_prompt_start "
        "use_beam_search",
    ),
    **_off("give n, and choose by the choices' cumulative_logprob", "best_of", 1),
    **_off("it is for beam search", "length_penalty early_stopping", 1.0),
    **_off(
        "generate gives the whole output, stream gives deltas, Stream.result all so far",
        "output_kind",
        *("CUMULATIVE", "DELTA", "FINAL_ONLY", 1, 2),
    ),
    **_off("give it to stream(...)", "stream_interval"),
    **_off("log-probabilities are a dict for each token", "flat_logprobs"),
    **_off("all of the prompt's are given", "prompt_logprob_start"),
    **_off("give a cache_salt of its own", "skip_reading_prefix_cache"),
    **_off("parameters never change, so that none are cloned", "skip_clone", True),
}
"""Parameters of vLLM's `SamplingParams`."""

NEUTRAL_ARGUMENTS = {
    "prompt_text": Neutral(None),
    "data_parallel_rank": Neutral((None,), NOT_YET),
    **_off(NOT_YET, "lora_request prompt_adapter_request documents"),
    **_off(
        "give structured, such as a JSON schema, Regex(...) or Choice([...])",
        "response_format guided_json guided_regex guided_choice guided_grammar guided_options_request",
    ),
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), Neutral((None,), "give max_tokens")),
    **_off("give the list of messages as the prompt, the first argument", "messages"),
    **_off(ELSEWHERE["streamer"], "stream"),
    **_off(
        "await it in `async with asyncio.timeout(seconds):`, or without asyncio leave `for delta in llm.stream(...)`",
        "timeout",
    ),
    **_off("give token ids, such as get_tokenizer().encode(text)", "tokenization_kwargs"),
    **_off("give the ids as the prompt, the first argument", "prompt_token_ids"),
    **_off("a request's times count from its call", "arrival_time"),
    **_off("give it in chat_template_kwargs, as the model's template calls it", "reasoning_ended"),
    **_off("it is found out of the template", "chat_template_content_format", "auto", "string", "openai"),
    **_off(_TEXT_ALONE, "mm_processor_kwargs"),
    **_off("give it in chat_template_kwargs", "continue_final_message"),
    "add_generation_prompt": Neutral((None,), "give it in chat_template_kwargs"),
}
"""Other arguments of vLLM's ``generate`` and ``chat``."""


def without_neutral(
    table: Mapping[str, Neutral], given: Mapping[str, Any], error: Callable[[str, str], Exception]
) -> dict[str, Any]:
    """The keywords in ``given`` without those of ``table`` that have no effect. An Enum's member goes by its name.

    Raises:
        what ``error`` makes from (name, message), for a value of a name of ``table`` that would have an effect.
    """
    rest = {}
    for name, value in given.items():
        if (neutral := table.get(name)) is not None:
            plain = value.name if isinstance(value, enum.Enum) else value
            is_plain = plain is None or isinstance(plain, int | float | str | list | tuple | dict)
            if neutral.values is None or (is_plain and plain in neutral.values):
                continue
            if neutral.instead:
                raise error(name, f"{name}={shorten(value)} is not supported: {neutral.instead}")
        rest[name] = value
    return rest


def not_yet(
    name: str, why: str = "this engine generates text, and has no embeddings, scores or classes yet"
) -> Callable[..., NoReturn]:
    """Make a method that raises a clear error in place of an AttributeError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        """Not there yet."""
        raise InvalidRequest(f"{name} is not there yet: {why}")

    return refuse


class NotYet:
    """Methods of vLLM's classes that `Engine`, `LLM` and `LLMEngine` have not."""

    embed, encode, score, classify, reward = map(not_yet, ("embed", "encode", "score", "classify", "reward"))
    beam_search = not_yet("beam_search", "n gives several choices, each drawn, with its cumulative_logprob")
