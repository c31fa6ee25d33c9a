"""From a request's body to what is in it, without holding the loop: a large body is looked at before it is decoded.

A JSON parser makes an object of each value, under the GIL, a thousand in a tenth of a millisecond. So prompts, messages
and token ids stay undecoded (`msgspec.Raw`) while the rest is read, and each of them has bounds of its own.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from aioengine.errors import PromptTooLong
from aioengine.server.errors import ApiError, api_error_of, invalid_value, missing, unknown_field, unsupported
from aioengine.server.schema import Body, ChatMessage, StreamOptions, TextPart, is_given, known_names
from aioengine.validation import MAX_NAME_CHARS, shorten

T = TypeVar("T", bound=Body)

logger = logging.getLogger("aioengine.server")

SMALL_BODY_BYTES = 2**16
"""A body up to here is decoded in a millisecond whatever is in it."""
LARGE_FIELDS = ("prompt", "messages", "tokens", "tools", "functions")
"""They are decoded apart from the rest, or not at all."""
MAX_FIELD_BYTES = 2**16
"""Of all other fields together, without `allowed_token_ids`."""
MAX_ALLOWED_IDS = 2**18
"""Of `allowed_token_ids`: a large vocabulary, id by id."""
IDS_A_TURN = 20_000
"""Token ids that are decoded between two turns for others: half a millisecond."""
MAX_OTHER_TEXTS = 2**14
"""JSON texts in a body beside its prompts and messages."""
TEXTS_A_MESSAGE = 32
MAX_TOOL_BYTES = 2**20
MAX_TOOL_VALUES = 2**14
"""Of all tool calls in a chat: a value is decoded and copied in a microsecond, and a call has about ten."""
MAX_TOLD_NAMES = 100
"""Ignored fields that the log tells of: their names are the clients' choice."""
MAX_TOLD_AT_ONCE = 4
"""Of them in one request: looking for the name that was meant takes a millisecond each."""


class IgnoredFields:
    """Tells in the log what requests have and is left out of them, once a name; or refuses what is not known.

    Args:
        unknown: what to do with fields that are not known.
    """

    def __init__(self, unknown: Literal["ignore", "refuse"] = "refuse") -> None:
        self._unknown = unknown
        self._told: set[str] = set()

    def check(self, fields: dict[str, msgspec.Raw], kind: type[Body]) -> None:
        """Tell of the fields that are left out.

        Raises:
            ApiError: 400; one is not known, and such ones are refused.
        """
        self._check_unknown(fields.keys(), known_names(kind), "")
        if is_given(options := fields.get("stream_options", msgspec.Raw())):
            names = _decode_part(bytes(options), dict[str, msgspec.Raw], "stream_options").keys()
            self._check_unknown(names, frozenset(StreamOptions.__struct_fields__), "stream_options.")
        for name in kind.LEFT_OUT:
            if name in fields and bytes(memoryview(fields[name])[:5]) not in (b"null", b"[]") and self._is_new(name):
                logger.warning("requests have %s, which are not supported yet and left out (said once)", name)

    def _check_unknown(self, names: Iterable[str], known: frozenset[str], place: str) -> None:
        new = [name for name in names if name not in known and place + name not in self._told]
        if new and self._unknown == "refuse":
            raise unknown_field(place + new[0], _nearest(new[0], known) or "; leave it out")
        for name in new[:MAX_TOLD_AT_ONCE]:
            if self._is_new(place + name):
                near = _nearest(name, known)
                logger.warning(
                    "requests have the unknown field %s, which is ignored%s (said once)", shorten(place + name), near
                )

    def _is_new(self, name: str) -> bool:
        """Whether the log has not told of it, and still may; it then has."""
        if name in self._told or len(self._told) >= MAX_TOLD_NAMES or len(name) > MAX_NAME_CHARS:
            return False
        self._told.add(name)
        return True


REFUSING = IgnoredFields("refuse")


def decode(body: bytes, kind: type[T], *, max_texts: int = 0, ignored: IgnoredFields = REFUSING) -> T:
    """The body as a ``kind``.

    A JSON parser holds the loop, so that a large body is looked at first: how many texts it may have, and how large its
    fields are, decides what it can cost.

    Args:
        max_texts: JSON texts that a large body may have in its prompt or messages.
        ignored: is told of fields that are left out.
    Raises:
        ApiError: 400; names the field where there is one.
    """
    if len(body) > SMALL_BODY_BYTES:
        _check_texts(body, max_texts)
    _check_fields(body, kind, ignored)
    return _decoded(body, kind)


async def decode_in_turns(body: bytes, kind: type[T], *, max_texts: int, ignored: IgnoredFields) -> T:
    """As `decode`, with turns for others between its passes over a large body: each takes a millisecond a MiB."""
    await asyncio.sleep(0)
    _check_texts(body, max_texts)
    await asyncio.sleep(0)
    _check_fields(body, kind, ignored)
    await asyncio.sleep(0)
    decoded = _decoded(body, kind)
    await asyncio.sleep(0)  # its prompt is decoded next
    return decoded


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _undecodable(error, body) from None


