"""Whatever the user's own code raises, the engine goes on, the others hear, and closing closes everything."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from contract.ways import WAYS, Opener, error_of, has_load, reasons_of
from nightly import few
from waiting import until

from aioengine import Engine, EngineClosed

pytestmark = pytest.mark.usefixtures("quiet_log")

PROMPT = list(range(100, 140))
ENDS_THE_LOOP = (KeyboardInterrupt, SystemExit)
ERRORS = (ValueError, GeneratorExit, asyncio.CancelledError, *ENDS_THE_LOOP)
PLACES = ("on_step", "on_request", "watch")


class Bad:
    """An observer, and a watcher, that raises once, where it is told to, and counts its calls by their places."""

    def __init__(self, place: str = "", error: type[BaseException] = ValueError) -> None:
        self.place = place
        self.error = error
        self.is_due = False
        self.has_raised = False
        self.counts: Counter[str] = Counter()

    def called(self, place: str) -> None:
        self.counts[place] += 1
        if self.is_due and place == self.place and not self.has_raised:
            self.has_raised = True
            raise self.error("the user's own")

    def on_step(self, record: Any) -> None:
        self.called("on_step")

    def on_request(self, metrics: Any, reasons: Any) -> None:
        self.called("on_request")

    def watch(self) -> None:
        self.called("watch")


def run(main: Coroutine[Any, Any, Any], on_end: Callable[[], None] = lambda: None, *, is_uvloop: bool) -> list[Any]:
    """Run it to its end; → what has left the loop meanwhile."""
    heard: list[Any] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if is_uvloop else None) as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while not task.done():
            try:
                loop.run_until_complete(task)
            except ENDS_THE_LOOP as error:
                heard.append(type(error))
                on_end()
        task.result()
    return heard


@pytest.mark.parametrize("way", few(["in_process", "child"], of=WAYS))
@pytest.mark.parametrize("place", few(["on_step", "watch"], of=PLACES))
def test_an_engine_goes_on_whatever_it_raises(way: str, place: str) -> None:
    bads = [Bad(place, error) for error in ERRORS]
    count = Bad()

    async def main() -> None:
        opener = Opener(way)
        try:
            engine = await opener.open()
            for observer in (*bads, count):
                engine.add_observer(observer)
            for bad in bads:
                bad.is_due = True
                async with engine.stream(PROMPT, seed=1, max_tokens=9) as stream, engine.stream([7]) as other:
                    stream.watch(bad.watch)
                    other.watch(count.watch)
                    assert reasons_of(await stream.finish()) == ["length"]
                await asyncio.sleep(0)
                assert bad.has_raised
                assert engine.health().status == "ALIVE"
            assert count.counts["on_request"] == 2 * len(bads)
            assert count.counts["on_step"] >= 9
            assert count.counts["watch"] >= len(bads)
        finally:
            await opener.aclose()

    assert run(main(), is_uvloop=way == "child") == list(ENDS_THE_LOOP)


def closing_cases() -> Iterator[Any]:
    """All at night; on each change one error in process on asyncio, and one in a child on uvloop."""
    for way, is_uvloop, place, error in itertools.product(
        ("in_process", "child"), (False, True), ("on_request", "watch"), ERRORS
    ):
        is_often = is_uvloop == (way == "child") and error is (ValueError if way == "child" else KeyboardInterrupt)
        yield pytest.param(way, is_uvloop, place, error, marks=() if is_often else pytest.mark.nightly)


@pytest.mark.parametrize(("way", "is_uvloop", "place", "error"), list(closing_cases()))
def test_closing_closes_everything_before_it_goes_on(
    way: str, is_uvloop: bool, place: str, error: type[BaseException]
) -> None:
    bad, count = Bad(place, error), Bad()
    engines: list[Engine] = []

    async def main() -> None:
        engine = await Opener(way).open("make_slow")
        engines.append(engine)
        engine.add_observer(bad)
        engine.add_observer(count)
        async with (
            engine.stream(PROMPT, seed=1, max_tokens=3000) as first,
            engine.stream(PROMPT, seed=2, max_tokens=3000) as second,
        ):
            await until(has_load(engine, running=2))
            first.watch(bad.watch)
            while first.take() or second.take():
                pass
            second.watch(count.watch)
            num_news = count.counts["watch"]
            bad.is_due = True
            await engine.aclose()
            assert bad.has_raised
            assert count.counts["on_request"] == 2
            assert count.counts["watch"] > num_news
            for stream in (first, second):
                assert isinstance(await error_of(stream.finish()), EngineClosed)
        await engine.aclose()

    def on_end() -> None:
        assert not engines[0]._runtime.is_open

    assert run(main(), on_end, is_uvloop=is_uvloop) == ([error] if error in ENDS_THE_LOOP else [])


def test_a_whole_program_is_ended_by_it_with_everything_closed() -> None:
    """As `asyncio.run` ends one: the tasks are cancelled, and the engine closes in that."""
    engines: list[Engine] = []

    async def main() -> None:
        async with await Opener("in_process").open() as engine:
            engines.append(engine)
            bad = Bad("on_step", SystemExit)
            bad.is_due = True
            engine.add_observer(bad)
            await engine.generate(PROMPT, max_tokens=3000)
            pytest.fail("it went on")

    with pytest.raises(SystemExit, match="the user's own"):
        asyncio.run(main())
    assert not engines[0]._runtime.is_open
