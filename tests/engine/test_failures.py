"""What breaks, whom it hits, and who goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aioengine import EngineClosed, EngineDead, InternalError, StepFailed
from aioengine.core import in_process
from aioengine.core.executor_protocol import DeviceLost

pytestmark = pytest.mark.usefixtures("quiet_log")

SECRET_IDS = [1234, 1567, 1890] * 6


def upside_down() -> Exception:
    return ArithmeticError("the matrix is upside down")


def num_alive_blocks(served: Any) -> int:
    stats = served.core.stats()
    return stats.num_blocks - stats.free_blocks


# A step


@pytest.mark.virtual_clock
@pytest.mark.parametrize("depth", [2, 4], ids=lambda depth: f"depth{depth}", indirect=True)
async def test_steps_in_flight_that_depend_on_a_failed_one_bring_nothing_and_others_are_kept(
    serve: Any, tasks: Any, depth: int
) -> None:
    """Step 0 prefills one; a second arrives for step 1 or later, which is in flight when step 0 fails."""
    async with serve(depth=depth, is_manual=True) as served:
        served.executor.make_step_fail(1, upside_down())
        first = tasks.start(served.engine.generate([10] * 20, seed=1, max_tokens=9))
        await served.until(lambda: len(served.executor.unfinished) == depth)
        second = tasks.start(served.engine.generate([11] * 20, seed=2, max_tokens=9))
        await served.turn()
        served.executor.complete()  # step 0, the prefill; the second one joins at the next launch
        await served.until(lambda: served.has_run(2))
        assert served.seeds_of_plans()[1] == {1}
        assert served.seeds_of_plans()[-1] == {1, 2}
        assert len(served.executor.unfinished) == depth
        served.executor.complete()  # step 1 fails while the step with both is in flight
        [failure] = await tasks.end(first)
        await served.rest()

        assert isinstance(failure, StepFailed)
        assert len((await second).outputs[0].token_ids) == 9
        assert num_alive_blocks(served) == 0


@pytest.mark.virtual_clock
async def test_a_failure_leaves_a_report_without_prompts(serve: Any, tasks: Any, depth: int, tmp_path: Path) -> None:
    async with serve(depth=depth, config={"dump_dir": str(tmp_path / "reports"), "max_num_seqs": 17}) as served:
        text = " ".join(["xylophone"] * 8)
        served.executor.make_step_fail(1, upside_down())
        outcomes = await asyncio.gather(
            served.engine.generate(SECRET_IDS, max_tokens=4, logprobs=3),
            served.engine.generate(text, max_tokens=4),
            return_exceptions=True,
        )
        prompt_ids = {*SECRET_IDS, *served.tokenizer.encode(text)}
    outcome = next(outcome for outcome in outcomes if isinstance(outcome, StepFailed))
    [file] = tmp_path.glob("reports/*")  # noqa: ASYNC240

    assert file.read_text() == outcome.dump
    report = json.loads(outcome.dump)
    assert "upside down" in report["error"][-1]
    assert report["plan"]["step"] == 1
    assert report["plan"]["rows"]
    assert report["stats"]["num_blocks"] == 64
    assert report["config"]["max_num_seqs"] == 17
    assert "xylophone" not in outcome.dump
    assert (prompt_ids - set(range(100))).isdisjoint(numbers_of(report))
    assert "\n" in outcome.dump, "for a person to read"


def numbers_of(value: Any) -> set[float]:
    if isinstance(value, dict):
        return numbers_of(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(numbers_of, value))
    return {value} if isinstance(value, int | float) else set()


async def test_a_report_that_takes_long_to_write_holds_nobody_up_and_is_waited_for_at_the_close(
    serve: Any, tasks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = threading.Event()
    write = in_process.write_dump

    def gated(*args: Any) -> Path:
        assert gate.wait(30)
        return write(*args)

    monkeypatch.setattr(in_process, "write_dump", gated)
    async with serve(config={"dump_dir": str(tmp_path)}) as served:
        served.executor.make_step_fail(0, upside_down())
        with pytest.raises(StepFailed):
            await served.engine.generate([10] * 5, max_tokens=4)
        assert (await served.engine.generate([10] * 5, max_tokens=4)).finished
        assert (await served.engine.generate("fox " * 50, max_tokens=4)).finished
        closing = tasks.start(served.engine.aclose())
        for _ in range(100):
            await served.turn()
        assert not closing.done()
        gate.set()
        await closing
    assert len(list(tmp_path.glob("*.json"))) == 1  # noqa: ASYNC240


@pytest.mark.virtual_clock
@pytest.mark.parametrize("is_device", [False, True], ids=["step", "device"])
async def test_a_failure_is_one_line_of_the_log_and_its_report_is_at_debug(
    serve: Any, caplog: pytest.LogCaptureFixture, is_device: bool
) -> None:
    cause = ArithmeticError("the matrix\nis upside down")
    async with serve() as served:
        served.executor.make_step_fail(0, DeviceLost("lost") if is_device else cause)
        with caplog.at_level(logging.DEBUG, "aioengine"), pytest.raises((StepFailed, EngineDead)) as raised:
            await served.engine.generate([10] * 5, max_tokens=4)
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "\n" not in line
    assert ("lost" if is_device else "the matrix is upside down; requests: [") in line
    assert "the error's .dump" in line
    assert "dump_dir" in line
    assert raised.value.dump in [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]


@pytest.mark.virtual_clock
async def test_a_dump_folder_that_cannot_be_written_hides_nothing(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with serve(config={"dump_dir": str(tmp_path / "file")}) as served:
        served.executor.make_step_fail(0, upside_down())
        with pytest.raises(StepFailed, match="upside down"):
            await served.engine.generate([10] * 5, max_tokens=4)
        assert len((await served.engine.generate([10] * 5, max_tokens=4)).outputs[0].token_ids) == 4


# The device


@pytest.mark.virtual_clock
@pytest.mark.parametrize("end", [EngineDead, EngineClosed])
async def test_a_reader_gets_what_had_arrived_before_the_end_first(
    serve: Any, depth: int, end: type[Exception]
) -> None:
    async with serve(depth=depth) as served:
        if end is EngineDead:
            served.executor.make_step_fail(4, DeviceLost("lost"))
        async with served.engine.stream([10] * 20, max_tokens=50) as stream:
            await asyncio.sleep(0.045)
            if end is EngineClosed:
                await served.engine.aclose()
            await asyncio.sleep(5)
            delta = await anext(stream)
            assert (len(delta.token_ids), delta.finish_reason) == (4, None)
            with pytest.raises(end):
                await anext(stream)
            assert stream.result.outputs[0].token_ids == delta.token_ids


# Bugs of ours


BROKEN_PLACES = [
    *(
        f"scheduler.{name}"
        for name in ("schedule_step", "apply_result", "fail_step", "finish_sequence", "stats", "sequences")
    ),
    "kv.admit_sequence",
    "executor.launch",
    "_publish_slice",
]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("place", BROKEN_PLACES)
async def test_a_bug_is_a_dead_engine_that_all_hear_of(serve: Any, tasks: Any, depth: int, place: str) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a row has two tenants")

    async with serve(depth=depth, config={"max_num_seqs": 2, "max_waiting": 2}) as served:
        started = [tasks.start(served.engine.generate([10 + i] * 20, seed=i, max_tokens=90)) for i in range(6)]
        *owners, name = place.split(".")
        if name != "admit_sequence":  # one that is being admitted is in no place of the scheduler's
            await served.until(lambda: len(served.executor.plans) > 3)
        setattr(getattr(served.core, owners[0]) if owners else served.core, name, broken)
        if name == "fail_step":
            served.executor.make_step_fail(len(served.executor.plans), upside_down())
        elif name in ("finish_sequence", "stats", "sequences"):
            served.executor.make_step_fail(len(served.executor.plans), DeviceLost("lost"))
        outcomes = await tasks.end(*started)
        assert [type(outcome) for outcome in outcomes] == [EngineDead] * 6
        with pytest.raises(EngineDead):
            await served.engine.generate([5])
        await served.engine.aclose()
        assert served.executor.is_closed


@pytest.mark.virtual_clock
async def test_a_bug_in_one_listener_is_a_dead_engine_that_all_hear_of(serve: Any, tasks: Any, depth: int) -> None:
    class Broken:
        def on_token(self, *_: Any) -> None:
            raise AssertionError("a bug")

        on_error = on_end = on_token

    async with serve(depth=depth, num_blocks=128) as served:
        started = [tasks.start(served.engine.generate([10 + i] * 5, max_tokens=3)) for i in range(70)]
        await served.until(lambda: served.core.stats().running == 70)
        served.core.scheduler.sequences()[40].listener = Broken()
        await served.until(lambda: not served.runtime.is_open)
        outcomes = await tasks.end(*started)
        assert sum(isinstance(outcome, EngineDead) for outcome in outcomes) == 70, "the one whose listener broke, too"
        [death] = {str(outcome) for outcome in outcomes if isinstance(outcome, EngineDead)}
        assert "a bug" in death


# Things that hang


@pytest.mark.virtual_clock(seeds=1)
async def test_a_scheduler_that_makes_no_step_of_its_work_is_noticed(
    serve: Any, tasks: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        schedule = served.core.scheduler.schedule_step
        monkeypatch.setattr(served.core.scheduler, "schedule_step", lambda now: None)
        stuck = [tasks.start(served.engine.generate(SECRET_IDS, max_tokens=3, seed=seed)) for seed in range(2)]
        await served.until(lambda: len(served.core.scheduler.waiting) == 2)
        await asyncio.sleep(1)
        assert served.engine.health().status == "ALIVE"
        await asyncio.sleep(2)
        health = served.engine.health()
        assert health.status == "STALLED"
        assert health.reason.startswith("2 sequences could run, and no step was launched for 3.")
        assert health.idle_age_s > 3
        [logged] = [record.getMessage() for record in caplog.records if "makes no step" in record.getMessage()]
        assert f"tokens={len(SECRET_IDS)}+0" in logged, "what it has to schedule"
        assert str(SECRET_IDS[0]) not in logged
        monkeypatch.setattr(served.core.scheduler, "schedule_step", schedule)
        await served.engine.generate([1, 2], max_tokens=1)
        assert served.engine.health().status == "ALIVE"
        await tasks.end(*stuck)


@pytest.mark.virtual_clock(seeds=1)
async def test_an_engine_that_is_paused_or_waits_for_readers_is_not_stuck(serve: Any, tasks: Any) -> None:
    async with (
        serve() as served,
        served.engine.stream([5] * 9, max_tokens=50, ignore_eos=True, max_unread_tokens=1),
    ):
        await asyncio.sleep(9)
        assert served.engine.health().status == "ALIVE"
        await served.engine.pause(mode="keep")
        held = tasks.start(served.engine.generate([6] * 9, max_tokens=3))
        await asyncio.sleep(9)
        assert served.engine.health().status == "ALIVE"
        await served.engine.resume()
        await held


async def test_a_step_that_hangs_does_not_keep_an_engine_from_closing(serve: Any, tasks: Any, depth: int) -> None:
    async with serve(depth=depth, is_manual=True) as served:
        started = [tasks.start(served.engine.generate([10 + i] * 20, max_tokens=5)) for i in range(3)]
        await served.until(lambda: served.executor.plans)
        await served.engine.aclose()
        assert all(isinstance(outcome, EngineClosed) for outcome in await tasks.end(*started))
        assert served.executor.is_closed


@pytest.mark.virtual_clock
async def test_nobody_waits_for_ever_where_ending_everyone_is_what_broke(
    serve: Any, tasks: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise NameError("ending broke")

    with pytest.raises(InternalError, match="ending broke"):  # noqa: PT012 - closing says so
        async with serve(depth=depth, is_manual=True) as served:
            started = [tasks.start(served.engine.generate([1, 2, 3], max_tokens=9, seed=seed)) for seed in range(3)]
            await served.until(lambda: served.core.stats().running)
            monkeypatch.setattr(served.core, "_end_all", broken)
            monkeypatch.setattr(served.core.scheduler, "apply_result", broken)
            served.complete_all()
            outcomes = await tasks.end(*started)
            assert {type(outcome) for outcome in outcomes} == {EngineDead}


@pytest.mark.virtual_clock(seeds=1)
async def test_a_request_that_gets_its_turn_after_a_broken_end_hears_of_that(
    serve: Any, tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise NameError("ending broke")

    turn = asyncio.Event()
    async with serve(config={"max_num_seqs": 1, "max_waiting": 1}, is_manual=True) as served:
        started = [tasks.start(served.engine.generate([1, 2, 3], max_tokens=9)) for _ in range(2)]
        await served.until(lambda: served.core.num_unstarted == 1 and served.core.stats().running)
        monkeypatch.setattr(served.runtime, "turns", SimpleNamespace(is_busy=True, take=turn.wait))
        late = tasks.start(served.engine.generate([1, 2, 3], max_tokens=9))
        await served.turn()
        monkeypatch.setattr(served.core.scheduler, "sequences", broken)
        await served.engine.aclose()
        turn.set()
        with anyio.fail_after(60):
            outcomes = await tasks.end(*started, late)
        assert {type(outcome) for outcome in outcomes} == {EngineClosed}