def _check_texts(body: bytes, max_texts: int) -> None:
    if has_more_texts(body, MAX_OTHER_TEXTS + max_texts):
        raise ApiError(400, None, "the request has too many prompts, messages or other texts; send less at once")


def _check_fields(body: bytes, kind: type[Body], ignored: IgnoredFields) -> None:
    """Refuse fields that are not supported, and large ones other than those that are meant to be.

    Decoding a large field makes objects of all that is in it.
    """
    fields = _decoded_fields(body)
    num_bytes = 0
    for name, value in fields.items() if len(body) > SMALL_BODY_BYTES else ():
        size = len(memoryview(value))
        if name == "allowed_token_ids" and bytes(value).count(b",") < MAX_ALLOWED_IDS:
            continue
        num_bytes += 0 if name in LARGE_FIELDS else size
        if num_bytes > MAX_FIELD_BYTES:
            raise invalid_value(
                name[:MAX_NAME_CHARS], f"all but the prompt is larger than {MAX_FIELD_BYTES:,} bytes; send less"
            )
    ignored.check(fields, kind)
    kind.check_unsupported(fields)


def _decoded_fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _undecodable(error, body) from None


def has_more_texts(data: bytes, limit: int) -> bool:
    """Whether more than ``limit`` JSON texts may be in it: each has an opening quote, and that is never escaped.

    Most bodies have too few quotes for that, escaped ones and all.
    """
    num_quotes = data.count(b'"')
    return num_quotes > limit and num_quotes - data.count(b'\\"') > limit


_HALF_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")


def _undecodable(error: Exception, body: bytes) -> ApiError:
    """The error of a ``body`` that is no JSON, or not of the kind that is needed."""
    if not isinstance(error, msgspec.ValidationError):
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if not body:
            reason = "it is empty"
        elif "truncated" in reason and _HALF_SURROGATE.search(body) and body.rstrip().endswith(b"}"):
            reason = "a text in it holds half a surrogate pair"
        elif "truncated" in reason or (reason.endswith(f"(byte {len(body)})") and "trailing" not in reason):
            reason = f"it ends in the middle, after {len(body):,} bytes: it has been truncated"
        return ApiError(400, "invalid_json", f"the request's body is not valid JSON: {reason}")
    message = str(error)
    match = _PLACE.search(message)
    place = match.group(1) if match is not None else ""
    said = message[: match.start()] if match is not None else message
    said = said[0].lower() + said[1:].replace("int | float", "int")
    name = re.split(r"[.\[]", place, maxsplit=1)[0]
    where = place or "the request's body"
    return ApiError(400, "invalid_type", f"{where}: {said}", param=name or None)


def _nearest(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1) if len(name) <= MAX_NAME_CHARS else []
    return f"; did you mean {near[0]!r}?" if near else ""


# Prompts, messages, tokens


def read_messages(raw: msgspec.Raw, max_messages: int) -> list[dict[str, Any]]:
    """A chat's messages as the engine takes them.

    Raises:
        ApiError: 400; says which message is wrong and how.
    """
    data = _required(raw, "messages")
    if has_more_texts(data, TEXTS_A_MESSAGE * max_messages):
        raise _too_many("messages", max_messages)
    messages = _decode_part(data, list[ChatMessage], "messages")
    if not messages:
        raise invalid_value("messages", "messages is empty; give at least one")
    if len(messages) > max_messages:
        raise _too_many("messages", max_messages)
    _check_tool_calls([bytes(message.tool_calls) for message in messages if is_given(message.tool_calls)])
    return [_plain_message(place, message) for place, message in enumerate(messages)]


def _check_tool_calls(calls: list[bytes]) -> None:
    """Refuse what would take long to decode and copy."""
    if sum(map(len, calls)) > MAX_TOOL_BYTES:
        raise invalid_value(
            "messages", f"the messages' tool_calls have more than {MAX_TOOL_BYTES:,} bytes; send less at once"
        )
    # Values are counted by what stands around them; arguments are texts, and full of that.
    structure = b"".join([part for call in calls for part in _without_escapes(call).split(b'"')[::2]])
    if sum(map(structure.count, (b",", b"[", b"{"))) > MAX_TOOL_VALUES:
        raise invalid_value(
            "messages", f"the messages' tool_calls have more than {MAX_TOOL_VALUES:,} values; send less at once"
        )


