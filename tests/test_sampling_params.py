"""Whatever is given for a field, it is refused by name or held as a plain value of the field's own type."""

import collections
import enum
import json
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from aioengine.config import EngineConfig
from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.models.folder import ModelFolder
from aioengine.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEXT_CHARS,
    SamplingParams,
    make_params,
)
from aioengine.server.schema import ChatRequest, known_names
from aioengine.structured.constraints import Constraint
from aioengine.validation import OTHER_NAMES, check_fields, nearest, shorten
from aioengine.vllm_names import NEUTRAL_PARAMS

FIELDS = SamplingParams.__struct_fields__
MAX_MESSAGE_CHARS = 400


class Shout(str):
    """A text that is not what it holds."""

    def __str__(self) -> str:
        return "AAH"


class Color(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 3


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Broken(collections.UserDict[int, float]):
    """A mapping that raises when it is read."""

    def __getitem__(self, key: int) -> float:
        raise ZeroDivisionError


def make(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


class Processor:
    """A function whose name is the same in every process: tests are named after it."""

    def __call__(self, *_: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "processor"


processor = Processor()


def nest(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def around_itself() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


BIG_INTS = [2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, -(10**30), 10**400, 10**5000]
FLOATS = [math.nan, math.inf, -math.inf, -0.0, 0.5, 1.5, 2.0, 1e300, 5e-324]
SCALARS: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 100, *BIG_INTS, *FLOATS, 1j, "", " ", "\n\t", "a", "7", "\ud800", "x" * 5000,
    Shout("quiet"), Color.RED, Size.SMALL, b"", b"ab", bytearray(b"ab"), memoryview(b"ab"), object(), Unspeakable(),
    int, processor, ..., NotImplemented, np.bool_(True), np.int8(3), np.int64(-5), np.uint64(2**64 - 1),
    np.float16(0.5), np.float32(math.nan), np.float64(math.inf), np.longdouble(1.0), np.str_("a"), np.str_(""),
    np.datetime64("2020-01-01"), np.complex64(1j), np.array(7), np.zeros((2, 2)),
]  # fmt: skip
COLLECTIONS: list[Any] = [
    (), [], {}, set(), frozenset({1}), [1], (1, 2), {1, 2}, {"a"}, {1: 2}, {1: 0.5, 2: -200}, {"1": 0.5}, [None],
    [[1]], [[], {}], ["a", ""], ["a", 1], [math.nan], {5: math.nan}, {5: math.inf}, {math.nan: 1.0}, {5: None},
    {5: True}, {True: 1.0}, {-1: 0.5}, {2**31: 0.5}, {10**30: 1}, {5: 10**400}, [10**30], [-1], [True], range(3),
    iter([1]), [np.int64(5)], [np.int64(-5)], {np.int64(5): np.float32(0.5)}, {5: np.float32(math.nan)},
    [np.longdouble(1)], [np.str_("a")], np.array([1, 2]), np.array([0.5]), np.array(["a", "b"]), np.array([], int),
    np.array([None, {}]), [Shout("quiet")], [Color.RED], [Size.SMALL], {Size.SMALL: 1}, [Unspeakable()],
    collections.deque([1]), collections.OrderedDict({5: 1}), types.MappingProxyType({5: 1}), Broken({5: 1.0}),
    collections.Counter([5]), [processor], (processor, int), [b"a"], nest(10_000), around_itself(), ["\ud800"],
    ["x" * 5000],
]  # fmt: skip


def can_be_printed(value: Any) -> bool:
    try:
        return bool(repr(value))
    except (RuntimeError, ValueError, RecursionError):
        return False


# Hypothesis prints what it tries.
JUNK = st.recursive(
    st.sampled_from(list(filter(can_be_printed, SCALARS)))
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.sampled_from(list(filter(can_be_printed, COLLECTIONS)))
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers(-1, 9) | st.floats() | st.text(max_size=2), inner, max_size=4)
        | st.frozensets(st.integers(-1, 9) | st.text(max_size=2), max_size=4)
    ),
    max_leaves=8,
)


def is_plain(value: Any, name: str) -> bool:
    """Whether an accepted value has the one form that the engine goes by."""
    kinds: dict[str, Callable[[Any], bool]] = {
        "stop": lambda v: is_tuple_of(v, str) and all(v) and len(v) <= MAX_STOP_STRINGS,
        "bad_words": lambda v: is_tuple_of(v, str) and all(text.strip() for text in v) and len(v) <= MAX_BAD_WORDS,
        "stop_token_ids": is_ids,
        "allowed_token_ids": lambda v: v is None or (is_ids(v) and len(v) > 0),
        "logprob_token_ids": lambda v: v is None or is_ids(v),
        "logits_processors": lambda v: type(v) is tuple and all(map(callable, v)),
        "extra_args": lambda v: v is None or type(v) is dict,
        "logit_bias": lambda v: (
            v is None
            or (
                type(v) is dict
                and is_ids(tuple(v))
                and all(type(bias) is float and abs(bias) <= MAX_BIAS for bias in v.values())
            )
        ),
        "seed": lambda v: v is None or (type(v) is int and -(2**63) <= v < 2**63),
        "max_tokens": lambda v: v is None or is_count(v),
        "logprobs": lambda v: v is None or is_count(v),
        "logprobs_mode": lambda v: type(v) is str and v in ("raw", "processed"),
        "prompt_logprobs": lambda v: v is None or is_count(v),
        "structured": lambda v: v is None or isinstance(v, Constraint),
        "max_thinking_tokens": lambda v: v is None or is_count(v),
        "truncate_prompt_tokens": lambda v: v is None or v == -1 or (is_count(v) and v > 0),
    }
    default = getattr(SamplingParams(), name)
    if name in kinds:
        return kinds[name](value)
    if type(default) is float:
        return type(value) is float and math.isfinite(value)
    if type(default) is bool:
        return type(value) is bool
    return is_count(value) or (name == "top_k" and value == -1)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def is_ids(value: Any) -> bool:
    return type(value) is tuple and all(map(is_count, value))


def is_tuple_of(value: Any, kind: type) -> bool:
    return type(value) is tuple and all(type(item) is kind for item in value)


def refusal(fields: dict[str, Any]) -> InvalidRequest | None:
    try:
        params = make(**fields)
    except InvalidRequest as error:
        return error
    for name in FIELDS:
        assert is_plain(getattr(params, name), name), (name, fields, getattr(params, name))
    return None


def check(name: str, value: Any) -> None:
    error = refusal({name: value})
    if error is not None:
        assert error.param == name
        assert name in str(error)
        assert len(str(error)) <= MAX_MESSAGE_CHARS
        assert "`null`" not in str(error)
        assert "`array`" not in str(error)


@pytest.mark.parametrize("name", FIELDS)
def test_no_value_is_anything_but_refused_by_name_or_made_plain(name: str) -> None:
    for value in [*SCALARS, *COLLECTIONS, *([scalar] for scalar in SCALARS)]:
        check(name, value)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JUNK, min_size=1, max_size=6))
