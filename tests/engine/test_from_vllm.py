"""Programs that were written for vLLM: its calls work where they can, and else hear what to do."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
from openai.types.chat import ChatCompletionMessage

from aioengine import LLM, ConfigError, Engine, EngineConfig, InvalidRequest, LLMEngine, RequestOutput, SamplingParams
from aioengine.testing import FakeExecutor
from aioengine.vllm_names import NEUTRAL_ARGUMENTS, NEUTRAL_CONFIG, Neutral

IDS = [5, 6, 7]
PARAMS = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)

BOTH_LOOPS = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


def ids_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


# One output, or a stream


@BOTH_LOOPS
async def test_async_for_over_generate_names_stream(serve: Any) -> None:
    async with serve() as served:
        with pytest.raises(TypeError, match=r"async with engine\.stream\(\.\.\.\) as stream"):
            [output async for output in served.engine.generate(IDS, PARAMS, "request-1")]
        gc.collect()  # a coroutine that was never awaited would be an error
        served.assert_nothing_is_held()


async def in_a_task(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    return await asyncio.create_task(work)  # noqa: TID251


async def in_gather(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    (output,) = await asyncio.gather(work)
    return output


async def in_a_task_group(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work, name="named")
    return task.result()


async def with_a_timeout(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    return await asyncio.wait_for(work, 1000)  # noqa: TID251


async def from_another_thread(work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(work, loop).result(30))


@BOTH_LOOPS
@pytest.mark.parametrize("is_debugged", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("run", [in_a_task, in_gather, in_a_task_group, with_a_timeout, from_another_thread])
async def test_generate_gives_a_coroutine_to_all_that_want_one(
    serve: Any, run: Callable[[Any], Coroutine[Any, Any, RequestOutput]], is_debugged: bool
) -> None:
    asyncio.get_running_loop().set_debug(is_debugged)
    async with serve() as served:
        expected = ids_of(await served.engine.generate(IDS, PARAMS))
        assert ids_of(await run(served.engine.generate(IDS, PARAMS))) == expected


@BOTH_LOOPS
async def test_task_groups_and_frameworks_take_the_function(serve: Any) -> None:
    async with serve() as served:
        assert asyncio.iscoroutinefunction(served.engine.generate)
        assert list(inspect.signature(served.engine.generate).parameters)[:3] == ["prompt", "params", "request_id"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.engine.generate, IDS, PARAMS)
        assert sum(served.engine.stats().finished.values()) == 1

        work = served.engine.generate(IDS, PARAMS)
        assert inspect.iscoroutine(work)
        assert inspect.isawaitable(work)
        assert "Engine.generate" in repr(work)
        assert inspect.getcoroutinestate(work) == inspect.CORO_CREATED
        work.close()


async def test_one_that_was_never_awaited_is_told(serve: Any) -> None:
    async with serve() as served:
        with pytest.warns(RuntimeWarning, match=r"Engine\.generate.* was never awaited"):
            served.engine.generate(IDS)  # dropped at once


# Arguments


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((IDS, PARAMS, "mine"), {}),
        ((IDS,), {"sampling_params": PARAMS, "request_id": "mine"}),
        ((), {"prompt": IDS, "sampling_params": PARAMS, "request_id": "mine", "lora_request": None, "priority": 0}),
        ((IDS, PARAMS), {"request_id": "mine", "trace_headers": None, "tokenization_kwargs": {}, "best_of": 1}),
    ],
)
async def test_arguments_may_come_in_vllms_order_and_names(serve: Any, positional: Any, keywords: Any) -> None:
    assert list(inspect.signature(Engine.generate).parameters)[1:4] == ["prompt", "params", "request_id"]
    async with serve() as served:
        output = await served.engine.generate(*positional, **keywords)
        assert output.request_id == "mine"
        assert ids_of(output) == ids_of(await served.engine.generate(IDS, PARAMS))
        async with served.engine.stream(*positional, **keywords) as stream:
            assert stream.request_id == "mine"
            assert stream.params == PARAMS


@pytest.mark.parametrize(
    ("keywords", "param", "message"),
    [
        ({"params": PARAMS, "sampling_params": PARAMS}, "params", "two names of one argument"),
        ({"params": PARAMS, "max_tokns": 3}, "max_tokns", "did you mean 'max_tokens'"),
        ({"sampling_params": PARAMS, "lora_requests": None}, "lora_requests", "unknown parameter 'lora_requests'"),
        ({"sampling_params": PARAMS, "max_tokens": 3}, "params", "not both"),
        ({"sampling_params": {"max_tokens": 3}}, "params", "must be a SamplingParams"),
        ({"lora_request": "adapter"}, "lora_request", "cannot do it yet"),
        ({"params": PARAMS, "tools": [1]}, "tools", "give a function"),
        ({"continue_final_message": True}, "continue_final_message", "chat_template_kwargs"),
        ({"best_of": 2}, "best_of", "give n"),
        ({"num_predict": 4}, "num_predict", "did you mean 'max_tokens'"),
        ({"stop_sequences": ["a"]}, "stop_sequences", "did you mean 'stop'"),
        ({"do_sample": True}, "do_sample", "temperature=0 is greedy"),
        ({"num_ctx": 4}, "num_ctx", "give max_model_len to Engine"),
        ({"max_completion_tokens": 4}, "max_completion_tokens", "give max_tokens"),
        ({"stream": True}, "stream", "engine.stream"),
    ],
)
async def test_what_cannot_be_meant_is_named(serve: Any, keywords: Any, param: str, message: str) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match=message) as error:
            await served.engine.generate(IDS, **keywords)
        assert error.value.param == param
        served.assert_nothing_is_held()


async def test_methods_that_are_not_there_yet_say_so(serve: Any) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match=r"output_type.*it is for generate"):
            served.engine.stream(IDS, output_type=int)
        for kind in (type(served.engine), LLM, LLMEngine):
            for name in ("embed", "encode", "score", "classify", "reward", "beam_search"):
                with pytest.raises(InvalidRequest, match=f"{name} is not there yet: "):
                    getattr(kind, name)(served.engine, ["a text"], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="chat is not there yet: give the list of messages to generate"):
            served.engine.chat([{"role": "user", "content": "hi"}])


async def test_other_arguments_of_vllms_are_taken_where_they_ask_for_nothing(serve: Any) -> None:
    async with serve() as served:
        for name, neutral in NEUTRAL_ARGUMENTS.items():
            for value in neutral.values or (None, "anything"):
                served.engine.stream(IDS, **{name: value})
            if neutral.values is not None:
                with pytest.raises(InvalidRequest, match=f"{name}='other' is not supported"):
                    served.engine.stream(IDS, **{name: "other"})


# Prompts


@pytest.mark.parametrize("text", ["Once upon a time"])
async def test_a_prompt_dict_is_what_is_in_it(serve: Any, text: str) -> None:
    async with serve() as served:
        ids = served.tokenizer.encode(text)
        expected = ids_of(await served.engine.generate(text, PARAMS))
        for prompt in (
            {"prompt": text},
            {"prompt_token_ids": ids},
            {"prompt_token_ids": ids, "prompt": "is not looked at", "token_type_ids": None},
            {"prompt": text, "multi_modal_data": None, "mm_processor_kwargs": {}, "cache_salt": None},
        ):
            assert ids_of(await served.engine.generate(prompt, PARAMS)) == expected


async def test_messages_may_be_objects(serve: Any) -> None:
    async with serve() as served:
        text = "Once upon a time"
        asked = ChatCompletionMessage(role="assistant", content=text)  # as from OpenAI's client
        for engine_call in (served.engine.tokenize, served.engine.generate):
            plain, given = [await engine_call([message]) for message in ({"role": "assistant", "content": text}, asked)]
            assert getattr(given, "prompt_token_ids", given) == getattr(plain, "prompt_token_ids", plain)


async def test_a_prompt_dict_may_bring_its_salt(serve: Any) -> None:
    async with serve() as served:
        prompt = {"prompt_token_ids": list(range(100, 140)), "cache_salt": "mine"}
        cached = [
            (await served.engine.generate(prompt, PARAMS, cache_salt=salt)).num_cached_tokens
            for salt in (None, "mine", "other", None)
        ]
        assert cached == [0, 32, 0, 32]


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ({}, "prompt", "needs a prompt"),
        ({"prompt": None}, "prompt", "needs a prompt"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": {"prompt": "a"}}, "prompt", "prompt is a dict"),
        ({"prompt": 7}, "prompt", "prompt is an int"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompt", "multi_modal_data"),
        ({"prompt_embeds": [0.5]}, "prompt", "prompt_embeds"),
        ({"role": "user", "content": "hi"}, "prompt", "a chat is a list of messages"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt", "cache_salt"),
    ],
    ids=repr,
)
async def test_a_bad_prompt_dict_is_refused_at_the_call(serve: Any, prompt: Any, param: str, message: str) -> None:
    async with serve() as served:
        with pytest.raises(InvalidRequest, match=message) as error:
            await served.engine.generate(prompt)
        assert error.value.param == param
        served.assert_nothing_is_held()


# The engine


def test_engine_arguments_of_vllms_are_taken_where_they_ask_for_nothing() -> None:
    for name, neutral in NEUTRAL_CONFIG.items():
        assert (name in EngineConfig.__struct_fields__) == (neutral == Neutral((None,)))
        for value in neutral.values or (None, 3):
            assert Engine(**{name: value}).config == EngineConfig()
        if neutral.instead:
            with pytest.raises(ConfigError, match=f"{name}='other' is not supported: .*{neutral.instead[-20:]}"):
                Engine(**{name: "other"})  # type: ignore[arg-type]


ENGINE_ARGS: list[tuple[Any, str]] = [
    (
        None,
        """
        served_model_name tokenizer hf_config_path task allowed_media_domains download_dir seed max_model_len
        cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes distributed_executor_backend
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port all2all_backend max_parallel_loading_workers block_size enable_prefix_caching
        kv_cache_memory_bytes max_num_batched_tokens max_num_seqs revision code_revision rope_theta hf_token
        tokenizer_revision quantization mm_processor_kwargs mm_processor_cache_type mm_encoder_attn_backend
        io_processor_plugin default_mm_loras max_cpu_loras num_gpu_blocks_override enable_chunked_prefill
        guided_decoding_backend guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
        guided_decoding_disable_additional_properties logits_processor_pattern speculative_config
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces scheduler_cls pooler_config
        override_pooler_config kv_transfer_config kv_events_config ec_transfer_config mamba_block_size
        logits_processors async_scheduling attention_backend kv_offloading_size safetensors_load_strategy
        video_pruning_rate disable_hybrid_kv_cache_manager diffusion_config spec_method spec_model spec_tokens
        gdn_prefill_backend disable_nccl_for_dp_synchronization
        """,
    ),
    (
        False,
        """
        skip_tokenizer_init enable_prompt_embeds trust_remote_code data_parallel_hybrid_lb data_parallel_external_lb
        enable_expert_parallel enable_dbo enable_eplb eplb_log_balancedness disable_sliding_window
        disable_cascade_attn disable_log_stats aggregate_engine_logging enforce_eager disable_custom_all_reduce
        enable_mm_embeds interleave_mm_strings disable_mm_preprocessor_cache skip_mm_profiling enable_lora
        fully_sharded_loras ray_workers_use_nsight disable_chunked_mm_input enable_sleep_mode calculate_kv_scales
        enable_multimodal_encoder_data_parallel kv_sharing_fast_prefill kv_cache_metrics cudagraph_metrics
        enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details enable_mm_processor_stats
        language_model_only tokens_only fail_on_environ_validation enable_return_routed_experts enable_log_requests
        enable_fault_tolerance enable_flashinfer_autotune enable_ep_weight_filter
        """,
    ),
    (
        0,
        """
        num_redundant_experts long_prefill_token_threshold num_lookahead_slots cpu_offload_gb shutdown_timeout
        node_rank
        """,
    ),
    (
        1,
        """
        pipeline_parallel_size tensor_parallel_size decode_context_parallel_size prefill_context_parallel_size
        data_parallel_size nnodes max_num_partial_prefills max_long_partial_prefills max_loras stream_interval
        cp_kv_cache_interleave_size
        """,
    ),
    (
        "auto",
        """
        runner convert tokenizer_mode load_format config_format dtype kv_cache_dtype lora_dtype generation_config
        model_impl mamba_cache_dtype mamba_ssm_cache_dtype worker_cls
        """,
    ),
    (
        "",
        """
        allowed_local_media_path reasoning_parser worker_extension_cls
        """,
    ),
    (
        "other",
        """
        data_parallel_backend expert_placement_strategy prefix_caching_hash_algo mm_encoder_tp_mode ignore_patterns
        pt_load_map_location override_attention_dtype kv_offloading_backend optimization_level performance_mode
        mamba_cache_mode
        """,
    ),
    (
        7,
        """
        dbo_decode_token_threshold dbo_prefill_token_threshold eplb_window_size eplb_step_interval swap_space
        max_logprobs max_lora_rank lora_extra_vocab_size mm_processor_cache_gb mm_shm_cache_max_object_size_mb
        master_port
        """,
    ),
]
"""Engine arguments of vLLM's, by a value that asks for nothing: the default where that is one."""
DICTS = """
    eplb_config rope_scaling hf_overrides limit_mm_per_prompt media_io_kwargs model_loader_extra_config
    structured_outputs_config compilation_config attention_config kernel_config override_generation_config
    additional_config reasoning_config weight_transfer_config
"""


