"""Several choices of one prompt: computed once as far as they are alike, each its own after that, one request all the
while."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from engine.oracle import Witness, continuation, tokens_of

from aioengine import EngineOverloaded, InvalidRequest, RequestOutput, StepFailed
from aioengine.scheduler.plan import RowSampling

EOS = 0
PROMPT = list(range(10, 17))
BLOCK_SIZE = 4


def expected(prompt: list[int], n: int, count: int, *, seed: int) -> list[list[int]]:
    return [continuation(prompt, count, seed=seed, choice=choice) for choice in range(n)]


def is_beginning(ids: list[int], whole: list[int]) -> bool:
    return whole[: len(ids)] == ids


def let_choices_say(served: Any, prompt: list[int], texts: dict[int, list[int]]) -> None:
    """From now on each of these choices of a prompt brings the tokens given, as far as they go."""
    sampler = served.executor._sampler

    def sample(token_ids: list[int], sampling: RowSampling) -> int:
        ids = texts.get(sampling.choice, [])
        position = len(token_ids) - len(prompt)
        if token_ids[: len(prompt)] == prompt and position < len(ids):
            return ids[position]
        return sampler(token_ids, sampling)

    served.executor._sampler = sample


# What comes, and what it costs


@pytest.mark.virtual_clock
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_stream_interleaves_the_choices_and_ends_each_once(serve: Any, depth: int, temperature: float) -> None:
    async with serve(depth=depth, block_size=BLOCK_SIZE) as served:
        stream = served.engine.stream(PROMPT, n=3, seed=3, max_tokens=8, logprobs=0, temperature=temperature)
        async with stream:
            deltas = [delta async for delta in stream]
            result = stream.result

        for completion in result.outputs:
            mine = [delta for delta in deltas if delta.index == completion.index]
            assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
            assert "".join(delta.text for delta in mine) == completion.text
            assert [line for delta in mine for line in delta.logprobs] == completion.logprobs
            assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]
            assert len(mine) == 8, "a reader that keeps up gets each token by itself"
        assert {delta.index for delta in deltas[:3]} == {0, 1, 2}, "no choice waits for the end of another"


@pytest.mark.virtual_clock(seeds=1)
async def test_choices_have_logprobs_of_their_own_and_the_prompt_has_its_own_once(serve: Any, depth: int) -> None:
    async with serve(depth=depth, block_size=BLOCK_SIZE, config={"max_num_batched_tokens": 8, "max_num_seqs": 4}) as s:
        output = await s.engine.generate(PROMPT * 2, n=4, seed=3, max_tokens=5, logprobs=1, prompt_logprobs=2)
        for completion in output.outputs:
            assert [next(iter(line)) for line in completion.logprobs] == completion.token_ids
        assert [completion.index for completion in output.outputs] == list(range(4))
        assert [completion.finish_reason for completion in output.outputs] == ["length"] * 4
        assert (output.metrics.num_generation_tokens, output.metrics.num_preemptions) == (4 * 5, 0)
        assert s.executor.stats.num_computed_tokens == 14 + 4 * 5 - 4, "the prompt is computed once"
        assert output.prompt_logprobs[0] is None
        assert [next(iter(line)) for line in output.prompt_logprobs[1:]] == (PROMPT * 2)[1:]


# Whatever else is going on


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("circumstances", "sizes"),
    [
        ({"max_num_batched_tokens": 9, "max_num_seqs": 8}, {}),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 5}, {}),
        ({"max_num_seqs": 6}, {"num_blocks": 16, "max_model_len": 60}),
        ({"enable_prefix_caching": False, "max_num_seqs": 6}, {"num_blocks": 16, "max_model_len": 60}),
        ({"max_waiting": 5}, {}),
    ],
    ids=["small chunks", "few rows", "few blocks", "few blocks, uncached", "few places"],
)
async def test_each_choice_is_the_same_whatever_the_batch(
    serve: Any, depth: int, circumstances: dict[str, Any], sizes: dict[str, int]
) -> None:
    rng = random.Random(f"{asyncio.get_running_loop().seed} {depth}")
    wishes = [
        {"prompt": rng.choices(range(3, 9), k=rng.randrange(1, 30)), "n": rng.randrange(1, 6), "seed": seed}
        for seed in range(10)
    ]
    async with serve(depth=depth, block_size=BLOCK_SIZE, config=circumstances, **sizes) as served:
        outputs = await asyncio.gather(*(served.engine.generate(**wish, max_tokens=20) for wish in wishes))
        for wish, output in zip(wishes, outputs, strict=True):
            assert tokens_of(output) == expected(wish["prompt"], wish["n"], 20, seed=wish["seed"])
        num_preemptions = served.core.stats().preemptions
        assert num_preemptions > 3 or not sizes
        assert sum(output.metrics.num_preemptions for output in outputs) == num_preemptions


# How choices end


ENDS = {
    "eos": ([EOS], "", None),
    "a stop string": (" a fox. The end", " a fox.", " The end"),
    "a stop string in the first token": (" the", "", " the"),
}
"""What is said, what of it is text, and the reason."""


@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("which", [{0}, {1}, {0, 2}, {1, 2, 3}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("num_rows", [2, 8])
@pytest.mark.parametrize("end", ENDS)
async def test_choices_that_stop_let_the_others_be(
    serve: Any, depth: int, end: str, num_rows: int, which: set[int]
) -> None:
    said, text, stop = ENDS[end]
    async with serve(depth=depth, block_size=BLOCK_SIZE, config={"max_num_seqs": num_rows}) as served:
        ids = served.tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
        others = list(range(150, 159))
        let_choices_say(served, PROMPT, {choice: ids if choice in which else others for choice in range(4)})
        output = await served.engine.generate(PROMPT, n=4, seed=3, max_tokens=9, stop=stop)
        for choice, completion in enumerate(output.outputs):
            if choice in which:
                assert (completion.token_ids, completion.text, completion.finish_reason) == (ids, text, "stop")
                assert completion.stop_reason == stop
            else:
                assert (completion.token_ids, completion.finish_reason) == (others, "length")
                assert completion.stop_reason is None


# Capacity at the admission


@pytest.mark.virtual_clock(seeds=1)
async def test_a_family_takes_a_place_for_each_choice(serve: Any, tasks: Any, depth: int) -> None:
    config = {"max_waiting": 4, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    async with serve(depth=depth, is_manual=True, config=config) as served:

        def ask(n: int, **more: Any) -> Any:
            return tasks.start(served.engine.generate(PROMPT, n=n, seed=3, max_tokens=3, on_full="raise", **more))

        running = ask(1)
        await served.until(lambda: served.executor.plans)
        waiting = ask(3)
        await served.until(lambda: served.core.stats().waiting + served.core.stats().blocked == 3)
        [refused] = await tasks.end(ask(2))
        assert isinstance(refused, EngineOverloaded)
        single = ask(1)
        await served.turn()
        assert not single.done()
        greedy = served.engine.generate(PROMPT, n=4, temperature=0.0, on_full="raise")
        [refused] = await tasks.end(tasks.start(greedy))
        assert isinstance(refused, EngineOverloaded), "full"
        with pytest.raises(InvalidRequest, match="max_waiting"):
            await served.engine.generate(PROMPT, n=5)
        await served.rest_until_done([running, waiting, single])
        assert tokens_of(await waiting) == expected(PROMPT, 3, 3, seed=3)


@pytest.mark.virtual_clock(seeds=1)
async def test_greedy_choices_take_one_place(serve: Any, depth: int) -> None:
    async with serve(depth=depth, config={"max_waiting": 1}) as served:
        output = await served.engine.generate(PROMPT, n=50, temperature=0.0, max_tokens=2)
        assert len(output.outputs) == 50


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.virtual_clock
@pytest.mark.parametrize("goes", ["served", "aborted", "cancelled", "length", "eos", "step fails", "row fails"])
async def test_all_places_of_a_family_are_given_back(serve: Any, tasks: Any, depth: int, goes: str) -> None:
    """Also where its choices never had a row, with nothing else going on by which the admission could notice."""
    config = {"max_waiting": 4, "max_num_seqs": 1 if goes in ("served", "aborted", "cancelled") else 256}
    async with serve(depth=depth, config={**config, "max_num_batched_tokens": 256}) as served:
        if goes == "eos":
            let_choices_say(served, PROMPT, {choice: [EOS] for choice in range(4)})
        elif goes == "step fails":
            served.executor.make_step_fail(0, ArithmeticError("upside down"))
        elif goes == "row fails":
            served.executor.make_row_fail(0, 0, ArithmeticError("not a number"))
        max_tokens = 1 if goes == "length" else 20
        first = tasks.start(served.engine.generate(PROMPT, n=4, max_tokens=max_tokens, request_id="first"))
        await served.until(lambda: served.core.stats().running)
        second = tasks.start(served.engine.generate(PROMPT[::-1], n=4, max_tokens=2))
        await served.turn()
        if goes == "aborted":
            served.engine.abort("first")
        elif goes == "cancelled":
            first.cancel()
        assert [len(ids) for ids in tokens_of(await second)] == [2] * 4
        [outcome] = await tasks.end(first)
        expected = {"cancelled": asyncio.CancelledError, "step fails": StepFailed, "row fails": StepFailed}
        assert isinstance(outcome, expected.get(goes, RequestOutput))
        assert served.runtime.admission.num_free == 4


# Failures


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("num_rows", [2, 8])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
async def test_a_failed_step_fails_the_family_once_before_the_fork_and_after(
    serve: Any, tasks: Any, depth: int, step: int, num_rows: int
) -> None:
    """The prompt takes two steps here, so that the choices part in the second."""
    config = {"max_num_batched_tokens": 8, "max_num_seqs": num_rows}
    witness = Witness()
    async with serve(depth=depth, block_size=BLOCK_SIZE, config=config) as served:
        served.engine.add_observer(witness)
        served.executor.make_step_fail(step, ArithmeticError("upside down"))
        prompt = list(range(10, 22))
        async with served.engine.stream(prompt, n=4, seed=3, max_tokens=9) as stream:
            with pytest.raises(StepFailed, match="upside down"):
                await stream.finish()
            output = stream.result
        await served.rest()

        assert output.finished
        assert "error" in [completion.finish_reason for completion in output.outputs]
        for choice, ids in enumerate(tokens_of(output)):
            assert is_beginning(ids, continuation(prompt, 9, seed=3, choice=choice))
        assert witness.reasons == [("error",) * 4]
        again = await served.engine.generate(prompt, n=4, seed=3, max_tokens=9)
        assert tokens_of(again) == expected(prompt, 4, 9, seed=3)


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.virtual_clock(seeds=1)
@pytest.mark.parametrize("step", [0, 1, 2, 4])
@pytest.mark.parametrize("row", [0, 1])
async def test_a_failed_row_fails_its_request_alone_and_the_log_names_it(
    serve: Any, tasks: Any, depth: int, step: int, row: int, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    async with serve(depth=depth, block_size=BLOCK_SIZE, num_blocks=128) as served:
        served.engine.add_observer(witness)
        served.executor.make_row_fail(step, row, cause := ArithmeticError("not a number"))
        works = [
            served.engine.generate([40 + i] * 5, n=3, seed=i, max_tokens=9, request_id=f"request {i}") for i in range(2)
        ]
        outcomes = await tasks.end(*(tasks.start(work) for work in works))
        failed = [outcome for outcome in outcomes if isinstance(outcome, StepFailed)]
        if row == 0 or step > 0:
            [failure] = failed
            assert failure.__cause__ is cause
            assert sorted(witness.reasons) == [("error",) * 3, ("length",) * 3]
            assert f"request {outcomes.index(failure)}" in caplog.text
        for i, outcome in enumerate(outcomes):
            if not isinstance(outcome, StepFailed):
                assert tokens_of(outcome) == expected([40 + i] * 5, 3, 9, seed=i)
        assert sum(served.engine.stats().finished.values()) == 6


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.virtual_clock(seeds=1)
async def test_a_reader_gets_what_all_choices_had_brought_before_the_failure(serve: Any, depth: int) -> None:
    async with serve(depth=depth) as served:
        served.executor.make_row_fail(2 + depth, 1, ArithmeticError("not a number"))
        async with served.engine.stream(PROMPT, n=3, seed=3, max_tokens=9) as stream:
            await asyncio.sleep(5)
            deltas = [await anext(stream) for _ in range(3)]
            with pytest.raises(StepFailed):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert sorted(delta.index for delta in deltas) == [0, 1, 2]
        assert [delta.token_ids for delta in sorted(deltas, key=lambda delta: delta.index)] == tokens_of(stream.result)
        assert all(delta.finish_reason in (None, "abort") for delta in deltas)