def test_fields_with_junk_together_raise_nothing_else(fields: dict[str, Any]) -> None:
    error = refusal(fields)
    assert error is None or error.param in fields


def test_the_defaults_are_plain_values_too() -> None:
    """They are not checked when a struct is made, so they are checked here, by giving each as another object."""
    for name in FIELDS:
        default = getattr(SamplingParams(), name)
        assert is_plain(default, name)
        copy = float(repr(default)) if type(default) is float else default
        assert getattr(make(**{name: copy}), name) == default


@pytest.mark.parametrize(
    ("given_value", "name", "held"),
    [
        (1, "temperature", 1.0),
        (np.float32(0.5), "temperature", 0.5),
        (np.int64(1), "top_p", 1.0),
        (np.int32(7), "seed", 7),
        (np.bool_(True), "ignore_eos", True),
        ("a", "stop", ("a",)),
        (Shout("quiet"), "stop", ("quiet",)),
        ([Color.RED], "stop", ("red",)),
        (np.array(["a", "b"]), "bad_words", ("a", "b")),
        ([1, 2], "stop_token_ids", (1, 2)),
        (np.array([1, 2], np.int32), "allowed_token_ids", (1, 2)),
        ([np.int64(1), 2], "logprob_token_ids", (1, 2)),
        ({np.int64(1): np.float32(0.5), 2: 1}, "logit_bias", {1: 0.5, 2: 1.0}),
        ({1: 1000, 2: -1000.0}, "logit_bias", {1: 100.0, 2: -100.0}),
        ([processor], "logits_processors", (processor,)),
        ("raw_logprobs", "logprobs_mode", "raw"),
        (Shout("processed_logprobs"), "logprobs_mode", "processed"),
    ],
    ids=str,
)
def test_what_means_the_same_is_held_the_same(given_value: Any, name: str, held: Any) -> None:
    value = getattr(make(**{name: given_value}), name)
    assert value == held
    assert type(value) is type(held)
    assert is_plain(value, name)


