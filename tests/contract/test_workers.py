"""What is asked of the device's side: its functions, its weights, its recordings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import fakes
from contract.ways import BOTH_LOOPS, described, error_of, ids_of, reasons_of, same_error

from aioengine import Engine, InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 149))


async def say(engine: Engine) -> Any:
    """What the weights of now make of a prompt."""
    output = await engine.generate(PROMPT, seed=1, max_tokens=12)
    assert reasons_of(output) == ["length"]
    return ids_of(output)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Functions


@BOTH_LOOPS
async def test_a_registered_function_is_called_with_plain_data(engine: Engine) -> None:
    args = [1, -2.5, "three 🦊", None, True, b"bytes", [1, [2]], {"key": {"in": 1}}, 2**63]
    [said] = await engine.collective_rpc("contract.echo", args, {"named": [1, 2], "empty": {}})
    assert said == {"args": args, "kwargs": {"named": [1, 2], "empty": {}}, "rank": 0, "world_size": 1}
    assert await engine.collective_rpc("contract.fail_row_of_next_step", (63, "of nobody")) == [None]


async def test_an_unknown_function_is_refused_and_the_near_ones_named(engine: Engine, reference: Engine) -> None:
    for name in ("contract.ecko", "os.system", ""):
        kind, _, param = await same_error(engine, reference, lambda each, name=name: each.collective_rpc(name))  # type: ignore[misc]
        assert (kind, param) == (InvalidRequest, "name")
    assert "contract.echo" in str(await error_of(engine.collective_rpc("contract.ecko")))
    await same_error(engine, reference, lambda each: each.collective_rpc(print))  # type: ignore[arg-type]


@BOTH_LOOPS
@pytest.mark.parametrize("kind", [kind for kind in fakes.ERRORS if kind != "OwnError"])
async def test_what_a_function_raises_comes_out_as_it_is(engine: Engine, reference: Engine, kind: str) -> None:
    told_kind, *_ = await same_error(
        engine, reference, lambda each: each.collective_rpc("contract.fail", (kind, "what went wrong"))
    )
    assert told_kind is fakes.ERRORS[kind]


async def test_an_error_of_a_type_of_its_own_comes_out_as_a_runtime_error_that_names_it(
    engine: Engine, way: str
) -> None:
    error = await error_of(engine.collective_rpc("contract.fail", ["OwnError", "what went wrong"]))
    if way == "in_process":
        assert type(error) is fakes.OwnError
    else:
        assert type(error) is RuntimeError
        assert "OwnError" in str(error)
    assert "what went wrong" in str(error)


async def test_bad_arguments_of_a_function_are_its_callers_error(engine: Engine, reference: Engine) -> None:
    kind, *_ = await same_error(engine, reference, lambda each: each.collective_rpc("contract.sampled", [1, 2, 3]))
    assert kind is TypeError


@pytest.mark.parametrize(
    "bad", [object(), lambda: None, {1, 2}.__iter__(), 2**70], ids=["object", "function", "iterator", "huge"]
)
async def test_what_is_no_plain_data_does_not_travel_and_fails_its_caller_alone(
    engine: Engine, way: str, bad: Any
) -> None:
    other = asyncio.gather(*(engine.generate(PROMPT, seed=seed, max_tokens=9) for seed in range(3)))
    if way == "in_process":
        assert (await engine.collective_rpc("contract.echo", [bad]))[0]["args"] == [bad]
    else:
        for arguments in ({"args": [bad]}, {"kwargs": {"deep": [[bad]]}}):
            with pytest.raises(InvalidRequest, match="plain data"):
                await engine.collective_rpc("contract.echo", **arguments)
    assert [reasons_of(output) for output in await other] == [["length"]] * 3


async def test_a_result_that_is_no_plain_data_does_not_travel_and_fails_its_caller_alone(
    engine: Engine, way: str
) -> None:
    if way == "in_process":
        [returned] = await engine.collective_rpc("contract.return_function")
        assert callable(returned)
    else:
        with pytest.raises(InvalidRequest, match="plain data"):
            await engine.collective_rpc("contract.return_function")
    assert await engine.is_sleeping() is False


async def test_a_function_itself_works_in_process_and_is_refused_elsewhere(engine: Engine, way: str) -> None:
    if way == "in_process":
        assert await engine.apply_model(lambda model: type(model).__name__) == ["Device"]
    else:
        with pytest.raises(InvalidRequest, match="collective_rpc"):
            await engine.apply_model(lambda model: type(model).__name__)


async def test_a_dummy_batch_is_nobodys(engine: Engine) -> None:
    await engine.execute_dummy_batch()
    assert (await engine.collective_rpc("contract.calls"))[0][-1] == "execute_dummy_batch"
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


# Weights


async def test_weights_are_saved_and_taken_again(make_engine: Any, make_local: Any, tmp_path: Path) -> None:
    heard = []
    for name, engine in (("here", await make_engine()), ("there", await make_local())):
        folder = tmp_path / name
        said = [await say(engine)]
        await engine.update_weights(tensors={"model.norm.weight": np.ones(4, np.float32)})
        said.append(await say(engine))
        files = await engine.save_sharded_state(str(folder))
        assert files
        assert set(files) <= names_in(folder)
        await engine.update_weights(tensors={"model.norm.weight": np.zeros(4, np.float16)})
        said.append(await say(engine))
        await engine.update_weights(folder)
        said.append(await say(engine))
        heard.append((said, files))
    assert heard[0] == heard[1]
    first, changed, again, saved = heard[0][0]
    assert len({str(first), str(changed), str(again)}) == 3
    assert saved == changed


async def test_new_weights_see_no_old_prefix_and_what_runs_goes_on(make_engine: Any) -> None:
    engine = await make_engine()
    await say(engine)
    async with engine.stream(PROMPT, seed=2, max_tokens=40, max_unread_tokens=2) as stream:
        await anext(stream)
        await engine.update_weights(tensors={"model.norm.weight": np.full(4, 3, np.float32)})
        output = await stream.finish()
    assert reasons_of(output) == ["length"]
    assert len(output.outputs[0].token_ids) == 40
    await engine.reset_prefix_cache()
    anew = await engine.generate(PROMPT, seed=1, max_tokens=12, cache_salt="anew")
    assert await say(engine) == ids_of(anew)


BAD_TENSORS: dict[str, Any] = {
    "no such name": {"model.nrom.weight": np.ones(4, np.float32)},
    "another shape": {"model.norm.weight": np.ones((4, 1), np.float32)},
    "another dtype": {"model.norm.weight": np.ones(4, np.int64)},
    "no tensor": {"model.norm.weight": [1.0] * 4},
    "no name": {7: np.ones(4, np.float32)},
    "none at all": {},
    "one good, one bad": {"model.norm.weight": np.ones(4, np.float32), "nothing": np.ones(1, np.float32)},
}


@pytest.mark.parametrize("bad", BAD_TENSORS)
async def test_a_bad_tensor_fails_its_caller_alone_and_changes_nothing(
    engine: Engine, reference: Engine, bad: str
) -> None:
    before = await say(engine)
    other = asyncio.gather(*(engine.generate(PROMPT, seed=seed, max_tokens=9) for seed in range(3)))
    kind, *_ = await same_error(engine, reference, lambda each: each.update_weights(tensors=BAD_TENSORS[bad]))
    assert kind is InvalidRequest
    assert [reasons_of(output) for output in await other] == [["length"]] * 3
    assert await say(engine) == before


async def test_tensors_of_many_pieces_arrive_whole(
    make_engine: Any, make_local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message takes so many bytes at most; the numbers tell the pieces apart."""
    monkeypatch.setattr("aioengine.engine.PIECE_BYTES", 1000)
    tensor = {"model.embed_tokens.weight": np.arange(2048 * 4, dtype=np.float32).reshape(2048, 4)}
    strided = {"model.embed_tokens.weight": np.asfortranarray(tensor["model.embed_tokens.weight"])}
    said = []
    for engine, tensors in ((await make_engine(), tensor), (await make_local(), strided)):
        await engine.update_weights(tensors=tensors)
        said.append(await say(engine))
        monkeypatch.undo()  # the other one gets it whole
    assert said[0] == said[1]