def _without_escapes(data: bytes) -> bytes:
    """JSON in which each quote begins or ends a text."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"")


def _plain_message(place: int, message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        plain["content"] = "\n".join([_text_of(place, part) for part in message.content])
    elif message.content is not None:
        plain["content"] = message.content
    for name in ChatMessage.TEMPLATE_TEXTS:
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    for name, value in (("audio", message.audio), ("function_call", message.function_call)):
        if is_given(value):
            raise unsupported(f"messages[{place}].{name}")
    if is_given(message.tool_calls):
        plain["tool_calls"] = _decode_part(message.tool_calls, list[dict[str, Any]], f"messages[{place}].tool_calls")
    return plain


def _text_of(place: int, part: TextPart) -> str:
    """A text part's text; the parts of a message are joined by newlines, as the engine would join them."""
    name = f"messages[{place}].content"
    if part.type != "text":
        raise unsupported(name, f"has a part of type {shorten(part.type)}; give texts")
    if part.has_more():
        raise unsupported(name, "has a part that is a text and something else; give texts")
    if part.text is None:
        raise invalid_value("messages", f"{name} has a text part without a text")
    return part.text


async def read_prompts(raw: msgspec.Raw, *, max_prompts: int, max_ids: int) -> list[str | list[int]]:
    """A completion's prompts: a text, token ids, or a list of either; with turns for others between many ids.

    Args:
        max_ids: the most token ids of one prompt; more are refused uncounted.
    Raises:
        ApiError: 400.
    """
    data = _required(raw, "prompt")
    kind = _kind_of(data)
    if kind == "text":
        return [_decode_part(data, str, "prompt")]
    if kind == "ids":
        return [_read_ids(data, max_ids, "prompt")]
    if kind == "empty":
        raise invalid_value("prompt", "the prompt is empty; give at least one character or token id")
    if kind == "texts":
        if has_more_texts(data, 2 * max_prompts):
            raise _too_many("prompts", max_prompts)
        prompts: list[Any] = _decode_part(data, list[str], "prompt")
    else:
        prompts = await _read_lists(data, max_prompts, max_ids)
    if len(prompts) > max_prompts:
        raise _too_many("prompts", max_prompts)
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise invalid_value("prompt", f"prompt[{place}] is empty; give at least one character or token id")
    return prompts


async def _read_lists(data: bytes, max_prompts: int, max_ids: int) -> list[list[int]]:
    if data.count(b"[") > max_prompts + 1:
        raise _too_many("prompts", max_prompts)
    prompts, num_ids = [], 0
    for place, item in enumerate(_decode_part(data, list[msgspec.Raw], "prompt")):
        prompts.append(_read_ids(bytes(item), max_ids, f"prompt[{place}]"))
        num_ids += len(prompts[-1])
        if num_ids > IDS_A_TURN:
            num_ids = 0
            await asyncio.sleep(0)
    return prompts


def read_text(raw: msgspec.Raw, name: str) -> str:
    """A field that holds one text."""
    text: str = _decode_part(_required(raw, name), str, name)
    return text


def read_tokens(raw: msgspec.Raw, max_ids: int) -> list[int]:
    """A field that holds one list of token ids."""
    return _read_ids(_required(raw, "tokens"), max_ids, "tokens")


def _read_ids(data: bytes, max_ids: int, name: str) -> list[int]:
    num_ids = data.count(b",") + 1
    if num_ids > max_ids:
        # Decoding them would take 30 ns each, on the loop.
        if name != "tokens":
            raise api_error_of(PromptTooLong(num_ids, max_ids - 1))
        message = f"{name} has {num_ids:,} token ids; at most {max_ids:,} are allowed (max_model_len)"
        raise ApiError(400, "context_length_exceeded", message, param=name)
    ids: list[int] = _decode_part(data, list[int], name)
    return ids


_KINDS: tuple[tuple[re.Pattern[bytes], Literal["text", "ids", "empty", "texts", "lists"]], ...] = (
    (re.compile(rb"\s*\""), "text"),
    (re.compile(rb"\s*\[\s*\]"), "empty"),
    (re.compile(rb"\s*\[\s*\""), "texts"),
    (re.compile(rb"\s*\[\s*\["), "lists"),
    (re.compile(rb"\s*\[\s*-?\d"), "ids"),
)


def _kind_of(data: bytes) -> Literal["text", "ids", "empty", "texts", "lists"]:
    for pattern, kind in _KINDS:
        if pattern.match(data):
            return kind
    message = "prompt: a text, a list of token ids, or a list of texts or of lists of token ids is needed"
    raise ApiError(400, "invalid_type", message, param="prompt")


def _required(raw: msgspec.Raw, name: str) -> bytes:
    if not is_given(raw):
        raise missing(name)
    return bytes(raw)


def _decode_part(data: bytes, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        said = re.sub(r" - at `\$(.*)`$", r" (at \1)", str(error))
        raise ApiError(400, "invalid_type", f"{name}: {said}", param=re.split(r"[.\[]", name)[0]) from None


def _too_many(what: str, limit: int) -> ApiError:
    return ApiError(400, "invalid_value", f"more than {limit:,} {what} in one request; send fewer at once")
