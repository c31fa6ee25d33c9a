"""The messages: there and back, broken in every way, out of turn, and as an older version wrote them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import nightly
from transport import wire_samples
from transport.siege import pack_request
from transport.wire_samples import CONTROLS, DIRECTIONS, RECORDED, Sample, frames_of, int32

from aioengine import errors
from aioengine.core import control as c
from aioengine.errors import InvalidRequest, WireError
from aioengine.sampling_params import SamplingParams
from aioengine.scheduler.sequence import Request
from aioengine.transport import wire
from aioengine.transport.wire import (
    MAX_DUMP_CHARS,
    MAX_MESSAGE_CHARS,
    Fault,
    OutOfTurn,
    Reader,
    WireMessage,
    Writer,
    to_error,
    to_fault,
)

EVERY_MESSAGE = [(kinds, sample) for kinds, samples in DIRECTIONS.values() for sample in samples]


RAW_FIELDS = {"request", "control"}
"""They hold a message of their own."""


def read(kinds: Any, frames: Sequence[Any], due: int = 0) -> WireMessage:
    reader: Reader[WireMessage] = Reader(kinds)
    reader.due = due
    return reader.read(frames)


def plain(body: WireMessage) -> Any:
    """To compare by: the same map may be packed in two ways, and arrays are not compared by ``==``."""
    fields = msgspec.structs.asdict(body)
    raw = {name: msgspec.msgpack.decode(fields.pop(name)) for name in RAW_FIELDS & fields.keys()}
    return raw | msgspec.to_builtins(fields, enc_hook=lambda array: array.tolist())


def without_prompt(request: Request) -> dict[str, Any]:
    """The fields of a request, to compare by, with its prompt as a list."""
    return msgspec.structs.asdict(request) | {"prompt_token_ids": request.prompt_token_ids.tolist()}


def assert_same(sample: Sample, body: WireMessage) -> None:
    assert plain(body) == plain(sample.body)
    assert type(body) is type(sample.body)


def assert_refused(kinds: Any, sample: Sample, *messages: Sequence[Any]) -> None:
    """Each of these is refused, and the sample, which was due, is read afterwards."""
    reader: Reader[WireMessage] = Reader(kinds)
    for frames in messages:
        with pytest.raises(WireError):
            reader.read(frames)
        assert reader.due == 0
    assert_same(sample, reader.read(frames_of(sample)))
    assert reader.due == 1


def header_of(sample: Sample) -> list[Any]:
    """[number, [tag, field, ...]], to be changed and packed again."""
    header = msgspec.msgpack.decode(frames_of(sample)[0])
    assert isinstance(header, list)
    return header


pack = msgspec.msgpack.encode


class TestThereAndBack:
    def test_a_message_is_read_as_it_was_written_from_any_kind_of_buffer(self) -> None:
        for kinds, sample in EVERY_MESSAGE:
            for kind in (bytes, bytearray, memoryview, lambda frame: memoryview(bytearray(frame))):
                assert_same(sample, read(kinds, [kind(frame) for frame in frames_of(sample)]))

    def test_every_kind_of_message_has_a_sample(self) -> None:
        for kinds, samples in DIRECTIONS.values():
            assert {type(sample.body) for sample in samples} == set(kinds.__args__)
        assert {type(control) for control in CONTROLS} == set(c.AnyControl.__args__)

    def test_messages_of_a_session_are_numbered_and_read_in_turn(self) -> None:
        for kinds, samples in DIRECTIONS.values():
            reader: Reader[WireMessage] = Reader(kinds)
            writer = Writer()
            for sample in samples:
                assert_same(sample, reader.read([writer.write(sample.body)]))
            assert reader.due == writer.number == len(samples)

    @given(st.lists(st.floats(0, 100), max_size=9), st.floats(0, 9) | st.none())
    def test_any_record(self, latencies: list[float], lag: float | None) -> None:
        array = np.array([*latencies, 0.0])[:-1]  # float64, of length 0, too
        record = msgspec.structs.replace(wire_samples.RECORD, inter_token_latencies_s=array, loop_lag_s=lag)
        sample = Sample("any", wire.StepOutputsMessage(record=record))
        body = read(wire.FromEngine, frames_of(sample))
        assert_same(sample, body)
        assert isinstance(body, wire.StepOutputsMessage)
        assert body.record is not None
        assert body.record.inter_token_latencies_s.dtype == np.float64


BAD_PARAMS = {
    "range": pack({"temperature": 3.0}),
    "type": pack({"temperature": "hot"}),
    "nan": pack({"temperature": math.nan}),
    "unknown": pack({"warmth": 1.0}),
    "contradiction": pack({"min_tokens": 5, "max_tokens": 2}),
    "no function": pack({"logits_processors": [1]}),
    "array": pack([1, 2]),
    "nil": pack(None),
    "deep": b"\x81\xb1logits_processors\x91" + b"\x91" * 100_000 + b"\xc0",
    "text": b"\x81\xa4stop\xa1\xff",
}
BAD_REQUESTS = {
    **{f"parameters: {what}": pack_request(params=msgspec.Raw(packed)) for what, packed in BAD_PARAMS.items()},
    "half a token": pack_request(prompt_token_ids=b"abc"),
    "a list of tokens": pack_request(prompt_token_ids=[1, 2]),
    "no prompt": pack_request(prompt_token_ids=None),
    "a long salt": pack_request(cache_salt="s" * 1025),
    "a priority": pack_request(priority=2**31),
    "a mapping": pack({"request_id": "r"}),
    "too short": pack(["r", b"\0\0\0\0"]),
    "empty": b"",
}


class TestWhatIsReadByItself:
    @given(st.builds(SamplingParams, temperature=st.floats(0, 2), n=st.integers(1, 9), seed=st.integers(0, 2**63 - 1)))
    def test_a_request_there_and_back(self, params: SamplingParams) -> None:
        request = Request(
            request_id="r", prompt_token_ids=int32(5, -1, 2**31 - 1), params=params, seed=-7, max_total_tokens=9,
            bad_words=((1, 2), (3,)), priority=-4, cache_salt="salt", tenant="tenant", session="session",
        )  # fmt: skip
        read_request = wire.unpack_request(wire.pack_request(request), Request)
        assert read_request.prompt_token_ids.dtype == np.int32
        assert not read_request.prompt_token_ids.flags.owndata, "no token is copied by itself"
        assert without_prompt(read_request) == without_prompt(request)

    def test_functions_do_not_travel(self) -> None:
        params = SamplingParams(logits_processors=(lambda ids, logits: logits,))
        request = Request(request_id="", prompt_token_ids=int32(5), params=params, seed=1, max_total_tokens=2)
        with pytest.raises(InvalidRequest, match="logits_processors"):
            wire.check_sendable(request)

    @pytest.mark.parametrize("what", BAD_REQUESTS)
    def test_what_is_no_request_is_a_bad_request(self, what: str) -> None:
        with pytest.raises(InvalidRequest):
            wire.unpack_request(msgspec.Raw(BAD_REQUESTS[what]), Request)

    @pytest.mark.parametrize("control", CONTROLS, ids=lambda control: type(control).__name__)
    def test_a_control_call_there_and_back_also_with_fields_of_a_later_version(self, control: c.AnyControl) -> None:
        raw = wire.pack_control(control)
        assert wire.unpack_control(raw) == control
        later = [*cast(list[Any], msgspec.msgpack.decode(raw)), "later", 2]
        assert wire.unpack_control(msgspec.Raw(pack(later))) == control

    def test_a_piece_of_a_tensor_travels_from_any_kind_of_buffer(self) -> None:
        for data in (b"abcd", bytearray(b"abcd"), memoryview(np.frombuffer(b"abcd", np.uint8))):
            control = msgspec.structs.replace(wire_samples.STAGE, data=data)
            unpacked = wire.unpack_control(wire.pack_control(control))
            assert isinstance(unpacked, c.StageWeights)
            assert unpacked.data == b"abcd"

    @pytest.mark.parametrize(
        ("call", "param"),
        [
            (("StartProfile", 0), "max_steps"),
            (("StopProfile", "/"), "path"),
            (("SaveShardedState", "folder", 0), "max_shard_bytes"),
            (("UpdateWeights", "nul\0"), "folder"),
        ],
    )
    def test_a_control_call_checks_itself_on_either_side(self, call: tuple[Any, ...], param: str) -> None:
        with pytest.raises(InvalidRequest) as here:
            getattr(c, call[0])(*call[1:])
        with pytest.raises(InvalidRequest) as there:
            wire.unpack_control(msgspec.Raw(pack(call)))
        assert (str(here.value), here.value.param) == (str(there.value), there.value.param)
        assert here.value.param == param

    @pytest.mark.parametrize(
        "raw",
        [
            pack(["Explode"]),
            pack(["__import__", "os"]),
            pack(["Pause", "sometimes"]),
            pack(["Sleep", 3]),
            pack(["StopProfile"]),
            pack([]),
            pack({"type": "Pause"}),
            b"\x93\xadCollectiveRpc\xa1a" + b"\x91" * 100_000 + b"\xc0",
            b"\x92\xabStopProfile\xa1\xff",
            b"",
        ],
        ids=["unknown", "python", "mode", "level", "missing", "nothing", "map", "deep", "text", "empty"],
    )
    def test_an_unknown_or_bad_control_call_is_a_bad_request(self, raw: bytes) -> None:
        with pytest.raises(InvalidRequest):
            wire.unpack_control(msgspec.Raw(raw))

    @pytest.mark.parametrize("argument", [object(), 2**70, lambda: None], ids=["object", "huge", "function"])
    def test_what_no_message_can_hold_is_refused_before_it_is_sent(self, argument: Any) -> None:
        with pytest.raises(InvalidRequest, match="plain data"):
            wire.pack_control(c.CollectiveRpc("name", args=(argument,)))


def cut_short_anywhere(sample: Sample) -> Iterator[list[bytes]]:
    (frame,) = frames_of(sample)
    for length in range(min(len(frame), 300)):
        yield [frame[:length]]


def with_trailing(sample: Sample) -> Iterator[list[bytes]]:
    (frame,) = frames_of(sample)
    for tail in (b"\x00", b"\xc0", b"\xff" * 9, frame):
        yield [frame + tail]


def of_no_frame_or_several(sample: Sample) -> Iterator[list[bytes]]:
    (frame,) = frames_of(sample)
    yield []
    for other in (b"", b"\x00" * 8, frame):
        yield [frame, other]
        yield [other, frame]


def with_fields_of_a_wrong_type(sample: Sample) -> Iterator[list[bytes]]:
    _, body = header_of(sample)
    for index, name in enumerate(sample.body.__struct_fields__, start=1):
        if name not in RAW_FIELDS and not (isinstance(sample.body, wire.Returned) and name == "result"):
            yield [pack([0, [*body[:index], b"no such thing", *body[index + 1 :]]])]


def with_a_tag_or_number_that_is_none(sample: Sample) -> Iterator[list[bytes]]:
    _, body = header_of(sample)
    tagged = [[0, [tag, *body[1:]]] for tag in (0, 99, -1, 2**63, "attach", None, True, 1.0)]
    numbered = [[number, body] for number in ("0", None, 0.5, [0], -1, 2**64 - 1)]
    for header in (*tagged, *numbered):
        yield [pack(header)]


BREAKS: list[Callable[[Sample], Iterator[list[bytes]]]] = [
    cut_short_anywhere,
    with_trailing,
    of_no_frame_or_several,
    with_fields_of_a_wrong_type,
    with_a_tag_or_number_that_is_none,
]


class TestBroken:
    @pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_what_is_broken_is_refused(self, direction: str, broken: Callable[[Sample], Iterator[list[bytes]]]) -> None:
        kinds, samples = DIRECTIONS[direction]
        for sample in samples:
            assert_refused(kinds, sample, *broken(sample))

    def test_an_output_of_no_whole_tokens(self) -> None:
        sample = wire_samples.FROM_FRONT_END[2]
        number, body = header_of(sample)
        for output in (b"a", b"abc", b"abcdefg"):
            broken = [*body]
            broken[body.index(b"")] = output
            assert_refused(wire.FromFrontEnd, sample, [pack([number, broken])])

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_things_that_are_no_messages(self, direction: str) -> None:
        kinds, samples = DIRECTIONS[direction]
        deep = b"\x92\x00" + b"\x91" * 1_000_000 + b"\xc0"
        huge = [b"\x92\x00" + b"\xdd\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x92\x00\xdb\xff\xff\xff\xff"]
        packed = [pack(value) for value in (None, [], [0], {}, [0, []], [0, {}])]
        assert_refused(kinds, samples[0], [], *([header] for header in (b"\xc1", *packed, deep, *huge)))

    @pytest.mark.parametrize("length", [2**28, 2**32 - 1])
    def test_a_declared_length_allocates_nothing(self, length: int) -> None:
        import tracemalloc

        bodies = [b"\x94\x03", b"\x96\x02\x00\xc0\x00\x00", b"\x92\x03", b"\x93\x04\x00"]
        declared = [kind + length.to_bytes(4, "big") for kind in (b"\xdb", b"\xc6", b"\xdd", b"\xdf")]
        tracemalloc.start()
        try:
            for body, head, kinds in itertools.product(bodies, declared, (wire.FromFrontEnd, wire.FromEngine)):
                with pytest.raises(WireError):
                    read(kinds, [b"\x92\x00" + body + head])
            assert tracemalloc.get_traced_memory()[1] < 2**22
        finally:
            tracemalloc.stop()

    def test_too_large(self) -> None:
        sample = wire_samples.FROM_FRONT_END[1]
        assert_refused(wire.FromFrontEnd, sample, [bytes(wire.MAX_BYTES + 1)])

    def test_messages_of_another_direction(self) -> None:
        """Tags are used again in each direction, so that some could be taken for others; most cannot."""
        sample = wire_samples.FROM_FRONT_END[0]
        names = ("attached", "outputs", "beating", "ending")
        foreign = [frames_of(each) for each in wire_samples.FROM_ENGINE if each.name in names]
        assert_refused(wire.FromFrontEnd, sample, *foreign)


class TestOutOfTurn:
    def test_one_that_comes_again_and_a_gap(self) -> None:
        for kinds, sample in EVERY_MESSAGE:
            reader: Reader[WireMessage] = Reader(kinds)
            reader.read(frames_of(sample))
            for number in (0, 2, 3, 1000, 2**62):
                with pytest.raises(OutOfTurn, match=f"message {number} where 1 was due") as caught:
                    reader.read(frames_of(sample, number))
                assert caught.value.is_gap == (number > 1)
            assert_same(sample, reader.read(frames_of(sample, 1)))

    @given(st.permutations(range(6)))
    def test_in_any_order_only_the_due_ones_are_read(self, order: list[int]) -> None:
        reader: Reader[wire.Acknowledge] = Reader(wire.FromFrontEnd)
        due = 0
        for number in order:
            frames = frames_of(Sample("", wire.Acknowledge(number)), number)
            if number == due:
                assert reader.read(frames).number == number
                due += 1
            else:
                with pytest.raises(OutOfTurn):
                    reader.read(frames)
            assert reader.due == due

    def test_a_malformed_one_of_a_later_number_is_no_gap(self) -> None:
        """Nothing that it says counts, not even its number."""
        for frames in ([frames_of(wire_samples.FROM_FRONT_END[1], 5)[0], b""], [pack([5, [99]])]):
            with pytest.raises(WireError) as caught:
                read(wire.FromFrontEnd, frames)
            assert not isinstance(caught.value, OutOfTurn)


def recorded(direction: str) -> dict[str, list[bytes]]:
    path = RECORDED / f"version{wire.PROTOCOL_VERSION}-{direction}.msgpack"
    return msgspec.msgpack.decode(path.read_bytes(), type=dict[str, list[bytes]])


class TestEvolution:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_what_was_recorded_is_read_as_what_it_meant(self, direction: str) -> None:
        """If this fails, fields were moved, removed or given another type: append them, or raise PROTOCOL_VERSION."""
        kinds, samples = DIRECTIONS[direction]
        by_name = {sample.name: sample for sample in samples}
        frames = recorded(direction)
        assert list(frames) == [sample.name for sample in samples]
        for number, (name, message) in enumerate(frames.items()):
            assert_same(by_name[name], read(kinds, message, due=number))

    def test_exchanged_fields_would_be_seen(self) -> None:
        for kinds, sample in EVERY_MESSAGE:
            _, body = header_of(sample)
            for one, other in itertools.combinations(range(1, len(body)), 2):
                swapped = list(body)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                with contextlib.suppress(WireError):
                    read_body = read(kinds, [pack([0, swapped])])
                    # Of a message without news, and of a request without the later fields: another sample has them.
                    is_empty = body[one] == body[other] and body[one] in ([], "", b"")
                    assert plain(read_body) != plain(sample.body) or is_empty

    def test_unknown_fields_behind_the_known_ones_are_skipped(self) -> None:
        for kinds, sample in EVERY_MESSAGE:
            number, body = header_of(sample)
            for later in ([7], ["new", {"deep": [1, 2]}], [None] * 9):
                for header in ([number, [*body, *later]], [number, body, *later]):
                    assert_same(sample, read(kinds, [pack(header)]))

    def test_fields_with_defaults_may_be_missing_at_the_end(self) -> None:
        for kinds, sample in EVERY_MESSAGE:
            number, body = header_of(sample)
            fields = msgspec.structs.fields(sample.body)
            full = msgspec.structs.asdict(sample.body)
            required = {field.name: full[field.name] for field in fields if field.required}
            for count in range(len(fields)):
                short = [pack([number, body[: 1 + count]])]
                known = {field.name: full[field.name] for field in fields[:count]}
                try:
                    expected = type(sample.body)(**required | known) if known.keys() >= required.keys() else None
                except WireError:  # what is there does not go with what is missing
                    expected = None
                if expected is None:
                    assert_refused(kinds, sample, short)
                else:
                    assert plain(read(kinds, short)) == plain(expected)


# Errors as messages


OWN_ERRORS = [
    errors.InvalidRequest("bad", param="stop"),
    errors.InvalidRequest("bad"),
    errors.PromptTooLong(9000, 8192, is_lower_bound=True),
    errors.InvalidRequest("bad stop", param="stop").with_hint("give stop='a'"),
    errors.ConfigError("bad config"),
    errors.ModelLoadError("no model"),
    errors.EngineOverloaded("full", retry_after_s=2.5),
    errors.StepFailed("a step failed", dump="the plan"),
    errors.NoTokenLeft("no token is left", dump="the plan"),
    errors.EngineClosed("closed"),
    errors.EngineDead("dead", dump="last words"),
    errors.WireError("foreign"),
    errors.InternalError("our bug"),
]
PLAIN_ERRORS = [
    ArithmeticError("a"), AttributeError("b"), AssertionError("c"), EOFError("d"), IndexError("e"), LookupError("f"),
    MemoryError("g"), NotImplementedError("h"), OverflowError("i"), RuntimeError("j"), TypeError("k"), ValueError("l"),
    ZeroDivisionError("m"),
]  # fmt: skip


def there_and_back(error: BaseException) -> Exception:
    raw = msgspec.msgpack.encode(to_fault(error))
    return to_error(msgspec.msgpack.decode(raw, type=Fault))


@pytest.mark.parametrize("error", [*OWN_ERRORS, *PLAIN_ERRORS], ids=lambda error: type(error).__name__)
def test_an_error_is_what_it_was(error: Exception) -> None:
    back = there_and_back(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_each_of_our_own_types_is_tried() -> None:
    own = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    raised_by_callers = {errors.OutputNotParsed}
    assert own - {type(error) for error in OWN_ERRORS} <= {errors.AioEngineError, *raised_by_callers}


@pytest.mark.parametrize("name", sorted(wire._OS_ERRORS))
def test_an_os_error_of_pythons_keeps_number_and_file(name: str) -> None:
    kind = wire._OS_ERRORS[name]
    back = there_and_back(kind(errno.EIO, "it broke", "/some/file"))
    assert type(back) is kind
    assert isinstance(back, OSError)
    assert (back.errno, back.strerror, back.filename) == (errno.EIO, "it broke", "/some/file")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((errno.ENOENT, "so it says", "/x"), FileNotFoundError),
        ((errno.ENOSPC, "so it says", "/x"), OSError),
        *((arguments, OSError) for arguments in [("a", "b"), (1, 2), (2**70, "x"), (2, "x", 3), (2, "x", b"/f"), ()]),
    ],
)
def test_an_os_error_made_of_anything(arguments: tuple[Any, ...], kind: type[OSError]) -> None:
    back = there_and_back(OSError(*arguments))
    assert isinstance(back, kind)
    if arguments[1:2] == ("so it says",):
        assert back.errno == arguments[0]
    assert "just words" in str(there_and_back(OSError("just words")))


class MyError(Exception):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


def test_an_error_of_the_user_s_own_says_what_it_was() -> None:
    class FileNotFoundError(ValueError):  # noqa: A001 - a known name is no known type
        pass

    odd = MyError("in my function")
    vars(odd).update(param=["no", "text"], dump=None, retry_after_s="soon")  # names that our errors have, too
    for error in (MyError("in my function"), odd):
        back = there_and_back(error)
        assert type(back) is RuntimeError
        assert str(back) == "MyError: in my function"
    assert str(there_and_back(Mute())).startswith("Mute: ")
    assert "mine" in str(there_and_back(FileNotFoundError("mine")))
    assert isinstance(there_and_back(KeyError("missing")), KeyError)


def test_text_that_has_no_utf_8_form() -> None:
    name = "file-\udcff"
    assert str(there_and_back(ValueError(name))) == "file-?"
    assert str(there_and_back(errors.StepFailed(name, dump=name))) == "file-?"
    back = there_and_back(OSError(errno.ENOENT, name, name))
    assert isinstance(back, FileNotFoundError)
    assert back.filename == "file-?"


@pytest.mark.parametrize(
    "kind", ["", "NoSuchThing", "SystemExit", "KeyboardInterrupt", "AioEngineErrors", "Any", "__builtins__", "eval"]
)
def test_an_unknown_kind_is_our_bug(kind: str) -> None:
    back = to_error(Fault(kind, "words"))
    assert type(back) is errors.InternalError
    assert str(back) == f"{kind}: words"


def test_texts_are_cut() -> None:
    fault = to_fault(errors.StepFailed("m" * 2 * MAX_MESSAGE_CHARS, dump="d" * 2 * MAX_DUMP_CHARS))
    assert len(fault.message) <= MAX_MESSAGE_CHARS
    assert len(fault.dump) <= MAX_DUMP_CHARS
    assert len(to_fault(OSError(errno.EIO, "x" * 2 * MAX_MESSAGE_CHARS)).message) <= MAX_MESSAGE_CHARS


KINDS = sorted({*(type(error).__name__ for error in OWN_ERRORS), "OSError", "ValueError"})


@given(st.builds(Fault) | st.builds(Fault, st.sampled_from(KINDS)))
def test_any_fault_makes_an_error(fault: Fault) -> None:
    assert isinstance(to_error(fault), Exception)


# Fuzzing


FUZZER = Path(__file__).parents[2] / "benchmarks" / "wire_fuzz.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FUZZER, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("seed", [1, *nightly(2)])
def test_broken_messages_do_no_harm(seed: int) -> None:
    done = run("--frames", "20000", "--seed", str(seed), "--live-share", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "harm: none" in done.stdout


@pytest.mark.nightly
def test_harm_is_seen(tmp_path: Path) -> None:
    """A reader that lets one kind of error through is found by a short run."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import runpy, sys\n"
        "from aioengine.transport import wire\n"
        "read = wire.Reader.read\n"
        "def read_one(reader, frames):\n"
        "    if len(frames) > 1:\n"
        "        raise IndexError('too many')\n"
        "    return read(reader, frames)\n"
        "wire.Reader.read = read_one\n"
        f"sys.argv = ['wire_fuzz', '--frames', '2000', '--live-share', '0']\n"
        f"sys.path.insert(0, {str(FUZZER.parent)!r})\n"
        f"runpy.run_path({str(FUZZER)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, broken], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "IndexError: too many" in done.stdout
