"""What every `Executor` must do beside steps: sleep, other weights, functions. Subclass `ControlContract`.

Only the protocol is relied on, and what `Controlled` says.
"""

import abc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest
from executor.plans import PROMPT, PlanWriter, greedy_tokens, run_step
from nightly import nightly

from aioengine.core.control import (
    CollectiveRpc,
    CommitWeights,
    DropWeights,
    ExecuteDummyBatch,
    SaveShardedState,
    Sleep,
    StageWeights,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from aioengine.core.executor_protocol import DeviceLost, Executor
from aioengine.core.named_functions import Worker, worker_function
from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.executor.weight_transfer import MAX_TRANSFERS

BOTH = frozenset(("weights", "kv_cache"))
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


class InjectedError(Exception):
    pass


@worker_function("control_contract.describe")
def describe(worker: Worker, *args: Any, **kwargs: Any) -> Any:
    return worker.rank, worker.world_size, worker.model is not None, args, kwargs


@worker_function("control_contract.fail")
def fail(worker: Worker) -> None:
    raise InjectedError("so it was asked")


@dataclass
class Controlled:
    """A started executor.

    Attributes:
        other: a folder with other weights of the same shapes.
        shapes: of `EMBEDDING` and `NORM`.
    """

    executor: Executor
    other: Path
    shapes: dict[str, tuple[int, ...]]

    def writer(self) -> PlanWriter:
        return PlanWriter.of(self.executor.info)

    async def tokens(self, num_tokens: int = 6) -> list[int]:
        return await greedy_tokens(self.executor, num_tokens)

    async def step(self, writer: PlanWriter) -> int:
        """The next token of the sequence in row 0; a writer without one gets that of `tokens`."""
        if not writer.rows:
            writer.add(0, list(PROMPT))
        return (await run_step(self.executor, writer))[0]

    def values(self, name: str, seed: int = 1) -> bytes:
        """A tensor of float32 for this name."""
        noise = np.random.default_rng(seed).standard_normal(self.shapes[name], np.float32)
        return noise.tobytes()

    def piece(self, tensor: str, data: Any, **fields: Any) -> StageWeights:
        described = {"transfer": "t", "name": tensor, "dtype": "F32", "shape": self.shapes[tensor], "offset": 0}
        return StageWeights(**{**described, "data": data, **fields})

    async def put(self, *names: str) -> None:
        """Let tensors take the place of those of these names, the same ones each time."""
        for name in names:
            await self.stage(name)
        await self.executor.perform(CommitWeights("t"))

    async def stage(self, name: str, *, seed: int = 1, transfer: str = "t") -> None:
        await self.executor.perform(self.piece(name, self.values(name, seed), transfer=transfer))


class ControlContract(abc.ABC):
    """The suite. Equal weights bring equal tokens, and others others."""

    @abc.abstractmethod
    async def start(self, tmp_path: Path, max_in_flight: int) -> Controlled:
        """A fresh executor; always the same model."""

    @asynccontextmanager
    async def open(self, tmp_path: Path, max_in_flight: int = 1) -> AsyncIterator[Controlled]:
        controlled = await self.start(tmp_path, max_in_flight)
        try:
            yield controlled
        finally:
            await controlled.executor.aclose()

    @pytest.fixture(params=[*nightly(1), 2])
    async def opened(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Controlled]:
        async with self.open(tmp_path, request.param) as controlled:
            yield controlled

    # Sleep

    @pytest.mark.parametrize("levels", [(1,), (2,), (1, 1, 2, 2, 1)], ids=str)
    async def test_after_a_sleep_all_is_as_before(self, opened: Controlled, levels: tuple[Literal[1, 2], ...]) -> None:
        expected = await opened.tokens()
        for _ in range(2):
            for level in levels:
                await opened.executor.perform(Sleep(level))
            for parts in (frozenset(), BOTH, BOTH):
                await opened.executor.perform(WakeUp(parts))
            assert await opened.tokens() == expected

    async def test_parts_wake_one_by_one_and_no_step_runs_before_the_last(self, opened: Controlled) -> None:
        expected = await opened.tokens()
        for order in (("weights", "kv_cache"), ("kv_cache", "weights")):
            await opened.executor.perform(Sleep(2))
            await opened.executor.perform(WakeUp(frozenset((order[0],))))
            with pytest.raises(AssertionError, match="asleep"):
                await opened.executor.launch(opened.writer().plan({})).finish()
            await opened.executor.perform(WakeUp(frozenset((order[1],))))
            assert await opened.tokens() == expected

    @pytest.mark.parametrize("computes_again", [True, False])
    async def test_a_sleep_knows_the_rows_and_forgets_their_kv(self, opened: Controlled, computes_again: bool) -> None:
        expected = await opened.tokens(4)
        writer = opened.writer()
        await opened.step(writer)
        await opened.executor.perform(Sleep(1))
        await opened.executor.perform(WakeUp(BOTH))
        if computes_again:
            writer.rows[0].num_computed = 0
        tokens = [await opened.step(writer) for _ in range(3)]
        assert (tokens == expected[1:]) == computes_again

    async def test_waking_who_is_awake_forgets_nothing(self, opened: Controlled) -> None:
        expected = await opened.tokens(2)
        writer = opened.writer()
        await opened.step(writer)
        await opened.executor.perform(WakeUp(BOTH))
        assert await opened.step(writer) == expected[1]

    # Weights from a folder

    async def test_weights_of_a_folder_take_the_place_of_those_before(self, opened: Controlled, tmp_path: Path) -> None:
        before = await opened.tokens()
        await opened.executor.perform(UpdateWeights(opened.other))
        after = await opened.tokens()
        assert after != before
        async with self.open(tmp_path) as another:
            await another.executor.perform(UpdateWeights(opened.other))
            assert await another.tokens() == after

    async def test_a_launched_step_has_the_weights_of_its_launch(self, opened: Controlled) -> None:
        expected = await opened.tokens(1)
        writer = opened.writer()
        writer.add(0, list(PROMPT))
        plan = writer.plan()
        step = opened.executor.launch(plan)
        await opened.executor.perform(UpdateWeights(opened.other))
        assert step.is_done
        assert writer.read(plan, await step.finish()) == {0: expected[0]}

    @pytest.mark.parametrize("level", [1, 2])
    async def test_weights_that_come_in_sleep_are_there_after_it(
        self, opened: Controlled, level: Literal[1, 2], tmp_path: Path
    ) -> None:
        await opened.executor.perform(Sleep(level))
        with pytest.raises(ModelLoadError):
            await opened.executor.perform(UpdateWeights(tmp_path / "nowhere"))
        await opened.executor.perform(UpdateWeights(opened.other))
        await opened.executor.perform(WakeUp(BOTH))
        after = await opened.tokens()
        async with self.open(tmp_path) as another:
            assert await another.tokens() != after
            await another.executor.perform(UpdateWeights(opened.other))
            assert await another.tokens() == after

    async def test_a_sleep_brings_back_the_weights_of_the_last_folder(self, opened: Controlled) -> None:
        await opened.executor.perform(UpdateWeights(opened.other))
        expected = await opened.tokens()
        await opened.executor.perform(Sleep(2))
        await opened.executor.perform(WakeUp(BOTH))
        assert await opened.tokens() == expected

    # Weights as tensors

    async def test_tensors_in_pieces_in_any_order_take_their_places(self, opened: Controlled, tmp_path: Path) -> None:
        before = await opened.tokens()
        await opened.stage(EMBEDDING)
        await opened.stage(NORM, seed=2)
        assert await opened.tokens() == before
        await opened.executor.perform(CommitWeights("t"))
        after = await opened.tokens()
        assert after != before
        async with self.open(tmp_path) as another:
            data = another.values(EMBEDDING)
            cuts = [0, 1, 7, len(data) // 3, len(data) // 2, len(data)]
            for first in (3, 0, 4, 2, 1):
                begin, end = cuts[first], cuts[first + 1]
                await another.executor.perform(another.piece(EMBEDDING, data[begin:end], offset=begin))
            await another.stage(NORM, seed=2)
            await another.executor.perform(CommitWeights("t"))
            assert await another.tokens() == after

    async def test_the_callers_buffer_may_be_used_again(self, opened: Controlled, tmp_path: Path) -> None:
        data = bytearray(opened.values(EMBEDDING))
        await opened.executor.perform(opened.piece(EMBEDDING, memoryview(data)))
        data[:] = bytes(len(data))
        await opened.executor.perform(CommitWeights("t"))
        async with self.open(tmp_path) as another:
            await another.put(EMBEDDING)
            assert await another.tokens() == await opened.tokens()

    async def test_a_piece_that_does_not_fit_is_refused_and_changes_nothing(self, opened: Controlled) -> None:
        shape, data = opened.shapes[NORM], opened.values(NORM)
        half = len(data) // 2
        await opened.executor.perform(opened.piece(NORM, data[4:half], offset=4))
        with pytest.raises(InvalidRequest, match="overlap"):
            await opened.executor.perform(opened.piece(NORM, data[:8]))
        await opened.executor.perform(opened.piece(NORM, data[:4]))
        rest = data[half:]
        refused: list[tuple[str, dict[str, Any]]] = [
            ("no tensor", {"name": "model.norm.wait"}),
            ("F64", {"dtype": "F64"}),
            ("are F32", {"dtype": "BF16", "offset": 0, "data": b"12"}),
            ("shape", {"shape": (*shape, 1)}),
            ("shape", {"shape": (shape[0] - 1,)}),
            ("lie inside", {"offset": half + 1}),
            ("lie inside", {"offset": -1}),
            ("lie inside", {"offset": 0.5}),
            ("overlap", {"offset": half - 1}),
            ("overlap", {"offset": 0}),
            ("overlap", {"offset": 1, "data": b"1"}),
            ("no bytes", {"data": b""}),
            ("contiguous bytes", {"data": None}),
            ("contiguous bytes", {"data": "text"}),
            ("contiguous bytes", {"data": memoryview(rest)[::2]}),
        ]
        for message, fields in refused:
            with pytest.raises(InvalidRequest, match=message):
                await opened.executor.perform(opened.piece(NORM, **{"data": rest, "offset": half, **fields}))
        with pytest.raises(InvalidRequest, match=f"{len(rest)} of its {len(data)} bytes"):
            await opened.executor.perform(CommitWeights("t"))
        await opened.executor.perform(opened.piece(NORM, rest, offset=half))
        await opened.executor.perform(CommitWeights("t"))

    async def test_a_transfer_ends_with_its_commit_or_its_drop(self, opened: Controlled) -> None:
        before = await opened.tokens()
        await opened.stage(EMBEDDING)
        for _ in range(2):
            await opened.executor.perform(DropWeights("t"))
        with pytest.raises(InvalidRequest, match="nothing is staged"):
            await opened.executor.perform(CommitWeights("t"))
        assert await opened.tokens() == before
        await opened.put(EMBEDDING)
        with pytest.raises(InvalidRequest, match="nothing is staged"):
            await opened.executor.perform(CommitWeights("t"))

    async def test_transfers_do_not_mix_and_are_few(self, opened: Controlled, tmp_path: Path) -> None:
        for number in range(MAX_TRANSFERS):
            await opened.stage(NORM, seed=number, transfer=str(number))
        with pytest.raises(InvalidRequest, match="commit or drop one"):
            await opened.stage(NORM, transfer="one more")
        await opened.executor.perform(DropWeights("0"))
        await opened.stage(EMBEDDING, transfer="one more")
        await opened.executor.perform(CommitWeights("one more"))
        async with self.open(tmp_path) as another:
            await another.put(EMBEDDING)
            assert await another.tokens() == await opened.tokens()

    async def test_weights_that_came_as_tensors_are_not_thrown_away(self, opened: Controlled, tmp_path: Path) -> None:
        await opened.put(EMBEDDING)
        expected = await opened.tokens()
        with pytest.raises(InvalidRequest, match="level 1, or write them with save_sharded_state"):
            await opened.executor.perform(Sleep(2))
        assert await opened.tokens() == expected
        await opened.executor.perform(Sleep(1))
        with pytest.raises(InvalidRequest, match="cannot be read again"):
            await opened.executor.perform(Sleep(2))
        await opened.executor.perform(WakeUp(BOTH))
        assert await opened.tokens() == expected
        await opened.executor.perform(SaveShardedState(tmp_path / "saved", 2**30))
        await opened.executor.perform(UpdateWeights(tmp_path / "saved"))
        await opened.executor.perform(Sleep(2))
        await opened.executor.perform(WakeUp(BOTH))
        assert await opened.tokens() == expected

    async def test_tensors_find_their_places_in_a_light_sleep_and_wait_for_the_end_of_a_deep_one(
        self, opened: Controlled
    ) -> None:
        await opened.stage(EMBEDDING)
        await opened.executor.perform(Sleep(2))
        with pytest.raises(InvalidRequest, match="wake them up"):
            await opened.executor.perform(CommitWeights("t"))
        await opened.executor.perform(WakeUp(frozenset(("weights",))))
        await opened.executor.perform(Sleep(1))
        await opened.executor.perform(CommitWeights("t"))
        await opened.executor.perform(WakeUp(BOTH))
        after = await opened.tokens()
        await opened.put(EMBEDDING)
        assert await opened.tokens() == after

    # Saving

    async def test_what_was_saved_is_loaded_again(self, opened: Controlled, tmp_path: Path) -> None:
        await opened.put(EMBEDDING)
        expected = await opened.tokens()
        for folder in (tmp_path / "saved", tmp_path / "saved", tmp_path):
            names = await opened.executor.perform(SaveShardedState(folder, 2**30))
            assert names
            assert all((folder / name).is_file() for name in names)
            async with self.open(tmp_path) as another:
                await another.executor.perform(UpdateWeights(folder))
                assert await another.tokens() == expected
        assert await opened.tokens() == expected

    async def test_what_cannot_be_saved_says_so(self, opened: Controlled, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="max_shard_bytes"):
            await opened.executor.perform(SaveShardedState(tmp_path / "saved", 0))
        with pytest.raises(OSError, match="no folder for it"):
            await opened.executor.perform(SaveShardedState(tmp_path / "nowhere" / "saved", 2**30))
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            await opened.executor.perform(SaveShardedState(tmp_path / "file", 2**30))
        await opened.executor.perform(Sleep(2))
        with pytest.raises(InvalidRequest, match="asleep"):
            await opened.executor.perform(SaveShardedState(tmp_path / "saved", 2**30))
        assert not (tmp_path / "saved").exists()

    # Functions

    async def test_a_registered_function_is_called_by_its_name(self, opened: Controlled) -> None:
        called = await opened.executor.perform(CollectiveRpc("control_contract.describe", (1, "two"), {"three": 3}))
        assert called == [(0, 1, True, (1, "two"), {"three": 3})]
        await opened.executor.perform(Sleep(2))
        assert await opened.executor.perform(CollectiveRpc("control_contract.describe", (), {})) == [
            (0, 1, False, (), {})
        ]

    async def test_a_function_that_nobody_has_registered_is_refused(self, opened: Controlled) -> None:
        with pytest.raises(InvalidRequest, match=r"there are: .*control_contract\.describe"):
            await opened.executor.perform(CollectiveRpc("control_contract.describes", (), {}))

    async def test_a_function_that_fails_fails_its_caller_alone(self, opened: Controlled) -> None:
        expected = await opened.tokens()

        def broken(model: Any) -> None:
            raise InjectedError("so it was asked")

        with pytest.raises(InjectedError, match="so it was asked"):
            await opened.executor.perform(CollectiveRpc("control_contract.fail", (), {}))
        with pytest.raises(InjectedError, match="so it was asked"):
            await opened.executor.apply_model(broken)
        assert await opened.tokens() == expected

    async def test_a_function_of_the_callers_gets_the_model(self, opened: Controlled) -> None:
        (model,) = await opened.executor.apply_model(lambda model: model)
        assert model is not None
        del model
        await opened.executor.perform(Sleep(1))
        assert await opened.executor.apply_model(lambda model: 5) == [5]
        await opened.executor.perform(Sleep(2))
        with pytest.raises(InvalidRequest, match="asleep"):
            await opened.executor.apply_model(lambda model: 5)

    async def test_a_dummy_is_launched_between_steps_and_ends_in_its_turn(self, opened: Controlled) -> None:
        expected = await opened.tokens(3)
        writer, tokens = opened.writer(), []
        for _ in range(3):
            dummy = opened.executor.launch_dummy()
            has_room = opened.executor.info.max_in_flight > 1
            if not has_room:
                await dummy.finish()
            tokens.append(await opened.step(writer))
            assert dummy.is_done
            if has_room:
                await dummy.finish()
        assert tokens == expected

    async def test_a_batch_that_is_nobodys_leaves_no_trace(self, opened: Controlled) -> None:
        expected = await opened.tokens(3)
        writer, tokens = opened.writer(), []
        for _ in range(3):
            tokens.append(await opened.step(writer))
            before = opened.executor.stats.num_computed_tokens
            await opened.executor.perform(ExecuteDummyBatch())
            assert opened.executor.stats.num_computed_tokens == before
        assert tokens == expected
        await opened.executor.perform(Sleep(1))
        with pytest.raises(InvalidRequest, match="asleep"):
            await opened.executor.perform(ExecuteDummyBatch())

    # The end

    async def test_after_closing_every_call_says_that_the_device_is_lost(
        self, opened: Controlled, tmp_path: Path
    ) -> None:
        executor = opened.executor
        await executor.aclose()
        calls = [
            lambda: executor.perform(Sleep(1)),
            lambda: executor.perform(WakeUp(BOTH)),
            lambda: executor.perform(UpdateWeights(opened.other)),
            lambda: opened.stage(NORM),
            lambda: executor.perform(CommitWeights("t")),
            lambda: executor.perform(DropWeights("t")),
            lambda: executor.perform(SaveShardedState(tmp_path / "saved", 1)),
            lambda: executor.perform(CollectiveRpc("control_contract.describe", (), {})),
            lambda: executor.apply_model(id),
            lambda: executor.perform(ExecuteDummyBatch()),
            lambda: executor.perform(StartProfile(max_steps=1)),
            lambda: executor.perform(StopProfile(tmp_path / "trace.json")),
        ]
        for call in calls:
            with pytest.raises(DeviceLost):
                await call()

    async def test_a_cancelled_call_harms_nobody(self, opened: Controlled) -> None:
        expected = await opened.tokens()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await opened.executor.perform(Sleep(1))
        await opened.executor.perform(WakeUp(BOTH))
        assert await opened.tokens() == expected