async def test_a_folder_that_is_none_fails_its_caller_alone(engine: Engine, reference: Engine, tmp_path: Path) -> None:
    before = await say(engine)
    for work in (
        lambda each: each.update_weights(tmp_path / "nowhere"),
        lambda each: each.save_sharded_state(tmp_path / "nowhere" / "deep" / "deeper"),
        lambda each: each.save_sharded_state(tmp_path, max_shard_bytes="no size"),
        lambda each: each.save_sharded_state(7),
        lambda each: each.update_weights(),
        lambda each: each.update_weights(tmp_path, tensors={"a": np.ones(1)}),
        lambda each: each.update_weights(""),
    ):
        await same_error(engine, reference, work)
    assert await say(engine) == before


async def test_weights_that_came_as_tensors_cannot_be_slept_away(make_engine: Any, make_local: Any) -> None:
    errors = []
    for engine in (await make_engine(), await make_local()):
        await engine.update_weights(tensors={"model.norm.weight": np.ones(4, np.float32)})
        said = await say(engine)
        errors.append(described(await error_of(engine.sleep(2))))
        assert not await engine.is_sleeping()
        await engine.sleep(1)
        await engine.wake_up()
        assert await say(engine) == said
    assert errors[0] == errors[1]
    assert errors[0][0] is InvalidRequest


# Recordings


def steps_of(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


@BOTH_LOOPS
async def test_a_recording_is_written_to_its_file(engine: Engine, tmp_path: Path) -> None:
    async with engine.profile(tmp_path / "block.json"):
        await engine.generate(PROMPT, max_tokens=5)
    assert len(steps_of(tmp_path / "block.json")) >= 5
    await engine.start_profile(max_steps=2)
    await engine.generate(PROMPT, max_tokens=5)
    await engine.stop_profile(str(tmp_path / "calls.json"))
    assert len(steps_of(tmp_path / "calls.json")) == 2


async def test_a_recording_that_cannot_be_says_why(engine: Engine, reference: Engine, tmp_path: Path) -> None:
    async def errors_of(each: Engine) -> list[Any]:
        errors = [await error_of(each.stop_profile(tmp_path / "none.json"))]
        await each.start_profile()
        errors.append(await error_of(each.start_profile()))
        errors.append(await error_of(each.stop_profile(tmp_path / "nowhere" / "file.json")))
        errors += [await error_of(each.start_profile(max_steps=bad)) for bad in (0, True, "many")]
        errors += [await error_of(each.stop_profile(bad)) for bad in ("", 7)]
        return [described(error) for error in errors]

    here, there = await errors_of(engine), await errors_of(reference)
    assert here == there
    assert FileNotFoundError in {kind for kind, *_ in here}
    assert not names_in(tmp_path)
