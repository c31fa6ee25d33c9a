"""Replicas that agree are one offer; those that do not are refused by name."""

from typing import Any

import pytest
from layouts import layout_of

from aioengine.cluster.cluster_core import SAME_CONFIG, SAME_OFFER, check_agreement, combine, is_same_model
from aioengine.config import EngineConfig
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.errors import ConfigError
from aioengine.scheduler.cache_layout import FULL_ATTENTION

LAYOUT = layout_of(None, 8)


def info(**fields: Any) -> ExecutorInfo:
    defaults = {"num_blocks": 8, "block_size": 16, "max_model_len": 64, "vocab_size": 100}
    return ExecutorInfo(**{**defaults, **fields})


def test_blocks_and_bytes_are_summed_and_the_rest_is_the_first_one_s() -> None:
    first = info(num_blocks=7, kv_cache_bytes=700, weight_bytes=7, max_in_flight=1, max_mixed_prefill_tokens=64)
    infos = [
        first,
        info(num_blocks=5, kv_cache_bytes=500, weight_bytes=7, device="cpu"),
        info(num_blocks=10, kv_cache_bytes=1000, weight_bytes=7, device="cuda:0", max_in_flight=2),
    ]
    assert combine(infos) == info(
        num_blocks=22,
        kv_cache_bytes=2200,
        weight_bytes=21,
        device="cpu, cuda:0",
        max_in_flight=1,
        max_mixed_prefill_tokens=64,
    )
    assert combine([first]) == first


@pytest.mark.parametrize(
    ("offered", "configured", "said"),
    [
        ({"vocab_size": 101}, {}, "vocab_size is 101 there, and 100 at the others"),
        ({"block_size": 32}, {}, "block_size is 32 there, and 16 at the others"),
        ({"max_model_len": 128}, {}, "max_model_len is 128 there, and 64 at the others"),
        ({"dtype": "bfloat16"}, {}, "dtype is 'bfloat16' there, and 'float32' at the others"),
        ({"layout": LAYOUT}, {}, f"layout is {LAYOUT} there, and {FULL_ATTENTION} at the others"),
        ({}, {"model": "another/model"}, "model is 'another/model' there, and None at the others"),
        ({}, {"revision": "v2"}, "revision is 'v2' there, and None at the others"),
        ({}, {"quantization": "int8"}, "quantization is 'int8' there, and None at the others"),
        ({}, {"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8' there, and 'auto' at the others"),
        ({}, {"logits_processors": ["a:b"]}, "logits_processors is ('a:b',) there, and () at the others"),
        ({}, {"max_logprobs": 5}, "max_logprobs is 5 there, and 20 at the others"),
        ({}, {"max_n": 5}, "max_n is 5 there, and 128 at the others"),
        ({}, {"max_waiting": 256}, "max_waiting is 256 there, and 1024 at the others"),
        ({}, {"heartbeat_interval_s": 5.0}, "heartbeat_interval_s is 5.0 there, and 1.0 at the others"),
    ],
    ids=[*SAME_OFFER, *SAME_CONFIG],
)
def test_one_that_differs_is_refused_by_rank_field_and_values(
    offered: dict[str, Any], configured: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_agreement(5, (info(), EngineConfig()), (info(**offered), EngineConfig(**configured)))
    assert str(caught.value) == (
        f"replica 5 cannot stand in for the others: {said}: start all replicas with the same model and config"
    )


def test_all_that_differs_is_named_at_once() -> None:
    theirs = info(block_size=32, dtype="float16"), EngineConfig(max_n=4)
    with pytest.raises(ConfigError, match=r"replica 1 .* others: block_size is 32 .*; dtype is .*; max_n is 4 "):
        check_agreement(1, (info(), EngineConfig()), theirs)


def test_what_changes_no_answer_may_differ() -> None:
    other = EngineConfig(kv_cache_memory_bytes=10**6, max_num_seqs=7, num_threads=1, device="cuda:1")
    check_agreement(1, (info(), EngineConfig()), (info(num_blocks=1), other))


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
