"""What an engine that is one of several leaves when it dies or gives its sequences back, and another takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from transport.relay import Relay, relaying
from transport.siege import VOCAB_SIZE, expected_tokens, joined, params_of, request
from transport.wire_samples import int32
from waiting import Tasks, turns, until

from aioengine import Engine, EngineConfig
from aioengine.core.executor_protocol import DeviceLost
from aioengine.core.listener import UNLIMITED, Endings, SampledLogprobs
from aioengine.core.observers import UserCode
from aioengine.core.protocol import InFlightSequence
from aioengine.errors import AioEngineError, EngineClosed, EngineDead, StepFailed
from aioengine.outputs.metrics import StepRecord
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.plan import RowSampling
from aioengine.scheduler.sequence import Request, Sequence, make_choices
from aioengine.testing import sample_hash
from aioengine.transport import wire
from aioengine.transport.client import Mirrors
from aioengine.transport.wire import to_fault
from doubles.fake_executor import FakeExecutor

PROMPT = [1, 2, 3]
SAMPLING: dict[str, Any] = {"seed": 5, "ignore_eos": True, "detokenize": False}


class Two:
    """Two engines over fake devices, and a front end of both."""

    def __init__(self, engine: Engine, relay: Relay, executors: list[FakeExecutor]) -> None:
        self.engine = engine
        self.relay = relay
        self.executors = executors

    async def ask(self, num_tokens: int, **sampling: Any) -> list[int]:
        output = await self.engine.generate(PROMPT, max_tokens=num_tokens, **{**SAMPLING, **sampling})
        return output.outputs[0].token_ids


@asynccontextmanager
async def two_engines(**config: Any) -> AsyncIterator[Two]:
    executors = [FakeExecutor(num_blocks=512, max_model_len=2048, vocab_size=VOCAB_SIZE) for _ in range(2)]
    given = EngineConfig(**{"log_stats_interval_s": 0.0, "heartbeat_interval_s": 0.05, **config})
    async with relaying(given, executors=executors) as (engine, relay):
        yield Two(engine, relay, executors)


pytestmark = pytest.mark.usefixtures("quiet_log")


class TestAnEngineThatIsOneOfSeveral:
    @pytest.mark.parametrize("how", ["it is lost", "it is closed"])
    async def test_leaves_what_it_had_to_the_next(self, how: str) -> None:
        async with two_engines() as two, Tasks() as tasks:
            asked = [tasks.start(two.ask(200, seed=seed)) for seed in range(3)]
            await until(lambda: two.relay.num_tokens > 100)
            if how == "it is lost":
                two.executors[0].make_step_fail(len(two.executors[0].plans), DeviceLost("gone"))
            else:
                two.relay.served[0].task.cancel()
            outputs = await tasks.end(*asked)
            assert outputs == [expected_tokens(PROMPT, 200, seed=seed) for seed in range(3)]
            assert two.relay.num_moved == 3
            assert two.relay.num_tokens == 600
            assert isinstance(two.relay.dead[0].death, EngineDead)

    async def test_ends_a_request_whose_own_step_has_failed(self) -> None:
        async with two_engines() as two, Tasks() as tasks:
            asked = tasks.start(two.ask(200))
            await until(lambda: two.relay.num_tokens > 10)
            two.executors[0].make_step_fail(len(two.executors[0].plans), RuntimeError("broken"))
            (error,) = await tasks.end(asked)
            assert isinstance(error, StepFailed)
            assert two.relay.num_moved == 0

    async def test_keeps_nothing_that_the_others_share_from_going_on(self) -> None:
        async with two_engines() as two, Tasks() as tasks:
            is_so = False
            condition = two.relay.cores[0].when(lambda: is_so)
            asked = tasks.start(two.ask(100))
            await until(lambda: two.relay.num_tokens > 10)
            two.relay.cores[0].die(EngineDead("cut"))
            await tasks.end(asked)
            assert not condition.done()
            assert not two.relay.user_code._is_keeping
            is_so = True
            two.relay.cores[0].recheck()
            await condition

    async def test_ends_all_when_it_is_closed_here(self) -> None:
        async with two_engines() as two, Tasks() as tasks:
            asked = tasks.start(two.ask(2000))
            await until(lambda: two.relay.num_tokens > 10)
            await two.engine.aclose()
            (error,) = await tasks.end(asked)
            assert isinstance(error, EngineClosed)
            assert two.relay.num_moved == 0

    async def test_is_asked_for_no_more_than_its_reader_takes(self) -> None:
        """What waits for its reader alone takes no place among those that wait, on either side."""
        async with two_engines(max_waiting=2) as two, Tasks() as tasks:
            streams = [two.engine.stream(PROMPT, max_unread_tokens=4, max_tokens=50, **SAMPLING) for _ in range(5)]
            for stream in streams:
                await stream.__aenter__()
            await until(lambda: all(len(stream.result.outputs[0].token_ids) >= 4 for stream in streams))
            two.relay.cut()
            assert two.relay.num_moved == 5
            assert two.relay.cores[0].num_unstarted == 0
            assert await two.ask(20) == expected_tokens(PROMPT, 20, seed=5), "a new one is admitted"
            (session,) = two.relay.served[1].server.sessions.values()
            assert session.num_unstarted == 0
            for output in await tasks.end(*(tasks.start(stream.finish()) for stream in streams)):
                assert output.outputs[0].token_ids == expected_tokens(PROMPT, 50, seed=5)
            for stream in streams:
                await stream.__aexit__(None, None, None)

    async def test_takes_more_than_may_wait_from_another(self) -> None:
        async with two_engines(max_waiting=4, max_num_seqs=2) as two, Tasks() as tasks:
            asked = [tasks.start(two.ask(30, seed=seed)) for seed in range(6)]
            await until(lambda: two.relay.num_tokens > 6 and len(two.relay.cores[0]._mirrors.live) == 6)
            for _ in range(4):
                two.relay.cut()
                await turns(20)
            # Not before: a cluster sends none to an engine where so many wait, and the relay does not look at that.
            await until(lambda: not two.relay.cores[0].num_unstarted)
            others = [tasks.start(two.ask(30, seed=seed)) for seed in range(6, 12)]
            outputs = await tasks.end(*asked, *others)
            assert outputs == [expected_tokens(PROMPT, 30, seed=seed) for seed in range(12)]

    async def test_counts_a_first_token_once(self) -> None:
        async with two_engines() as two:
            records: list[StepRecord] = []
            two.relay.on_record = records.append
            two.relay.reset(10, 20)
            output = await two.engine.generate(PROMPT, max_tokens=30, **SAMPLING)
            assert output.outputs[0].token_ids == expected_tokens(PROMPT, 30, seed=5)
            await until(lambda: sum(len(record.inter_token_latencies_s) for record in records) >= 29)
            assert sum(len(record.times_to_first_token_s) for record in records) == 1
            assert sum(record.num_prompt_tokens for record in records) == len(PROMPT)
            assert output.metrics.num_cached_tokens == 0


def ids_of(*token_ids: int) -> bytes:
    return int32(*token_ids).tobytes()


def expected_of_choice(choice: int, count: int, *, seed: int) -> list[int]:
    ids, sampling = list(PROMPT), RowSampling(seed=seed, choice=choice)
    for _ in range(count):
        ids.append(sample_hash(ids, sampling, vocab_size=VOCAB_SIZE))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("scheme", ["ipc"])
class TestAnEngineThatIsToGoOn:
    """What a front end may ask, and what comes of it; what it may not is in test_hostile."""

    async def test_samples_what_comes_next(self, address: str) -> None:
        async with joined(address) as (_, peer):
            due = expected_tokens(PROMPT, 20, seed=5)
            peer.say(request(0, seed=5, choice=0, output=ids_of(*due[:7]), is_moved=True))
            await peer.read_until(lambda: peer.ended)
            assert peer.tokens[0] == due[7:]
            assert peer.ended == {0: "length"}
            outputs = [body for body in peer.news if isinstance(body, wire.StepOutputsMessage)]
            assert [body.started for body in outputs if body.started] == [[wire.Started(0, 0)]]
            assert not any(body.first for body in outputs), "its first token was another engine's"

    async def test_goes_on_with_one_choice_alone(self, address: str) -> None:
        async with joined(address) as (_, peer):
            for choice in range(3):
                due = expected_of_choice(choice, 20, seed=5)
                for length in (0, 1, 12):
                    number, output = 20 * choice + length, ids_of(*due[:length])
                    params = params_of(n=3, temperature=1.0)
                    peer.say(request(number, seed=5, params=params, choice=choice, output=output))
                    await peer.read_until(lambda number=number: number in peer.ended)  # type: ignore[misc]
                    assert peer.tokens[number] == due[length:]

    async def test_ends_what_had_come_to_its_end(self, address: str) -> None:
        async with joined(address) as (_, peer):
            peer.say(request(0, choice=0, output=ids_of(*range(20))))
            peer.say(request(1, choice=0, output=ids_of(7, 8), params=params_of(stop_token_ids=(8,))))
            peer.say(request(2, choice=0, output=ids_of(8, 7), params=params_of(stop_token_ids=(8,)), max_tokens=3))
            await peer.read_until(lambda: len(peer.ended) == 3)
            assert peer.ended == {0: "length", 1: "stop", 2: "length"}
            assert [*peer.tokens] == [2]
            assert len(peer.tokens[2]) == 1
            ends = [ended for body in peer.news if isinstance(body, wire.StepOutputsMessage) for ended in body.ended]
            assert wire.Ended(1, "stop", 8, 0) in ends

    async def test_waits_for_a_reader_that_is_behind(self, address: str) -> None:
        async with joined(address) as (siege, peer):
            due = expected_tokens(PROMPT, 20, seed=5)
            peer.say(request(0, seed=5, choice=0, output=ids_of(*due[:7]), num_allowed=7))
            await peer.is_served(1)
            assert siege.session.num_unstarted == 0
            assert 0 not in peer.tokens
            peer.say(wire.Allow(0, 9))
            await peer.read_until(lambda: len(peer.tokens.get(0, ())) >= 2)
            peer.say(wire.Allow(0, -1))
            await peer.read_until(lambda: 0 in peer.ended)
            assert peer.tokens[0] == due[7:]

    async def test_takes_it_though_enough_are_waiting(self, address: str) -> None:
        async with joined(address, max_waiting=2, max_num_seqs=1) as (_, peer):
            for number in range(6):
                peer.say(request(number, is_moved=number >= 2))
            await peer.read_until(lambda: len(peer.ended) == 6)
            assert set(peer.ended.values()) == {"length"}


class Heard:
    """A listener that notes what it hears."""

    num_allowed = UNLIMITED

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ends: list[AioEngineError | None] = []

    def on_started(self) -> None:
        pass

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        self.token_ids.append(token_id)

    def on_prompt_logprobs(self, position: int, logprobs: list[SampledLogprobs]) -> None:
        assert not self.token_ids, "a sequence with a token is not asked again for these"

    def on_end(self) -> None:
        self.ends.append(None)

    def on_error(self, error: AioEngineError) -> None:
        self.ends.append(error)


class TestMirrors:
    """What is let go of, and as what."""

    def make(self) -> tuple[Mirrors, Endings]:
        endings = Endings(UserCode(), lambda: None)
        return Mirrors(endings, lambda: None), endings

    def add(self, mirrors: Mirrors, n: int = 1) -> list[Sequence]:
        request = Request(
            request_id="r", prompt_token_ids=int32(1, 2), params=SamplingParams(n=n), seed=1, max_total_tokens=50
        )
        sequence = make_choices(request)
        choices = [sequence, *sequence.children]
        for choice in choices:
            mirrors.add_sequence(choice, Heard())
        return choices

    async def test_choices_without_a_token_go_together(self) -> None:
        mirrors, _ = self.make()
        first, *others = self.add(mirrors, 3)
        await mirrors.take_outputs(wire.StepOutputsMessage(started=[wire.Started(0, 0)]), 1.0)
        assert mirrors.release_all() == [InFlightSequence(first, was_running=True)]
        assert first.children == tuple(others)

    async def test_choices_go_each_for_itself_once_one_has_a_token(self) -> None:
        mirrors, _ = self.make()
        choices = self.add(mirrors, 3)
        await mirrors.take_outputs(
            wire.StepOutputsMessage(
                numbers=[0], token_ids=[9], started=[wire.Started(0, 0)], first=[wire.First(0, 0.5)]
            ),
            1.0,
        )
        assert mirrors.release_all() == [
            InFlightSequence(choices[0], True),
            InFlightSequence(choices[1], False),
            InFlightSequence(choices[2], False),
        ]
        assert not any(choice.children for choice in choices)

    def test_choices_go_each_for_itself_when_one_has_ended(self) -> None:
        mirrors, _ = self.make()
        choices = self.add(mirrors, 3)
        mirrors.end_sequence(choices[1], "abort")
        assert [each.sequence for each in mirrors.release_all()] == [choices[0], choices[2]]
        assert not choices[0].children

    async def test_tokens_that_are_handed_out_later_are_not(self) -> None:
        """An engine may die while its last message is taken in."""
        mirrors, _ = self.make()
        (sequence,) = self.add(mirrors)
        listener = sequence.listener
        body = wire.StepOutputsMessage(numbers=[0] * 100, token_ids=[*range(100)])
        async with Tasks() as tasks:
            taking = tasks.start(mirrors.take_outputs(body, 1.0))
            await until(lambda: listener.token_ids)
            in_flight = mirrors.release_all()
            await taking
        num_tokens = len(sequence.output_ids)
        assert 0 < num_tokens < 100
        assert in_flight == [InFlightSequence(sequence, False)]
        assert listener.token_ids == sequence.output_ids == list(range(num_tokens))

    async def test_what_had_its_last_token_has_ended(self) -> None:
        """Also where the engine dies before the end itself is taken in."""
        mirrors, endings = self.make()
        (sequence,) = self.add(mirrors)
        listener = sequence.listener
        body = wire.StepOutputsMessage(numbers=[0], token_ids=[9], ended=[wire.Ended(0, "stop", 9, 0)])
        await mirrors.take_outputs(body, 1.0)
        assert mirrors.release_all() == []
        await endings.report_all()
        assert listener.ends == [None]
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", 9)

    def test_a_death_ends_none_and_other_errors_do(self) -> None:
        mirrors, _ = self.make()
        self.add(mirrors)
        (other,) = self.add(mirrors)
        dead, failed = wire.Failed(0, to_fault(EngineDead("lost"))), wire.Failed(1, to_fault(StepFailed("broken")))
        death = mirrors.take_ends(wire.StepOutputsMessage(failed=[dead, failed]))
        assert str(death) == "lost"
        assert [*mirrors.live] == [0]
        assert other.listener is None

    async def test_times_are_those_of_the_first_engine(self) -> None:
        mirrors, _ = self.make()
        (sequence,) = self.add(mirrors)
        started, ended = wire.Started(0, 16), wire.Ended(0, "length", None, num_preemptions=2)
        first = wire.StepOutputsMessage(numbers=[0], token_ids=[9], started=[started], first=[wire.First(0, 0.25)])
        await mirrors.take_outputs(first, 5.0)
        sequence.num_preemptions = 1
        mirrors.release_all()
        mirrors.add_sequence(sequence, Heard())
        again = wire.StepOutputsMessage(numbers=[1], token_ids=[8], started=[wire.Started(1, 0)])
        await mirrors.take_outputs(again, 7.0)
        mirrors.take_ends(wire.StepOutputsMessage(ended=[msgspec.structs.replace(ended, number=1)]))
        assert (sequence.admitted_at, sequence.first_token_at, sequence.last_token_at) == (4.75, 5.0, 7.0)
        assert (sequence.num_cached_tokens, sequence.num_preemptions, sequence.output_ids) == (16, 3, [9, 8])