def test_an_unknown_mode_of_log_probabilities_hears_of_the_known_ones() -> None:
    for mode in ("raw_logits", "processed_logits", "raw_logprobs_logprobs", "_logprobs", "", None, 1):
        with pytest.raises(InvalidRequest, match=r"^logprobs_mode=.*choose one of 'processed', 'raw'$") as error:
            make(logprobs_mode=mode)
        assert error.value.param == "logprobs_mode"


# Lengths


class Untouchable(list[Any]):
    """A long list that says so, and that nobody may look into."""

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Any:
        raise AssertionError("looked into")


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("stop", MAX_STOP_STRINGS),
        ("bad_words", MAX_BAD_WORDS),
        ("stop_token_ids", MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
        ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
        ("logit_bias", MAX_LOGIT_BIAS),
        ("logits_processors", MAX_LOGITS_PROCESSORS),
    ],
)
def test_too_many_items_are_refused_by_their_number(name: str, limit: int) -> None:
    item: Any = {"stop": "a", "bad_words": "a", "logits_processors": processor}.get(name, 1)

    def items(count: int) -> Any:
        return dict.fromkeys(range(count), 1.0) if name == "logit_bias" else [item] * count

    assert len(getattr(make(**{name: items(limit)}), name)) == limit
    for given_value, count in ((items(limit + 1), limit + 1), (Untouchable(), 10**9)):
        with pytest.raises(InvalidRequest, match=f"{name}=.*has {count:,} items.*at most {limit:,}") as error:
            make(**{name: given_value})
        assert error.value.param == name


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_a_long_text_is_refused_and_not_repeated(name: str) -> None:
    assert getattr(make(**{name: "x" * MAX_TEXT_CHARS}), name) == ("x" * MAX_TEXT_CHARS,)
    for texts in ("x" * (MAX_TEXT_CHARS + 1), ["a", "x" * 10_000_000]):
        with pytest.raises(InvalidRequest, match=rf"length <= {MAX_TEXT_CHARS}") as error:
            make(**{name: texts})
        assert len(str(error.value)) < 120


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bias_that_is_no_number_is_not_clamped_to_one(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias=\{1: 0\.5, 5: -?(nan|inf)\}.*finite"):
        SamplingParams(logit_bias={1: 0.5, 5: value})


# Rules between fields


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop": "a", "detokenize": False}, "stop"),
        ({"bad_words": ["a", " "]}, "bad_words"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"logits_processors": [processor, "a"]}, "logits_processors"),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as error:
        make(**fields)
    assert error.value.param == name


def test_keywords_go_before_the_defaults_of_the_model() -> None:
    params = make_params(None, {"temperature": 0.5, "top_k": 3}, {"top_k": 5})
    assert (params.temperature, params.top_k) == (0.5, 5)
    assert make_params(params, {"top_p": 0.1}, {}) is params


def test_parameters_of_vllms_are_taken_where_they_ask_for_nothing() -> None:
    for name, neutral in NEUTRAL_PARAMS.items():
        for value in neutral.values or ():
            assert SamplingParams(**{name: value}) == SamplingParams()
        assert (name in FIELDS) == (not neutral.instead)
        with pytest.raises(InvalidRequest, match=name) as error:
            SamplingParams(**{name: 7})
        assert error.value.param == name


def test_a_parameter_that_is_an_enums_member_goes_by_its_name() -> None:
    kinds = enum.Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY", "SIDEWAYS"])
    assert SamplingParams(output_kind=kinds.DELTA, n=2) == SamplingParams(n=2)  # type: ignore[call-arg, attr-defined]
    with pytest.raises(InvalidRequest, match=r"output_kind=.*SIDEWAYS.*stream gives deltas"):
        SamplingParams(output_kind=kinds.SIDEWAYS)  # type: ignore[call-arg, attr-defined]


@pytest.mark.parametrize(("positional", "keywords"), [((0.5,), {}), ((), {"temprature": 0.5}), ((), {"__init__": 1})])
def test_parameters_that_are_none_are_the_callers_fault(positional: Any, keywords: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"keywords alone|unknown parameter"):
        SamplingParams(*positional, **keywords)


