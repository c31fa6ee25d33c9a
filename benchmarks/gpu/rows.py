"""The aims, row by row, and the results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Literal

import msgspec

Comparison = Literal[">=", ">", "<", "=", ""]
NEEDS_GPU = "needs a GPU"
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}


class Row(msgspec.Struct, frozen=True):
    """A line of the table.

    Attributes:
        key: its name in the results.
        part: what measures it: a key of `benchmarks.gpu.parts.PARTS`.
        workload, aim: as people read them.
        judged: whether it is the value or its ratio to the bound that is compared with ``target``.
        comparison: how; "": there is no aim, only a figure.
    """

    key: str
    part: str
    workload: str
    aim: str
    judged: Literal["value", "ratio"] = "value"
    comparison: Comparison = ""
    target: float = 0.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a row.

    Attributes:
        row: its key.
        device: "cuda" or "cpu". What comes from a CPU, at a tiny shape, says that the code runs, and no more.
        value, unit: a median where it is a time or a rate; None: not measured, and ``reason`` says why.
        bound: the best that there could be, in the same unit, measured in the same run; ``bound_of`` says what it is.
        details: figures beside it.
    """

    row: str
    device: str
    value: float | None = None
    unit: str = ""
    bound: float | None = None
    bound_of: str = ""
    ratio: float | None = None
    reason: str = ""
    details: dict[str, float | str] = {}


class KernelResult(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel at one size: its time against the time that its bytes or its operations take at the bounds' rates."""

    name: str
    size: str
    device: str
    median_us: float | None = None
    bound_us: float | None = None
    bound_of: str = ""
    ratio: float | None = None
    reason: str = ""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the device, measured.

    Attributes:
        copy_bytes_per_s: read and written together.
        matrix_flops: operations a second, two for each product and its sum.
    """

    device: str
    copy_bytes_per_s: float
    matrix_flops: float
    matrix_dtype: str
    sizes: dict[str, float | str] = {}


_OF_BOTH = "≥ 85 % of the larger of the bandwidth and matrix bounds"
_OF_MATRIX = "≥ 65 % of the measured bf16 matrix rate"
_8B = "Llama-3.1-8B shape bf16, batch 1, 1k context, decode"
_REQUESTS = "Qwen3-0.6B shape, 256 requests of 100–1024 in and 100–1024 out"
_PEER = "same, against transformers' continuous batching on the same GPU"
_STEPS = (
    "200 decode steps of 256 sequences with penalties, stops and log-probabilities: synchronisations, and allocations "
    "on the device"
)
_MEMORY = "bytes allocated on the device after `aclose`, beyond those at the start, twice in one process"
_EQUALITY = (
    "greedy tokens against transformers in float32, 64 prompts × 128 tokens: differing ones whose two logits are not "
    "within ε"
)
ROWS = (
    Row("decode, batch 1", "large", _8B, "≥ 90 % of the copy-bandwidth bound", "ratio", ">=", 0.90),
    Row("decode, batch 64", "large", "same, batch 64", _OF_BOTH, "ratio", ">=", 0.85),
    Row("decode, batch 256", "large", "same, batch 256", _OF_BOTH, "ratio", ">=", 0.85),
    Row(
        "prefill 8k",
        "large",
        "prefill of 8k tokens, 8B",
        "≥ 65 % of the measured bf16 matrix rate",
        "ratio",
        ">=",
        0.65,
    ),
    Row("sleep", "large", "`sleep(1)`, `sleep(2)` and `wake_up`, 8B", "no aim"),
    Row("256 requests, tokens/s", "small", _REQUESTS, "> 20,000 output tokens/s", "value", ">", 20_000),
    Row("256 requests, device busy", "small", "same: device busy, of wall time", "≥ 97 %", "value", ">=", 97.0),
    Row("256 requests, against transformers", "peer", _PEER, "≥ 2 times its tokens/s", "ratio", ">=", 2.0),
    Row(
        *("gap between decode steps", "small", "gap between consecutive decode steps, 256 sequences, median"),
        *("< 50 µs", "value", "<", 50.0),
    ),
    Row("loop lag", "small", "loop lag while decoding 256 streams, p99", "< 5 ms", "value", "<", 5.0),
    Row("synchronisations and allocations", "small", _STEPS, "0", "value", "=", 0.0),
    Row("memory after aclose", "life", _MEMORY, "0", "value", "=", 0.0),
    Row("greedy equality", "equality", _EQUALITY, "0", "value", "=", 0.0),
)
BY_KEY = {row.key: row for row in ROWS}


def is_met(result: Result) -> bool | None:
    """Whether it reaches its aim; None where it has none, or was not measured on a GPU."""
    row = BY_KEY[result.row]
    judged = result.value if row.judged == "value" else result.ratio
    if not row.comparison or judged is None or result.device != "cuda":
        return None
    return COMPARE[row.comparison](judged, row.target)
