"""Replicas that agree are one offer; those that do not are refused by name."""

from typing import Any

import pytest

from aioengine.cluster.agreement import SAME_CONFIG, SAME_OFFER, agree, is_same_model
from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.errors import ConfigError


def info(**fields: Any) -> ExecutorInfo:
    defaults = {"num_blocks": 8, "block_size": 16, "max_model_len": 64, "vocab_size": 100}
    return ExecutorInfo(**{**defaults, **fields})


def test_blocks_and_bytes_are_summed_and_the_rest_is_the_lowest_rank_s() -> None:
    infos = {
        3: info(num_blocks=10, kv_cache_bytes=1000, weight_bytes=7, device="cuda:0", max_in_flight=2),
        1: info(num_blocks=7, kv_cache_bytes=700, weight_bytes=7, max_in_flight=1, max_mixed_prefill_tokens=64),
        2: info(num_blocks=5, kv_cache_bytes=500, weight_bytes=7, device="cpu"),
    }
    together = agree(infos, dict.fromkeys(infos, EngineConfig()))
    assert together == info(
        num_blocks=22,
        kv_cache_bytes=2200,
        weight_bytes=21,
        device="cpu, cuda:0",
        max_in_flight=1,
        max_mixed_prefill_tokens=64,
    )
    assert agree({1: infos[1]}, {1: EngineConfig()}) == infos[1]


@pytest.mark.parametrize(
    ("offered", "configured", "said"),
    [
        ({"vocab_size": 101}, {}, "vocab_size is 101 there and 100 here"),
        ({"block_size": 32}, {}, "block_size is 32 there and 16 here"),
        ({"max_model_len": 128}, {}, "max_model_len is 128 there and 64 here"),
        ({"dtype": "bfloat16"}, {}, "dtype is 'bfloat16' there and 'float32' here"),
        ({"windows": (None, 8)}, {}, "windows is (None, 8) there and (None,) here"),
        ({}, {"model": "another/model"}, "model is 'another/model' there and None here"),
        ({}, {"revision": "v2"}, "revision is 'v2' there and None here"),
        ({}, {"quantization": "int8"}, "quantization is 'int8' there and None here"),
        ({}, {"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8' there and 'auto' here"),
        ({}, {"logits_processors": ["a:b"]}, "logits_processors is ('a:b',) there and () here"),
        ({}, {"max_logprobs": 5}, "max_logprobs is 5 there and 20 here"),
        ({}, {"max_n": 5}, "max_n is 5 there and 128 here"),
        ({}, {"max_waiting": 256}, "max_waiting is 256 there and 1024 here"),
        ({}, {"heartbeat_interval_s": 5.0}, "heartbeat_interval_s is 5.0 there and 1.0 here"),
    ],
    ids=[*SAME_OFFER, *SAME_CONFIG],
)
def test_one_that_differs_is_refused_by_rank_field_and_values(
    offered: dict[str, Any], configured: dict[str, Any], said: str
) -> None:
    configs = {0: EngineConfig(), 2: EngineConfig(), 5: EngineConfig(**configured)}
    with pytest.raises(ConfigError) as caught:
        agree({0: info(), 2: info(), 5: info(**offered)}, configs)
    assert str(caught.value) == (
        f"replica 5 cannot stand in for replica 0: {said}: start all replicas with the same model and config"
    )


def test_all_that_differs_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"replica 1 .* replica 0: block_size is 32 .*; dtype is .*; max_n is 4 "):
        agree({0: info(), 1: info(block_size=32, dtype="float16")}, {0: EngineConfig(), 1: EngineConfig(max_n=4)})


def test_what_changes_no_answer_may_differ() -> None:
    configs = {
        0: EngineConfig(),
        1: EngineConfig(kv_cache_memory_bytes=10**6, max_num_seqs=7, num_threads=1, device="cuda:1"),
    }
    assert agree({0: info(), 1: info(num_blocks=1)}, configs).num_blocks == 9


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        (None, None, True),
        (None, "org/name", False),
        ("org/name", "org/name", True),
        ("org/name", "other/name", False),
        ("org/name", "/data/models/name/", True),
        ("/data/name", "/mnt/name", True),
        ("/data/name", "/data/name-v2", False),
    ],
)
def test_a_model_may_lie_in_another_folder_of_another_host(ours: str | None, theirs: str | None, is_same: bool) -> None:
    assert is_same_model(ours, theirs) is is_same
    assert is_same_model(theirs, ours) is is_same
