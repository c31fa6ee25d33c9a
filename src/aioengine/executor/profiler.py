"""Recording what torch does in a step, operation by operation.

``torch.profiler`` would do more, but its end and its export hold the GIL, and with it the loop, for 20 to 30 µs an
operation (2 s for 100,000 of them), it raises nothing when a file cannot be written, and it prints to stderr. This
costs 7 µs an operation while it records, in the device thread, and holds nobody up later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from aioengine.core.plan import StepPlan
from aioengine.executor.trace import Span, Trace


@contextmanager
def recorded_step(trace: Trace, plan: StepPlan) -> Iterator[None]:
    """Add a span for what this block does in this thread, the step of ``plan``, and one for each torch operation."""
    begin_ns = time.perf_counter_ns()
    try:
        with OpRecorder(trace):
            yield
    finally:
        details = {"num_rows": len(plan.rows), "num_tokens": int(plan.num_tokens.sum())}
        trace.add(Span("step", f"step {plan.step}", begin_ns, time.perf_counter_ns(), details))


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its class hook untyped
    """Records the operations of the thread that has entered it.

    Under inference mode these are the ones that the code calls, such as ``aten::linear``, not the ones inside them.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._trace.add(Span("op", sys.intern(func.name()), begin_ns, time.perf_counter_ns()))
