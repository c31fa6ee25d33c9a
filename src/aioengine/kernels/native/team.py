"""A team of threads that runs programs of native kernels, without Python between them."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from aioengine.errors import InternalError
from aioengine.kernels.native.library import Library
from aioengine.kernels.native.sizes import (
    MAX_ARGUMENTS,
    MAX_CHUNKS,
    RECORD_BYTES,
    RECORD_WORDS,
    SEMAPHORES,
)

READ = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int32, torch.int8, torch.uint8),
)
"""Dtypes that kernels read; int64 and float64 would be taken for twice as many numbers of half the size."""

UNINITIALISED = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)

_ROOM_FOR_RESULTS = (ctypes.c_int64 * 2)()
"""numba's functions write a status there; those of the library have none."""


STACK_BYTES = 8 * 2**20
"""Linux's own default. Kernels take up to 1 MiB of it for what they compute with."""

_starting = threading.Lock()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread that kernels run in, though the program may have chosen smaller stacks for its threads.

    Raises:
        RuntimeError: there are too many threads.
    """
    with _starting:  # the size is the process's, and asking for it would change it, too
        chosen = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(chosen)


class Team:
    """Threads that run native kernels, the caller's one of them. For one thread at a time.

    Args:
        num_threads: with the caller's; the others sleep when no work has come for some 0.5 ms.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._num_threads_of_run = num_threads
        self._words = np.zeros((SEMAPHORES + 128 * num_threads) // 8 + 8, np.int64)
        self._address = (self._words.ctypes.data + 63) // 64 * 64
        self._captured: _Captured | None = None
        self._record = np.zeros(RECORD_WORDS, np.int64)
        self._record_address = self._record.ctypes.data
        pointers, words = (ctypes.c_void_p, ctypes.c_void_p), (ctypes.c_int64,) * 4
        self._run = ctypes.CFUNCTYPE(None, *pointers, *words)(library.address("run"))
        self._end = ctypes.CFUNCTYPE(None, *pointers, *words[:2])(library.address("end"))
        serve = ctypes.CFUNCTYPE(None, *pointers, *words[:2])(library.address("serve"))
        self._results = ctypes.addressof(_ROOM_FOR_RESULTS)
        self._threads: list[threading.Thread] = []
        try:
            for thread in range(1, num_threads):
                arguments = serve, self._address, thread, library, self._words
                name = f"aioengine-kernels-{thread}"
                started = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
                start_thread(started)
                self._threads.append(started)
        except RuntimeError:  # too many threads
            self.close()
            raise

    def use_threads(self, num_threads: int) -> None:
        """Run what comes with so many of the threads, or with all if there are fewer."""
        self._num_threads_of_run = min(num_threads, self.num_threads)

    def launch(self, kernel: str, num_chunks: int, *arguments: Tensor | int) -> None:
        """Run one kernel, without the GIL, and return when it is done. Within `capture` it is recorded instead of run.

        Args:
            num_chunks: into how many chunks its work is cut; with 0 there is none.
            arguments: tensors, of which the kernel gets the address; sizes; and floats as `float_bits`.
        Raises:
            InternalError: a tensor that is not contiguous, on another device, or of a dtype that no kernel reads.
        """
        if not num_chunks:
            return
        words = [each if isinstance(each, int) else _address_of(each, kernel) for each in arguments]
        if self._captured is None:
            fill_record(self._record, self.library.address(kernel), num_chunks, words)
            self.run_each(self._record_address, [kernel])
            return
        self._captured.records.append((kernel, num_chunks, words))
        storages = (each.untyped_storage() for each in arguments if not isinstance(each, int))
        self._captured.kept.update((storage.data_ptr(), storage) for storage in storages)

    def capture(self, work: Callable[[], None]) -> Program:
        """The kernels that ``work`` launches, as a program, without running them.

        Beside them ``work`` may make views and uninitialised tensors.

        Raises:
            InternalError: ``work`` computes something by torch, which `Program.replay` would not do.
        """
        self._captured = captured = _Captured([], {})
        try:
            with _NoTorch():
                work()
        finally:
            self._captured = None
        return Program(self, captured)

    def run(self, program: int, num_records: int) -> None:
        """Run the records at an address."""
        self._run(self._results, self._results + 8, self._address, program, num_records, self._num_threads_of_run)

    def run_each(self, program: int, kernels: Sequence[str]) -> None:
        """Run the records at an address; while torch's profiler records, one by one, each an event with its name."""
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self.run(program, len(kernels))
            return
        for nth, kernel in enumerate(kernels):
            with torch._C._profiler._RecordFunctionFast(kernel):
                self.run(program + nth * RECORD_BYTES, 1)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._end(self._results, self._results + 8, self._address, self.num_threads)
        for each in self._threads:
            each.join()
        self._threads = []


def _serve(serve: Callable[..., None], address: int, thread: int, *_used: object) -> None:
    """Run a helper thread. It holds what it uses, the code and the words, though its team may be dropped unclosed."""
    results = ctypes.addressof(_ROOM_FOR_RESULTS)
    serve(results, results + 8, address, thread)


class _Captured(NamedTuple):
    """Launches of captured work: kernels, chunks, arguments; and memory that must stay, by address."""

    records: list[tuple[str, int, list[int]]]
    kept: dict[int, UntypedStorage]


class _NoTorch(TorchDispatchMode):
    """Within it torch makes views and uninitialised tensors, and refuses all else: in this thread.

    torch's own ``__enter__`` and ``__exit__`` also set flags of the whole process, and its ``__init_subclass__`` has
    dynamo imported, which takes seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *_error: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.is_view or operation.overloadpacket in UNINITIALISED:
            made = operation(*args, **(kwargs or {}))
            # Some of torch's views, such as `reshape`, are copies where there is no view.
            if not operation.is_view or _is_within(made, args[0]):
                return made
        raise InternalError(f"a program of native kernels cannot replay torch's {operation}")


def _is_within(views: Tensor | Sequence[Tensor], tensor: Tensor) -> bool:
    """Whether these lie in the memory of a tensor."""
    storage = tensor.untyped_storage().data_ptr()
    found = (views,) if isinstance(views, Tensor) else views
    return all(each.untyped_storage().data_ptr() == storage for each in found)


class Program:
    """Kernels with their arguments, to be run as often as one likes, as long as its team is there."""

    def __init__(self, team: Team, captured: _Captured) -> None:
        self._team = team
        self._kept = list(captured.kept.values())
        self._records = np.zeros((len(captured.records), RECORD_WORDS), np.int64)
        self._kernels = [kernel for kernel, _, _ in captured.records]
        for record, (kernel, num_chunks, arguments) in zip(self._records, captured.records, strict=True):
            fill_record(record, team.library.address(kernel), num_chunks, arguments)
        self._address = self._records.ctypes.data

    def replay(self) -> None:
        self._team.run_each(self._address, self._kernels)


def _address_of(tensor: Tensor, kernel: str) -> int:
    if tensor.is_cpu and tensor.dtype in READ and tensor.is_contiguous():
        return tensor.data_ptr()
    raise InternalError(
        f"{kernel} was given {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
        f"{tensor.device}; native kernels read contiguous tensors of the host, of {', '.join(map(str, READ))}"
    )


def fill_record(record: NDArray[np.int64], address: int, num_chunks: int, arguments: Sequence[int]) -> None:
    if len(arguments) > MAX_ARGUMENTS:
        raise InternalError(f"a native kernel was given {len(arguments)} arguments; {MAX_ARGUMENTS} have room")
    if num_chunks >= MAX_CHUNKS:
        raise InternalError(f"a native kernel's work was cut into {num_chunks} chunks; fewer than {MAX_CHUNKS} can be")
    struct.pack_into(f"{2 + len(arguments)}q", record.data, 0, address, num_chunks, *arguments)


def float_bits(value: float) -> int:
    """A float32 as a record holds it; kernels read it by ``get_f32``."""
    return int(np.float32(value).view(np.int32))