def refusal(make: Callable[[], object]) -> str:
    """What is said where it is refused; empty where it is taken."""
    try:
        make()
    except (ConfigError, InvalidRequest) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for value, names in [*ENGINE_ARGS, ({}, DICTS)] for name in names.split()],
)
def test_each_engine_argument_is_known_and_its_neutral_value_taken(name: str, value: Any) -> None:
    taken = Engine(**{name: value}).config
    assert taken == EngineConfig() or getattr(taken, name) == value
    told = refusal(lambda: Engine(**{name: "strange"}))  # type: ignore[arg-type]
    assert "unknown" not in told, "a sentence says what to do"
    assert name in told or not told


SAMPLING_DEFAULTS: dict[str, Any] = {
    **{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0},
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None, "ignore_eos": False},
    **{"max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "prompt_logprob_start": None},
    **{"prompt_logprob_token_ids": None, "logprob_token_ids": None, "flat_logprobs": False, "detokenize": True},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    **{"output_kind": 0, "stream_interval": None, "skip_clone": False, "structured_outputs": None, "logit_bias": None},
    **{"allowed_token_ids": None, "extra_args": None, "bad_words": None, "skip_reading_prefix_cache": None},
    **{"thinking_token_budget": None, "repetition_detection": None, "routed_experts_prompt_start": 0, "best_of": None},
    **{
        "trace_decode_token_ids": None,
        "guided_decoding": None,
        "logits_processors": None,
        "truncate_prompt_tokens": None,
    },
}
"""Parameters of vLLM's `SamplingParams`, today's and of some versions before, with their defaults."""