def test_a_clone_is_equal_or_has_other_values() -> None:
    params = SamplingParams(temperature=0.5, stop="a", logit_bias={3: 1.0})
    clone = params.clone()
    assert clone == params
    assert clone.logit_bias is not params.logit_bias
    assert params.clone(stop=None, max_tokens=3) == SamplingParams(temperature=0.5, logit_bias={3: 1.0}, max_tokens=3)
    assert params == clone
    with pytest.raises(InvalidRequest, match="max_tokens=0"):
        params.clone(max_tokens=0)


@pytest.mark.parametrize("name", ["max_toknes", "x", "max_tokens" * 1_000_000], ids=["near", "far", "long"])
def test_an_unknown_keyword_is_named_shortly(name: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown parameter") as error:
        make_params(None, {}, {name: 1})
    assert len(str(error.value)) < 1000
    assert ("did you mean 'max_tokens'" in str(error.value)) == (name == "max_toknes")


def test_generation_config_gives_the_repetition_penalty_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1, "top_k": 20, "x": 1}))
    assert ModelFolder.read(tmp_path).sampling_defaults == {"repetition_penalty": 1.1, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 0}))
    with pytest.raises(ModelLoadError, match="repetition_penalty"):
        _ = ModelFolder.read(tmp_path).sampling_defaults


# Any struct


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Annotations of the kinds that SamplingParams does not have."""

    name: Annotated[str, Meta(max_length=3)] | Annotated[list[float], Meta(max_length=5)] | None = None
    pairs: dict[str, list[float]] = {}

    def __post_init__(self) -> None:
        check_fields(self, lambda name, message: KeyError(name, message))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("name", "long", "it has 4 characters, and at most 3 are allowed"),
        ("name", [0.0] * 6, "it has 6 items, and at most 5 are allowed"),
        ("name", [1.0, math.nan], "not a finite number"),
        ("name", {}, "got `dict`"),
        ("pairs", {"a": [1.0], "b": [math.inf]}, "not a finite number"),
        ("pairs", {"a": None}, "expected `list`, got `None` (a value)"),
        ("pairs", {5: []}, "expected `str`, got `int` (a key)"),
    ],
    ids=str,
)
def test_limits_within_unions_and_floats_within_collections_are_found(name: str, value: Any, message: str) -> None:
    with pytest.raises(KeyError) as error:
        Limits(**{name: value})
    assert error.value.args[0] == name
    assert message in error.value.args[1]


def test_names_of_other_libraries_are_found_where_ours_is_known() -> None:
    known = {*FIELDS, *EngineConfig.__struct_fields__, *known_names(ChatRequest)}
    assert known.isdisjoint(OTHER_NAMES.keys() - known_names(ChatRequest))
    assert {ours for names in OTHER_NAMES.values() for ours in names} <= {*known, "max_output_tokens"}
    for name in ("max_completion_tokens", "response_format", "guided_json", "max_new_tokens", "repeat_penalty"):
        with pytest.raises(InvalidRequest, match=rf"'{name}'; did you mean '({'|'.join(OTHER_NAMES[name])})'"):
            SamplingParams(**{name: 5})
    assert nearest("max_new_tokens", known_names(ChatRequest)) == "; did you mean 'max_tokens'?"
    assert nearest("json_schema", known_names(ChatRequest)) == "; did you mean 'response_format'?"
    assert nearest("num_ctx", known_names(ChatRequest)) == "", "over HTTP nobody is told of Python's arguments"


SHOWN: dict[str, Any] = {
    "'a'": "a",
    "<str of 61>": "a" * 61,
    "<bytes of 61>": b"a" * 61,
    "<int of 16610 bits>": 10**5000,
    "[1, 'a']": [1, "a"],
    "(1,)": (1,),
    "set()": set(),
    "{1}": {1},
    "{1: [<str of 99>, <list of 1>]}": {1: ["x" * 99, [1]]},
    "<list of 9>": list(range(9)),
    "<Unspeakable>": Unspeakable(),
    "[[<list of 1>]]": around_itself(),
    "x" * 57 + "...": type("Wordy", (), {"__repr__": lambda _: "x" * 99})(),
}


@pytest.mark.parametrize("text", SHOWN)
def test_a_message_shows_a_value_shortly(text: str) -> None:
    assert shorten(SHOWN[text]) == text


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2
