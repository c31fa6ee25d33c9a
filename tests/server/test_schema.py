"""What clients may send: each field is taken, refused by its name, or refused as one that comes later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import chat, completion_create_params

from aioengine.errors import InvalidRequest
from aioengine.sampling_params import SamplingParams
from aioengine.server import decoding, schema
from aioengine.server.decoding import (
    IgnoredFields,
    decode,
    read_messages,
    read_prompts,
    read_text,
    read_tokens,
    read_tools,
)
from aioengine.server.errors import ApiError, api_error_of
from aioengine.server.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
    is_given,
    known_names,
)
from aioengine.structured.constraints import Json, Regex
from aioengine.text.chat_input import check_messages

Kind = type[ChatRequest] | type[CompletionRequest]

KINDS: tuple[Kind, ...] = (ChatRequest, CompletionRequest)
SOME_JSON: tuple[Any, ...] = (True, False, 0, 1, 2, 1.0, 0.5, "", "none", "x", [], [1], ["text", "audio"], {}, {"a": 1})
LONE_SURROGATE = '"\\ud800"'

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(exclude_categories=["Cs"]))
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
layouts = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}])


def refused(call: Callable[[], Any], param: str | None = None, code: str | None = None) -> ApiError:
    """What a call raises; with a code, it must be that one, for that parameter."""
    with pytest.raises(ApiError) as caught:
        call()
    error = json.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (caught.value.status, error["type"]) == (400, "invalid_request_error")
    assert code is None or (caught.value.param, caught.value.code) == (param, code)
    return caught.value


def tried(call: Callable[[], Any], names: dict[str, str] | None = None) -> Any:
    """What it gives, or the fault that it raises, with the request's names for the engine's parameters."""
    try:
        return call()
    except (ApiError, InvalidRequest) as fault:
        return api_error_of(fault, param_names=names)


def body_of(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def checked(kind: Kind, **fields: Any) -> Any:
    request = decode(body_of(**fields), kind)
    request.check()
    return request


NEUTRAL = [(kind, name, values) for kind in KINDS for name, values in kind.NEUTRAL.items()]
NAMES_OF_NEUTRAL = [f"{kind.__name__}-{name}" for kind, name, _ in NEUTRAL]


@pytest.mark.parametrize(("kind", "name", "neutral"), NEUTRAL, ids=NAMES_OF_NEUTRAL)
def test_a_field_that_is_not_supported_is_refused_unless_it_asks_for_nothing(
    kind: Kind, name: str, neutral: tuple[Any, ...]
) -> None:
    for value in (None, *neutral):
        checked(kind, **{name: value})
    asked = [value for value in SOME_JSON if repr(value) not in map(repr, neutral)]  # 1 is no True
    for value in asked:
        fault = refused(partial(checked, kind, **{name: value}), name, "unsupported_parameter")
        assert name in fault.message


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_either_the_samplers_or_looked_at(kind: Kind) -> None:
    looked_at = {
        "model", "stream", "stream_options", "request_id", "priority", "cache_salt", "tenant", "vllm_xargs",
        "prompt", "echo", "logprobs", "messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt",
        "continue_final_message", "chat_template_kwargs", "chat_template", "tools", "tool_choice",
        "parallel_tool_calls", "reasoning_effort", "include_reasoning", "response_format", "structured_outputs",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "thinking_token_budget", "add_special_tokens",
        "return_token_ids", "return_tokens_as_token_ids", "prompt_cache_key",
    }  # fmt: skip
    assert set(kind.__struct_fields__) == {*schema.SAMPLING_FIELDS, *(looked_at & set(kind.__struct_fields__))}
    all_names = [*kind.__struct_fields__, *kind.NEUTRAL, *kind.HINTS, *kind.LEFT_OUT]
    assert len(all_names) == len(known_names(kind)), "a field is one of these, not two"
    assert set(schema.SAMPLING_FIELDS) <= set(SamplingParams.__struct_fields__)


def test_every_field_of_the_official_client_is_known() -> None:
    """Supported, or refused as one that comes later; never as one that is unknown."""
    for params, kind in (
        (chat.completion_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    ):
        assert params.__optional_keys__ | params.__required_keys__ <= known_names(kind)
    for message in (chat.ChatCompletionUserMessageParam, chat.ChatCompletionAssistantMessageParam):
        assert message.__optional_keys__ | message.__required_keys__ <= set(schema.ChatMessage.__struct_fields__)
    in_answers = set(chat.ChatCompletionMessage.model_fields) - {"annotations"}  # they say where its text came from
    assert in_answers <= set(schema.ChatMessage.__struct_fields__)
    assert chat.ChatCompletionStreamOptionsParam.__optional_keys__ <= set(schema.StreamOptions.__struct_fields__)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in kind.HINTS])
def test_a_hint_is_taken_whatever_it_says(kind: Kind, name: str) -> None:
    for value in (None, *SOME_JSON):
        assert checked(kind, **{name: value}) == checked(kind)


def test_functions_are_left_out_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields("refuse")
    for _ in range(3):
        body = body_of(functions=[{"name": "f"}], function_call="auto")
        assert decode(body, ChatRequest, ignored=ignored) == ChatRequest()
        decode(body_of(tools=[], functions=None), ChatRequest, ignored=ignored)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("aioengine.server", "WARNING")
    assert "functions" in record.getMessage()


@pytest.mark.parametrize("choice", ["required", {"name": "f"}, 1])
def test_a_function_that_must_be_called_is_refused_and_hears_of_tools(choice: Any) -> None:
    call = partial(checked, ChatRequest, functions=[{}], function_call=choice)
    assert "give tools and tool_choice" in refused(call, "function_call", "unsupported_parameter").message


@pytest.mark.parametrize(
    ("tools", "code"),
    [
        ({}, "invalid_type"), (["f"], "invalid_type"), ("f", "invalid_type"),
        ([{"description": "a" * decoding.MAX_TOOL_BYTES}], "invalid_value"),
        ([{"parameters": [0] * decoding.MAX_TOOL_VALUES}], "invalid_value"),
    ],
)  # fmt: skip
def test_tools_that_are_none_or_many_are_refused(tools: Any, code: str) -> None:
    fault = refused(lambda: read_tools(decode(body_of(tools=tools), ChatRequest).tools))
    assert ((fault.param or "").partition("[")[0], fault.code) == ("tools", code)


def test_one_constraint_at_a_time() -> None:
    one: dict[str, Any] = {"response_format": {"type": "json_object"}}
    others: dict[str, Any] = {
        "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'start: "a"',
        "structured_outputs": {"regex": "a"},
    }  # fmt: skip
    for kind in KINDS:
        for name, value in (one | others).items():
            assert "structured" in checked(kind, **{name: value}).sampling()
        for name, value in others.items():
            fault = refused(partial(checked(kind, **one, **{name: value}).sampling))
            assert (fault.param, name in fault.message) == ("response_format", True)


@pytest.mark.parametrize(
    "given",
    [
        {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"schema": []}}, {"type": 1}, {"type": "json_schema", "schema": 5},
        {"type": "json"}, {"type": "json", "value": "{}"}, {"type": "json_object", "schema": []}, {"type": "regex"},
        {"type": "json_object", "value": 5}, {"type": "json_schema", "json_schema": []}, {"type": "regex", "value": {}},
        {"type": "json_object", "json_schema": True}, {"type": "json_schema", "json_schema": False},
    ],
)  # fmt: skip
def test_a_response_format_that_is_none_is_refused(given: Any) -> None:
    for kind in KINDS:
        refused(partial(checked(kind, response_format=given).sampling), "response_format", "invalid_value")


SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SHAPE}},
        {"type": "json_object", "schema": SHAPE}, {"type": "json_object", "value": SHAPE},
        {"type": "json", "value": SHAPE}, {"type": "json_schema", "schema": SHAPE}, {"type": "json", "schema": SHAPE},
        {"type": "json_schema", "value": {"name": "a", "schema": SHAPE}},
        {"type": "json_object", "json_schema": {"schema": SHAPE}, "schema": None},
    ],
)  # fmt: skip
def test_a_schema_is_found_wherever_a_client_puts_it(given: Any) -> None:
    for kind in KINDS:
        assert checked(kind, response_format=given).sampling()["structured"] == Json(SHAPE)


def test_a_response_format_without_a_schema_is_any_object_or_a_pattern() -> None:
    for kind in KINDS:
        for plain in ({"type": "json_object"}, {"type": "json_object", "schema": None}):
            assert checked(kind, response_format=plain).sampling()["structured"] == Json()
        pattern = {"type": "regex", "value": "a+"}
        assert checked(kind, response_format=pattern).sampling()["structured"] == Regex("a+")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in schema.integer_fields(kind)])
def test_a_whole_number_may_be_written_as_a_float(kind: Kind, name: str) -> None:
    for text, number in ((b"2.0", 2), (b"-1.0", -1), (b"1e3", 1000), (b"0.0", 0)):
        value = getattr(decode(b'{"%b": %b}' % (name.encode(), text), kind), name)
        assert (value, type(value)) == (number, int)
    for text in (b"2.5", b"1e-3", b"1e400", b'"2.0"'):
        fault = refused(partial(decode, b'{"%b": %b}' % (name.encode(), text), kind), name, "invalid_type")
        assert "float |" not in fault.message


def test_a_request_may_not_contradict_itself() -> None:
    checked(ChatRequest, stream=True, stream_options={"include_obfuscation": True})
    for kind in KINDS:
        for stream in (None, False):
            asked = {"stream": stream, "stream_options": {"include_usage": True}}
            refused(partial(checked, kind, **asked), "stream_options", "invalid_value")
        whole = checked(kind, prompt_logprobs=2)
        assert whole.sampling()["prompt_logprobs"] == 2
        refused(partial(checked, kind, prompt_logprobs=0, stream=True), "prompt_logprobs", "invalid_value")
    refused(partial(checked, CompletionRequest, max_tokens=0), "max_tokens", "invalid_value")
    refused(partial(checked, ChatRequest, top_logprobs=3), "top_logprobs", "invalid_value")
    cut: dict[str, Any] = {"echo": True, "truncate_prompt_tokens": 3}
    refused(partial(checked, CompletionRequest, **cut), "truncate_prompt_tokens", "invalid_value")
    refused(partial(checked, ChatRequest, max_tokens=7, max_completion_tokens=8), "max_tokens", "invalid_value")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, AbortRequest])
def test_an_unknown_field_is_refused_or_ignored(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    known = {"tokens": []} if kind is DetokenizeRequest else {}
    refused(lambda: decode(body_of(**known, zzz=None), kind), "zzz", "unknown_parameter")
    ignored = IgnoredFields("ignore")
    for value in (1, None, "a", [{}]):
        decode(body_of(**known, zzz=value), kind, ignored=ignored)
    assert [record.getMessage() for record in caplog.records if "'zzz'" in record.getMessage()] == [caplog.messages[0]]
    assert len(caplog.records) == 1


def test_what_is_ignored_is_told_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields("ignore")
    for first in range(1000):
        many = {f"\n\u202e{first}-{place}": 0 for place in range(100)} | {"x" * 1000: 0}
        decode(body_of(**many), ChatRequest, ignored=ignored)
    assert len(caplog.records) == decoding.MAX_TOLD_NAMES
    assert all(message.isprintable() and len(message) < 200 for message in caplog.messages)
    caplog.clear()
    ignored = IgnoredFields("ignore")
    decode(body_of(temprature=1, stream_options={"usage": True, "include_usage": True}), ChatRequest, ignored=ignored)
    assert "did you mean 'temperature'?" in caplog.messages[0]
    assert "'stream_options.usage'" in caplog.messages[1]


def test_an_unknown_fields_name_may_be_anything() -> None:
    for name in ("x" * 100_000, "`", "a` - at `$.b`", "\n", "\U0001f98a", "", "$", "stream_options.include_usage"):
        fault = refused(partial(decode, body_of(**{name: 1}), ChatRequest), name[:100], "unknown_parameter")
        assert len(fault.message) < 300
    for name, near in (("temprature", "temperature"), ("max_token", "max_tokens"), ("topk", "top_k")):
        assert f"did you mean '{near}'?" in refused(partial(decode, body_of(**{name: 1}), ChatRequest)).message
    options = body_of(stream=True, stream_options={"usage": True})
    refused(lambda: decode(options, ChatRequest), "stream_options.usage", "unknown_parameter")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 1), ("stream", 1), ("stream", "yes"), ("stream_options", []), ("seed", "1"), ("seed", 1.5),
        ("temperature", "1"), ("temperature", True), ("stop", {}), ("stop_token_ids", "[]"), ("stop_token_ids", [None]),
        ("logit_bias", [1]), ("allowed_token_ids", {}), ("bad_words", 1), ("ignore_eos", []), ("n", True),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_names_its_field(kind: Kind, name: str, value: Any) -> None:
    assert refused(lambda: decode(body_of(**{name: value}), kind), name, "invalid_type").message.startswith(f"{name}")


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("stop", ["a", 1], "stop[1]"),
        ("logit_bias", {"fox": 1}, "logit_bias"),
        ("logit_bias", {"1": "a"}, "logit_bias[...]"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ],
)
def test_what_is_wrong_deep_inside_is_told_with_its_place(name: str, value: Any, place: str) -> None:
    fault = refused(lambda: decode(body_of(**{name: value}), ChatRequest), name, "invalid_type")
    assert fault.message.startswith(f"{place}: ")


def test_a_body_that_was_cut_off_anywhere_is_refused() -> None:
    whole = body_of(
        model="demo", temperature=0.5, messages=[{"role": "user", "content": "a \u00e9"}], stop=["a"], n=-12
    )
    for end in range(1, len(whole)):
        refused(partial(decode, whole[:end], ChatRequest), None, "invalid_json")
    assert "it is empty" in refused(lambda: decode(b"", ChatRequest), None, "invalid_json").message


@unhurried
@given(plain_json, st.sampled_from([(kind, name) for kind in KINDS for name in kind.__struct_fields__]))
def test_whatever_a_field_holds_it_is_taken_or_refused_by_name(value: Any, place: tuple[Kind, str]) -> None:
    kind, name = place
    outcome = tried(lambda: checked(kind, **{name: value}))
    sampling = outcome if isinstance(outcome, ApiError) else tried(outcome.sampling, outcome.own_names())
    if isinstance(sampling, ApiError):
        assert sampling.status == 400
        assert (sampling.param or "").startswith(name)
    else:
        assert isinstance(sampling, dict)


def test_what_is_quoted_in_a_text_is_no_text_of_its_own() -> None:
    body = body_of(prompt='"' * 200_000)
    assert decoding.has_more_texts(body, 3)
    assert not decoding.has_more_texts(body, 4)
    prompts = asyncio.run(read_prompts(decode(body, CompletionRequest).prompt, max_prompts=1, max_ids=9))
    assert len(prompts[0]) == 200_000


def test_fields_are_bounded_all_together() -> None:
    some = {name: [7] * 10_000 for name in ("documents", "metadata", "prediction", "web_search_options")}
    refused(lambda: decode(body_of(**some), ChatRequest), "prediction", "invalid_value")
    assert decode(body_of(allowed_token_ids=list(range(200_000))), ChatRequest).allowed_token_ids is not None
    for name in ("stop", "bad_words", "documents", "allowed_token_ids", "zzz"):
        fault = refused(partial(decode, body_of(**{name: [7] * 300_000}), ChatRequest), name, "invalid_value")
        assert "larger than" in fault.message


# Prompts


def raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


def prompts_of(text: str, max_prompts: int = 4, max_ids: int = 8) -> list[Any]:
    return list(asyncio.run(read_prompts(raw(text), max_prompts=max_prompts, max_ids=max_ids)))


def some(items: st.SearchStrategy[Any], max_size: int = 4) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, min_size=1, max_size=max_size)


ids = some(st.integers(-(2**40), 2**40), 8)


@unhurried
@given(texts.filter(bool).map(lambda text: [text]) | ids.map(lambda ids: [ids]), layouts)
def test_a_text_or_ids_are_one_prompt(prompts: list[Any], layout: Any) -> None:
    assert prompts_of(json.dumps(prompts[0], **layout)) == prompts


@unhurried
@given(some(texts.filter(bool)) | some(ids), layouts)
def test_texts_or_lists_of_ids_are_several(prompts: list[Any], layout: Any) -> None:
    assert prompts_of(json.dumps(prompts, **layout)) == prompts


@unhurried
@given(plain_json, layouts)
def test_anything_else_is_no_prompt(value: Any, layout: Any) -> None:
    outcome = tried(lambda: prompts_of(json.dumps(value, **layout)))
    assert outcome.status == 400 if isinstance(outcome, ApiError) else outcome in ([value], value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("null", "missing_required_parameter"), ("", "missing_required_parameter"), ("[]", "invalid_value"),
        ("1", "invalid_type"), ("{}", "invalid_type"), ("true", "invalid_type"), ("[null]", "invalid_type"),
        ("[true]", "invalid_type"), ('["a", 1]', "invalid_type"), ('[1, "a"]', "invalid_type"),
        ('[[1], "a"]', "invalid_type"), ('[["a"]]', "invalid_type"), ("[[[1]]]", "invalid_type"),
        ("[1.5]", "invalid_type"), ('["a", ""]', "invalid_value"), ("[[1], []]", "invalid_value"),
        ("[[null]]", "invalid_type"), ("[{}]", "invalid_type"), ('["a", null]', "invalid_type"),
        (LONE_SURROGATE, "invalid_type"), ("[1, 2, 3, 4, 5, 6, 7, 8, 9]", "context_length_exceeded"),
        ("[[1, 2, 3, 4, 5, 6, 7, 8, 9]]", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_a_bad_prompt_is_refused(text: str, code: str) -> None:
    refused(lambda: prompts_of(text), "prompt", code)


@pytest.mark.parametrize("text", ['["a", "b", "c"]', "[[1], [2], [3]]", json.dumps(["a"] * 9), json.dumps([[1]] * 9)])
def test_too_many_prompts_are_refused(text: str) -> None:
    assert "more than 2 prompts" in refused(lambda: prompts_of(text, max_prompts=2)).message


# Messages


@unhurried
@given(
    st.lists(
        st.fixed_dictionaries({"role": texts, "content": texts}, optional={"name": texts, "refusal": texts}),
        min_size=1,
        max_size=4,
    ),
    layouts,
)
def test_messages_come_through_as_they_are(messages: list[dict[str, Any]], layout: Any) -> None:
    assert read_messages(raw(json.dumps(messages, **layout)), 4) == messages


def test_what_says_nothing_is_left_out_of_a_message() -> None:
    message = {
        "role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None,
        "tool_calls": None, "annotations": [{"type": "url_citation"}], "name": None,
    }  # fmt: skip
    assert read_messages(raw(json.dumps([message])), 1) == [{"role": "assistant", "content": None}]


def test_parts_of_text_come_through() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "d"}], "signature": "e"}
    given = ["a", {"text": "b", "cache_control": {}}, {"type": "refusal", "refusal": "c"}, thought]
    (message,) = read_messages(raw(json.dumps([{"role": "assistant", "content": given}])), 9)
    assert check_messages([message]) == [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": text} for text in ("a", "b", "c")],
            "reasoning_content": "d",
        }
    ]


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ("null", "messages", "missing_required_parameter"),
        ("[]", "messages", "invalid_value"),
        ('"hello"', "messages", "invalid_type"),
        ("{}", "messages", "invalid_type"),
        ("[1]", "messages", "invalid_type"),
        ('[{"content": "a"}]', "messages", "invalid_type"),
        ('[{"role": 1, "content": "a"}]', "messages", "invalid_type"),
        ('[{"role": "user", "content": 1}]', "messages", "invalid_type"),
        ('[{"role": "user", "content": [1]}]', "messages", "invalid_type"),
        ('[{"role": "user", "content": [{"text": 1}]}]', "messages", "invalid_type"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "messages", "invalid_value"),
        ('[{"role": "user", "tool_calls": 1}]', "messages", "invalid_type"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "messages[0].content", "unsupported_parameter"),
        ('[{"role": "user", "audio": {"id": "1"}}]', "messages[0].audio", "unsupported_parameter"),
        ('[{"role": "user", "function_call": {}}]', "messages[0].function_call", "unsupported_parameter"),
    ],
)
def test_a_bad_message_is_refused(messages: str, param: str, code: str) -> None:
    refused(lambda: read_messages(raw(messages), 9), param, code)


# What becomes of them


def test_only_what_is_given_is_told_to_the_sampler() -> None:
    assert decode(b"{}", ChatRequest).sampling() == {}
    assert decode(b"{}", CompletionRequest).sampling() == {"max_tokens": 16}
    assert decode(body_of(n=None, seed=3, top_p=1), ChatRequest).sampling() == {"seed": 3, "top_p": 1.0}


def test_an_echo_asks_for_the_prompts_log_probabilities() -> None:
    echo = decode(body_of(echo=True, logprobs=2, max_tokens=0), CompletionRequest)
    assert echo.is_echo_alone
    assert echo.sampling() == {"max_tokens": 1, "logprobs": 2, "prompt_logprobs": 2}
    assert "prompt_logprobs" not in decode(body_of(logprobs=2), CompletionRequest).sampling()
    for num_top, computed in ((1, 2), (5, 5)):
        more = decode(body_of(echo=True, logprobs=2, prompt_logprobs=num_top), CompletionRequest)
        assert more.sampling()["prompt_logprobs"] == computed


def test_a_chats_limit_and_log_probabilities_have_names_of_their_own() -> None:
    assert decode(body_of(max_completion_tokens=7), ChatRequest).sampling() == {"max_tokens": 7}
    assert checked(ChatRequest, max_tokens=7, max_completion_tokens=7).sampling() == {"max_tokens": 7}
    assert checked(ChatRequest, logprobs=True, top_logprobs=3).sampling() == {"logprobs": 3}
    assert checked(ChatRequest, logprobs=True).sampling() == {"logprobs": 0}
    assert checked(ChatRequest, logprobs=False, top_logprobs=0).sampling() == {}


def test_null_is_as_good_as_nothing() -> None:
    request = decode(b'{"prompt": null}', TokenizeRequest)
    assert not is_given(request.prompt)
    assert not is_given(request.messages)
    assert read_text(raw(' "null"'), "prompt") == "null"
    assert read_tokens(raw("[]"), 3) == []
    for name in Generation.__struct_fields__:
        assert getattr(decode(body_of(**{name: None}), Generation), name) is None