def test_sampling_parameters_are_taken_at_their_defaults() -> None:
    assert SamplingParams(**SAMPLING_DEFAULTS) == SamplingParams(max_tokens=16)
    for name in SAMPLING_DEFAULTS:
        assert "unknown" not in refusal(lambda name=name: SamplingParams(**{name: object()}))  # type: ignore[misc]


def test_the_tokenizer_may_be_said_to_be_the_models() -> None:
    assert Engine("some/model", tokenizer="some/model").config == EngineConfig(model="some/model")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="tokenizer"):
        Engine("some/model", tokenizer="other/model")  # type: ignore[call-arg]


async def test_an_engines_seed_gives_each_request_one_in_the_order_of_calls(serve: Any) -> None:
    async def run(seed: int | None) -> list[int]:
        executor = FakeExecutor(vocab_size=2048)
        async with Engine(executor=executor, seed=seed) as engine:
            streams = [engine.stream(IDS, max_tokens=2) for _ in range(3)]
            streams.append(engine.stream(IDS, seed=7, max_tokens=2))
            return [stream.params.seed or 0 for stream in streams]

    first, other, none = await run(3), await run(4), await run(None)
    assert first == await run(3)
    assert len({*first, *other}) == 7
    assert first[-1] == 7
    assert none == [0, 0, 0, 7]
    for bad in (True, "1", 1.5):
        with pytest.raises(ConfigError, match="seed="):
            Engine(seed=bad)  # type: ignore[arg-type]


async def test_the_tokenizer_may_be_awaited(serve: Any) -> None:
    async with serve() as served:
        tokenizer = await served.engine.get_tokenizer()
        assert (
            tokenizer.encode("a fox")
            == served.engine.get_tokenizer().encode("a fox")
            == served.tokenizer.encode("a fox")
        )
