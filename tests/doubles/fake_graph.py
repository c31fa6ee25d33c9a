"""CUDA graphs without CUDA: what work launches, with the memory that each launch used, to be launched once more."""
# mypy: disallow-untyped-calls=False
# (torch's storages and modes have no types)

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from aioengine.errors import InternalError
from aioengine.executor.accelerator import Work
from aioengine.kernels.operations import Operations

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of torch's operations that bring what the device has computed to the host, which a capture refuses."""

_of_thread = threading.local()


class Place:
    """Where a tensor lies in memory that was there before the work: an address keeps no memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._address = storage.data_ptr()
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """What lies there now.

        Raises:
            InternalError: the memory was given back, or has moved. A GPU would read and write what is there instead.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.data_ptr() != self._address:
            raise InternalError("a graph was replayed over memory that was given back, or has moved, since its capture")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class Launch(NamedTuple):
    """Attributes:
    arguments: positional ones and others, with a `Place` for each tensor that the graph has not made.
    outputs: tensors that it made, in memory of the graph's own.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[Tensor]

    def again(self) -> None:
        args, kwargs = tree_map_only(Place, Place.tensor, self.arguments)
        results = _tensors(self.function(*args, **kwargs))
        if self.outputs:
            for output, result in zip(self.outputs, results, strict=True):
                output.copy_(result)


class Recorder(TorchDispatchMode):
    """Runs work, takes down its launches, and undoes what it has written to memory that was there before.

    Attributes:
        launches: torch's operations, views aside, and those of `as_launches`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._made: set[int] = set()
        """Storages, which live as long as the launches."""
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Other storages, and what was in them."""
        self._is_launching = False

    def run(self, work: Work) -> None:
        _of_thread.recorder = self
        try:
            with self:
                work()
        finally:
            _of_thread.recorder = None
            for storage, before in self._before.values():
                storage.copy_(before)
            self._before.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_launching:
            return func(*args, **(kwargs or {}))
        if WAITS.intersection(func.tags) and not _is_by_numbers(func, args):
            raise InternalError(f"{func} waits for what the device computes, in work that is captured")
        return self.launch(func, args, kwargs or {}, is_pure=not func._schema.is_mutable)

    def launch(self, function: Callable[..., Any], args: Any, kwargs: Any, *, is_pure: bool = False) -> Any:
        """Run it, as one launch whatever it consists of; a pure one that makes nothing is none."""
        self._is_launching = True
        try:
            arguments = tree_map_only(Tensor, self._as_argument, (args, kwargs))
            result = function(*args, **kwargs)
        finally:
            self._is_launching = False
        outputs = _tensors(result)
        are_made = [_storage_of(output) not in (self._made | self._before.keys()) for output in outputs]
        if not any(are_made):
            outputs = []
        assert all(are_made) or not outputs, f"{function} returns both what it made and what it was given"
        self._made.update(map(_storage_of, outputs))
        if outputs or not is_pure:
            self.launches.append(Launch(function, arguments, outputs))
        return result

    def _as_argument(self, tensor: Tensor) -> Tensor | Place:
        key = _storage_of(tensor)
        if key in self._made:
            return tensor
        if key not in self._before:
            storage = tensor.untyped_storage()
            self._before[key] = storage, storage.clone()
        return Place(tensor)


class FakeGraph:
    """Launches again what was recorded, on the very memory: the work's Python has run once, and is not kept.

    Graphs share no memory, and there is no pool that would outlive them.

    Args:
        enqueue: where replays go.

    Attributes:
        num_replays: that were asked for.
    """

    def __init__(self, enqueue: Callable[[Work], None]) -> None:
        self._enqueue = enqueue
        self._launches: list[Launch] = []
        self.num_replays = 0

    def record(self, work: Work) -> None:
        recorder = Recorder()
        recorder.run(work)
        self._launches = recorder.launches

    def replay(self) -> None:
        self.num_replays += 1
        self._enqueue(self._run)

    def _run(self) -> None:
        for launch in self._launches:
            launch.again()


def as_launches(operations: Operations, *, has_each: bool = False) -> Operations:
    """The operations, each that is a kernel one launch to a graph, and so is a plain torch form that waits for the
    device: it runs anew at each replay, with the arguments of the capture. Of all others a graph records what torch
    launches. Tiles are short, so that prompts have several.

    Args:
        has_each: each operation is one launch, whatever computes it.
    """
    return cast("Operations", _Launches(operations, has_each=has_each))


class _Launches:
    def __init__(self, operations: Operations, *, has_each: bool) -> None:
        self._operations = operations
        self._has_each = has_each

    def prefill_tile(self, *sizes: int) -> int:
        return min(self._operations.prefill_tile(*sizes), 12)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._operations, name)
        is_launch = self._has_each or hasattr(found, "operation") or hasattr(found, "waits_for_device")
        return partial(_launch, found) if is_launch else found


def _launch(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    recorder: Recorder | None = getattr(_of_thread, "recorder", None)
    return function(*args, **kwargs) if recorder is None else recorder.launch(function, args, kwargs)


def _is_by_numbers(func: Any, args: Any) -> bool:
    """Whether it indexes by numbers of rows alone: torch's mark is for masks, which make shapes of their own."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and all(each is None or each.dtype not in masks for each in args[1])


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
