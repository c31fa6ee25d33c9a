"""A valid message of each kind: what tests and the fuzzer start from, and what was recorded.

    python tests/transport/wire_samples.py

writes `recorded/`, the frames of today's messages, as a peer of this `PROTOCOL_VERSION` sends them. Write them anew
only with another `PROTOCOL_VERSION`, or to add messages that did not exist. No two fields of a message that could be
taken for each other have the same value, so that exchanged ones would be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from aioengine.cluster import coordinator_messages as cluster
from aioengine.config import EngineConfig
from aioengine.core import control as c
from aioengine.core.executor_protocol import ExecutorInfo, LockstepPlace
from aioengine.core.health import Beat
from aioengine.core.listener import SampledLogprobs
from aioengine.outputs.metrics import StepRecord
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.scheduler.sequence import Request
from aioengine.structured.grammar import Thinking
from aioengine.transport import handshake, wire
from aioengine.transport.wire import Fault, WireMessage

RECORDED = Path(__file__).parent / "recorded"


class Sample(NamedTuple):
    """A message."""

    name: str
    body: WireMessage


PARAMS = SamplingParams(temperature=0.5, top_k=7, seed=11, n=2, max_tokens=3, stop=("one", "two"), logit_bias={5: -2.0})

CONFIG = EngineConfig(
    max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128, block_size=8, max_waiting=33, memory_utilization=0.4
)

LATER_FIELDS = {
    "tool_format", "reasoning_format", "scheduler", "logits_processors", "model_path", "trust_remote_code",
    "chat_template",
}  # fmt: skip
"""Of `EngineConfig`, since the recordings were made: the settings that an engine tells are a mapping, which grows."""

INFO = ExecutorInfo(
    num_blocks=101, block_size=8, max_model_len=512, vocab_size=2048, max_in_flight=2, kv_cache_bytes=4096,
    weight_bytes=8192, device="fake", dtype="bfloat16",
)  # fmt: skip

BEAT = Beat(step=91, step_age_s=0.25, running=3, waiting=4, is_sleeping=True, num_refused=5)

STATS = SchedulerStats(
    running=1, waiting=2, blocked=3, free_blocks=4, num_blocks=5, preemptions=6, prefix_cache_queries=7,
    prefix_cache_hits=8, steps=9,
)  # fmt: skip

FAULT = Fault(
    "PromptTooLong", "too long", param="prompt", retry_after_s=1.5, dump="a report", length=9000, limit=8192,
    is_lower_bound=True, errno=2, filename="/nowhere", hint="give less",
)  # fmt: skip

RECORD = StepRecord(
    step=1, num_tokens=2, num_sampled=3, num_prompt_tokens=4, device_time_s=0.5, step_time_s=0.75, loop_lag_s=0.125,
    inter_token_latencies_s=np.array([0.25, 0.5]), times_to_first_token_s=[0.25, 0.5], running=9, waiting=10,
    free_blocks=11, num_blocks=12, preemptions=13, prefix_cache_queries=14, prefix_cache_hits=15,
)  # fmt: skip

CONTROLS: tuple[c.AnyControl, ...] = (
    c.ResetPrefixCache(reset_running=True),
    c.Pause(mode="abort"),
    c.Resume(),
    c.Sleep(level=2, mode="wait"),
    c.WakeUp(tags=("kv_cache",)),
    c.IsSleeping(),
    c.StartProfile(max_steps=17),
    c.StopProfile(path="/tmp/trace.json"),
    c.SupportedTasks(),
    c.SaveShardedState(folder="/tmp/state", max_shard_bytes=2**33),
    c.UpdateWeights(folder="/tmp/weights"),
    c.StageWeights(transfer="a", name="lm_head.weight", dtype="BF16", shape=(3, 4), offset=8),
    c.CommitWeights(transfer="b"),
    c.DropWeights(transfer="d"),
    c.CollectiveRpc(name="checksum", args=(1, "two", [3.5, None]), kwargs={"key": {"deep": True}}),
    c.ExecuteDummyBatch(),
    c.StartWave(wave=18),
)


def int32(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def _add_request(name: str, first: int, *, prompt: Iterable[int] = (5,), **more: Any) -> Sample:
    """A request whose numbers count from ``first``; ``more`` are further fields of it, or of its message."""
    message = {name: more.pop(name) for name in wire.AddRequest.__struct_fields__ if name in more}
    fields = {
        "params": PARAMS, "seed": first + 1, "max_total_tokens": first + 2, "request_id": f"request-{first + 3}",
        "bad_words": ((first + 4, first + 5), (first + 6,)), "priority": first + 7, "cache_salt": f"salt-{first + 8}",
    }  # fmt: skip
    request = Request(prompt_token_ids=int32(*prompt), **fields | more)
    packed = wire.pack_request(request)
    return Sample(name, wire.AddRequest(number=first, request=packed, num_allowed=first + 9, **message))


TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=146"}
THINKING = Thinking(begin_ids=(101,), end_ids=(102,), forced_end_ids=(103, 102), is_begun=True, max_tokens=104)


def _control(call_id: int, control: c.AnyControl) -> Sample:
    return Sample(f"control_{type(control).__name__}", wire.CallControl(call_id, wire.pack_control(control)))


STAGE = c.StageWeights(transfer="a", name="w", dtype="F32", shape=(2,), offset=4, data=bytes(range(8)))

FROM_FRONT_END: tuple[Sample, ...] = (
    Sample("attach", wire.Attach(version=1, name="somebody")),
    _add_request("add_request_0", 21, prompt=()),
    _add_request("add_request_1", 21),
    _add_request("add_request_2000", 21, prompt=range(2000)),
    Sample("finish_none", wire.Finish(numbers=[], reason="abort")),
    Sample("finish", wire.Finish(numbers=[31, 32], reason="stop", stop_reason="a word")),
    Sample("finish_token", wire.Finish(numbers=[33], reason="stop", stop_reason=34)),
    Sample("allow", wire.Allow(number=41, num_allowed=42)),
    *(_control(50 + index, control) for index, control in enumerate(CONTROLS)),
    Sample("stage", wire.CallControl(71, wire.pack_control(STAGE))),
    Sample("acknowledge", wire.Acknowledge(number=81)),
    Sample("detach", wire.Detach()),
    Sample("cancel_call", wire.CancelCall(call_id=72)),
    _add_request("add_request_with_thinking", 91, thinking=THINKING, tenant="tenant-105", session="session-106"),
    _add_request("add_request_with_params", 111, params=PARAMS.clone(logprobs=2, logprobs_mode="processed")),
    _add_request("add_request_with_trace", 131, **TRACE),
    _add_request("add_request_that_goes_on", 151, choice=1, output=int32(167, 168).tobytes(), is_moved=True),
)

_NEWS: dict[str, Any] = {
    "numbers": [1, 2, 2],
    "token_ids": [100, 200, 300],
    "started": [wire.Started(number=1, num_cached_tokens=16)],
    "first": [wire.First(number=2, prefill_time_s=0.5)],
    "prompts": [wire.PromptLogprobsMessage(number=3, position=4, logprobs=SampledLogprobs(-3.5, 2, []))],
    "ended": [wire.Ended(number=5, finish_reason="stop", stop_reason="word", num_preemptions=6)],
    "failed": [wire.Failed(number=7, fault=FAULT)],
    "record": RECORD,
    "logprobs": [(1, SampledLogprobs(-0.5, 3, [(8, -1.5, 1), (9, -math.inf, 2)]))],
}
ATTACHED = wire.Attached(
    version=1,
    config={name: value for name, value in msgspec.structs.asdict(CONFIG).items() if name not in LATER_FIELDS},
    info=INFO, eos_token_ids=(3, 4), model_path="/tmp/model", first_beat=BEAT, stats=STATS,
)  # fmt: skip

FROM_ENGINE: tuple[Sample, ...] = (
    Sample("attached", ATTACHED),
    Sample("refused", wire.Refused(version=1, reason="no room")),
    Sample("outputs_none", wire.StepOutputsMessage()),
    Sample("outputs_one", wire.StepOutputsMessage(numbers=[9], token_ids=[900])),
    Sample("outputs_many", wire.StepOutputsMessage(numbers=[*range(300)], token_ids=[*range(300, 600)])),
    Sample("outputs", wire.StepOutputsMessage(**_NEWS)),
    Sample("outputs_vectors", wire.StepOutputsMessage(vectors=[wire.VectorMessage(number=1, values=b"\0\0\x80?" * 3)])),
    Sample("returned", wire.Returned(call_id=1, result={"files": ["a", "b"], "done": True})),
    Sample("returned_fault", wire.Returned(call_id=2, fault=FAULT)),
    Sample("beating", wire.Beating(beat=BEAT)),
    Sample("ending", wire.Shutdown(fault=FAULT)),
    Sample("beating_in_lockstep", wire.Beating(msgspec.structs.replace(BEAT, wave=19, is_wave_running=True))),
)

HANDSHAKE_FROM_ENGINE: tuple[Sample, ...] = (
    Sample("hello", handshake.Hello(version=1, token="secret", pid=3)),
    Sample("loading", handshake.Loading(done=5, total=6)),
    Sample("ready", handshake.Ready(address="ipc:///tmp/engine", info=INFO, supported_tasks=("generate",))),
    Sample("failing", handshake.Failing(fault=FAULT)),
)

INIT = handshake.Init(
    version=1, address="ipc:///tmp/engine", config=CONFIG, plugins=("one", "two"),
    executor="module:function",
)  # fmt: skip

HANDSHAKE_TO_ENGINE: tuple[Sample, ...] = (
    Sample("init", INIT),
    Sample("turned_away", handshake.TurnedAway(version=1, reason="the token is another one")),
    Sample("init_in_lockstep", msgspec.structs.replace(INIT, lockstep=LockstepPlace(2, 3, "file:///tmp/store", 4.5))),
)

TO_COORDINATOR: tuple[Sample, ...] = (
    Sample("attach", wire.Attach(version=1, name="a further front end")),
    Sample("call", wire.CallControl(1, wire.pack_control(cluster.Scale(replicas=2)))),
    Sample("drained", cluster.Drained(rank=4)),
    Sample("acknowledge", wire.Acknowledge(number=81)),
    Sample("detach", wire.Detach()),
    Sample("cancel_call", wire.CancelCall(call_id=72)),
)

MEMBER = cluster.Member(
    rank=1, state="draining", num_restarts=2, address="ipc:///tmp/replica", reason="it was killed", where="pid 3",
    num_blocks=4,
)  # fmt: skip
COUNTS = cluster.Counts(ranks=[1, 5], running=[6, 7], waiting=[8, 9], blocked=[10, 11], free_blocks=[12, 13])

ATTACHED_TO_CLUSTER = cluster.AttachedToCluster(
    version=1, index=2, config={"max_num_seqs": 3}, options={"replicas": 4}, members=cluster.Membership([MEMBER]),
    counts=COUNTS,
)  # fmt: skip

FROM_COORDINATOR: tuple[Sample, ...] = (
    Sample("attached to cluster", ATTACHED_TO_CLUSTER),
    Sample("refused", wire.Refused(version=1, reason="no room")),
    Sample("members_none", cluster.Membership([])),
    Sample("members", cluster.Membership([MEMBER, cluster.Member(5, "starting", 0)])),
    Sample("counts", COUNTS),
    Sample("returned", wire.Returned(call_id=1, result="done")),
    Sample("ending", wire.Shutdown(fault=FAULT)),
)

DIRECTIONS: dict[str, tuple[Any, tuple[Sample, ...]]] = {
    "from_front_end": (wire.FromFrontEnd, FROM_FRONT_END),
    "from_engine": (wire.FromEngine, FROM_ENGINE),
    "handshake_from_engine": (handshake.FromEngine, HANDSHAKE_FROM_ENGINE),
    "handshake_to_engine": (handshake.ToEngine, HANDSHAKE_TO_ENGINE),
    "to_coordinator": (cluster.ToCoordinator, TO_COORDINATOR),
    "from_coordinator": (cluster.FromCoordinator, FROM_COORDINATOR),
}
"""By name: the union of a direction's messages, and its samples."""


def frames_of(sample: Sample, number: int = 0) -> list[bytes]:
    """The frames of a sample as message ``number`` of its session."""
    writer = wire.Writer()
    writer.number = number
    return [writer.write(sample.body)]


def record(folder: Path) -> None:
    """Write the frames of all samples, a file a direction: msgpack of {name: frames}."""
    folder.mkdir(exist_ok=True)
    for direction, (_, samples) in DIRECTIONS.items():
        frames = {sample.name: frames_of(sample, number) for number, sample in enumerate(samples)}
        (folder / f"version{wire.PROTOCOL_VERSION}-{direction}.msgpack").write_bytes(msgspec.msgpack.encode(frames))


if __name__ == "__main__":
    record(RECORDED)
