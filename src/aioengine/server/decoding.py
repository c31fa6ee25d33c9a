"""From an exchange to what is in its body, within a size and a time, and without holding the loop.

A JSON parser makes an object of each value, under the GIL, a thousand in a tenth of a millisecond. So a large body is
looked at before it is decoded. Prompts, messages and token ids stay undecoded (`msgspec.Raw`) while the rest is read,
and have bounds of their own. What is wrong with any of it is an `ApiError` of status 400, which names the
field where there is one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import anyio
import msgspec

from aioengine.errors import PromptTooLong
from aioengine.processes.turns import turns_here
from aioengine.server.config import ServerConfig
from aioengine.server.errors import ApiError, api_error_of, invalid_value, missing, overloaded, unsupported
from aioengine.server.exchange import Exchange, PerLoop
from aioengine.server.schema import Body, ChatMessage, StreamOptions, TextPart, is_given, known_names
from aioengine.text.chat_input import TEXT_PARTS
from aioengine.validation import MAX_NAME_CHARS, nearest, shorten

T = TypeVar("T", bound=Body)
Item = TypeVar("Item", bound=msgspec.Struct)

logger = logging.getLogger("aioengine.server")

MAX_BODIES_AT_ONCE = 64
"""Bodies of the largest size that may be on their way in at once."""
LINGER_S = 2.0
MAX_LINGER_BYTES = 2**26
"""Bytes that are still taken from a client whose body is refused: most read no answer before they have sent it all."""
SMALL_BODY_BYTES = 2**16
"""A body up to here is decoded in a millisecond whatever is in it."""
LARGE_FIELDS = ("prompt", "messages", "input", "instructions", "system", "tokens", "tools", "functions")
"""They are decoded apart from the rest, or not at all."""
MAX_FIELD_BYTES = 2**16
"""Bytes of all other fields together, without `allowed_token_ids`."""
IDS_A_TURN = 20_000
"""Token ids that are decoded, or encoded, between two turns for others: half a millisecond."""
MAX_OTHER_TEXTS = 2**14
"""JSON texts in a body beside its prompts and messages."""
TEXTS_A_MESSAGE = 32
MAX_TOOL_BYTES = 2**20
MAX_TOOL_VALUES = 2**14
"""Values of all tool calls in a chat: a value is decoded and copied in a microsecond, and a call has about ten."""
MAX_TOLD_NAMES = 100
"""Ignored fields that are logged: their names are the clients' choice."""


class IgnoredFields:
    """Logs fields of requests that are left out, once a name; or refuses those that are not known.

    Args:
        unknown: what to do with fields that are not known.
    """

    def __init__(self, unknown: Literal["ignore", "refuse"] = "refuse") -> None:
        self._unknown = unknown
        self._logged: set[str] = set()

    def check(self, fields: dict[str, msgspec.Raw], kind: type[Body]) -> None:
        """Refuse fields that are not supported and would change the answer; log those that are left out."""
        self._check_unknown(fields, known_names(kind), "")
        if is_given(options := fields.get("stream_options", msgspec.Raw())):
            names = _decode(bytes(options), dict[str, msgspec.Raw], "stream_options")
            self._check_unknown(names, frozenset(StreamOptions.__struct_fields__), "stream_options.")
        for name, value in fields.items():
            if name in kind.NEUTRAL and is_given(value) and not _is_one_of(value, kind.NEUTRAL[name]):
                raise unsupported(name, *([kind.INSTEAD[name]] if name in kind.INSTEAD else []))
            if name in kind.LEFT_OUT and is_given(value) and bytes(value) != b"[]" and self._is_new(name):
                logger.warning("requests have %s, which are not supported yet and left out (logged once)", name)

    def _check_unknown(self, names: Iterable[str], known: frozenset[str], place: str) -> None:
        new = [name for name in names if name not in known and place + name not in self._logged]
        # Ignored fields that are logged of one request: looking for the name that was meant takes a millisecond each.
        for name in new[:4]:
            whole = place + name
            if self._unknown == "refuse":
                message = f"unknown field {shorten(whole)}{nearest(name, sorted(known)) or '; leave it out'}"
                raise ApiError(400, "unknown_parameter", message, param=whole[:MAX_NAME_CHARS])
            if self._is_new(whole):
                near = nearest(name, sorted(known))
                logger.warning(
                    "requests have the unknown field %s, which is ignored%s (logged once)", shorten(whole), near
                )

    def _is_new(self, name: str) -> bool:
        """Whether a field has not been logged, and still may be; it then counts as logged."""
        if name in self._logged or len(self._logged) >= MAX_TOLD_NAMES or len(name) > MAX_NAME_CHARS:
            return False
        self._logged.add(name)
        return True


REFUSING = IgnoredFields("refuse")


def decode(body: bytes, kind: type[T], *, ignored: IgnoredFields = REFUSING) -> T:
    """The body, of at most `SMALL_BODY_BYTES`, as a ``kind``."""
    _check_fields(body, kind, ignored)
    decoded: T = _decode(body, kind)
    return decoded


def _check_fields(body: bytes, kind: type[Body], ignored: IgnoredFields) -> None:
    """Refuse fields that are not supported, and large ones: decoding one makes objects of all that is in it."""
    fields: dict[str, msgspec.Raw] = _decode(body, dict[str, msgspec.Raw])
    num_bytes = 0
    for name, value in fields.items() if len(body) > SMALL_BODY_BYTES else ():
        size = len(memoryview(value))
        # Ids in `allowed_token_ids`: a large vocabulary, id by id.
        if name == "allowed_token_ids" and bytes(value).count(b",") < 2**18:
            continue
        num_bytes += 0 if name in LARGE_FIELDS else size
        if num_bytes > MAX_FIELD_BYTES:
            raise invalid_value(
                name[:MAX_NAME_CHARS], f"all but the prompt is larger than {MAX_FIELD_BYTES:,} bytes; send less"
            )
    ignored.check(fields, kind)


def _is_one_of(raw: msgspec.Raw, values: tuple[Any, ...]) -> bool:
    # Bytes of a refused field's value: one that asks for nothing is short, and a long one need not be decoded.
    if len(memoryview(raw)) > 64:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # what was passed over undecoded may be no JSON
        return False
    return any(value == other and type(value) is type(other) for other in values)


def has_more_texts(data: bytes, limit: int) -> bool:
    """Whether more than ``limit`` JSON texts may be in it: each has an opening quote, and that is never escaped."""
    num_quotes = data.count(b'"')
    return num_quotes > limit and num_quotes - data.count(b'\\"') > limit


# From an exchange


class BodyReader:
    """Reads bodies and decodes them, and bounds what all of them hold together.

    The number of texts in a large body, and the sizes of its fields, bound the cost of decoding it. Others have turns
    between the passes over it: each takes a millisecond a MiB.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._timeout_s = config.body_timeout_s
        self._max_texts = MAX_OTHER_TEXTS + TEXTS_A_MESSAGE * config.max_messages
        self._ignored = IgnoredFields(config.unknown_fields)
        self._decoding = PerLoop(asyncio.Lock)
        """For large bodies: one of them a turn of the loop."""
        self._num_bytes = 0
        """Held by bodies that have not come to their end yet."""

    async def read(self, exchange: Exchange, kind: type[T], max_bytes: int) -> T:
        """The body as a ``kind``.

        Raises:
            ApiError: it is not JSON (415), see `_read_whole`, or no such thing (400).
            ClientGone: it did not come to its end.
        """
        media_type = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # A page of any origin can make a browser send other types here without asking first.
            given = f", and was sent as {media_type[:100]}" if media_type else ""
            message = f"the body must be JSON{given}: with curl, add -H 'Content-Type: application/json'"
            raise ApiError(415, "unsupported_media_type", message)
        body = await self._read_whole(exchange, max_bytes)
        # A body up to here is decoded in the turn in which it has come.
        if len(body) > 2**12:  # many such may have come to their ends together
            await turns_here().take()
        if len(body) <= SMALL_BODY_BYTES:
            return decode(body, kind, ignored=self._ignored)
        async with self._decoding.get():  # many that came together would hold the loop together
            await asyncio.sleep(0)
            if has_more_texts(body, self._max_texts):
                raise ApiError(
                    400, None, "the request has too many prompts, messages or other texts; send less at once"
                )
            await asyncio.sleep(0)
            _check_fields(body, kind, self._ignored)
            await asyncio.sleep(0)
            decoded: T = _decode(body, kind)
            await asyncio.sleep(0)  # its prompt is decoded next
            return decoded

    async def _read_whole(self, exchange: Exchange, max_bytes: int) -> bytes:
        """The whole body, of at most ``max_bytes``.

        Raises:
            ApiError: it is too large (413, from its announced length if it has one), too slow (408), there is no
                room for it beside the others (503), or it is compressed (415).
            ClientGone: it did not come to its end.
        """
        message = f"the request's body is larger than this server takes ({max_bytes:,} bytes, max_body_bytes)"
        too_large = ApiError(413, "request_too_large", message, headers={"connection": "close"})
        announced = exchange.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > max_bytes:
            await self._refuse(exchange, too_large)
        encoding = exchange.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            message = f"the body is compressed (Content-Encoding {encoding[:100]!r}): send it as it is"
            headers = {"accept-encoding": "identity", "connection": "close"}
            await self._refuse(exchange, ApiError(415, "unsupported_encoding", message, headers=headers))
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            with anyio.fail_after(self._timeout_s):
                while piece := await exchange.read():
                    pieces.append(piece)
                    num_bytes += len(piece)
                    self._num_bytes += len(piece)
                    if num_bytes > max_bytes:
                        pieces.clear()
                        await self._refuse(exchange, too_large)
                    if self._num_bytes > MAX_BODIES_AT_ONCE * max_bytes:
                        message = "too many large requests are being sent at once; try again later"
                        raise overloaded(message, 1, connection="close")
                return b"".join(pieces)
        except TimeoutError:
            message = f"the request's body did not come within {self._timeout_s:g} s"
            raise ApiError(408, "timeout", message, headers={"connection": "close"}) from None
        finally:
            self._num_bytes -= num_bytes

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        """Raise, but first take what still comes, for a while: a client that is cut off in sending hears no answer."""
        if exchange.headers.get("expect", "").lower() != "100-continue":  # that one waits to be asked for it
            with anyio.move_on_after(LINGER_S):
                num_bytes = 0
                while num_bytes < MAX_LINGER_BYTES and (piece := await exchange.read()):
                    num_bytes += len(piece)
        raise error


# Prompts, messages, tokens


def read_messages(raw: msgspec.Raw, max_messages: int) -> list[dict[str, Any]]:
    """A chat's messages as the engine takes them."""
    messages = read_items(raw, ChatMessage, "messages", max_messages)
    calls = [bytes(message.tool_calls) for message in messages if is_given(message.tool_calls)]
    _check_size(calls, "messages", "the messages' tool_calls have")
    return [_plain_message(place, message) for place, message in enumerate(messages)]


def read_items(raw: msgspec.Raw, kind: type[Item], name: str, max_items: int) -> list[Item]:
    """A field that holds a list of a chat's messages, or of their parts, with one at least."""
    data = _required(raw, name)
    if has_more_texts(data, TEXTS_A_MESSAGE * max_items):
        raise too_many(name, max_items)
    items: list[Item] = _decode(data, list[kind], name)  # type: ignore[valid-type]
    if not items:
        raise invalid_value(name, f"{name} is empty; give at least one")
    if len(items) > max_items:
        raise too_many(name, max_items)
    return items


def read_tools(raw: msgspec.Raw) -> list[dict[str, Any]] | None:
    """A chat's tools as the engine takes them; None: there are none."""
    if not is_given(raw):
        return None
    _check_size([bytes(raw)], "tools", "tools has")
    tools: list[dict[str, Any]] = _decode(bytes(raw), list[dict[str, Any]], "tools")
    return tools


def _check_size(values: list[bytes], param: str, they_have: str) -> None:
    """Refuse JSON of tools that would take long to decode and copy."""
    if sum(map(len, values)) > MAX_TOOL_BYTES:
        raise invalid_value(param, f"{they_have} more than {MAX_TOOL_BYTES:,} bytes; send less at once")
    # Values are counted by what stands around them; arguments are texts, and full of that. Without what is escaped each
    # quote begins or ends a text.
    plain = (value.replace(b"\\\\", b"").replace(b'\\"', b"") for value in values)
    structure = b"".join([part for call in plain for part in call.split(b'"')[::2]])
    if sum(map(structure.count, (b",", b"[", b"{"))) > MAX_TOOL_VALUES:
        raise invalid_value(param, f"{they_have} more than {MAX_TOOL_VALUES:,} values; send less at once")


def _plain_message(place: int, message: ChatMessage) -> dict[str, Any]:
    for name in ("audio", "function_call"):
        if is_given(getattr(message, name)):
            raise unsupported(f"messages[{place}].{name}")
    plain: dict[str, Any] = {"role": message.role}
    if message.content is not msgspec.UNSET:
        plain["content"] = message.content
    if isinstance(message.content, list):
        parts: list[str | dict[str, Any]] = []
        plain["content"] = parts
        for part in message.content:
            if isinstance(part, str):
                parts.append(part)
                continue
            name, field = f"messages[{place}].content", TEXT_PARTS.get(part.type)
            if field is None:
                raise unsupported(name, f"has a part of type {shorten(part.type)}; give texts")
            if getattr(part, field) is None:
                raise invalid_value("messages", f"{name} has a part of type {part.type} without a {field}")
            parts.append({"type": part.type, **msgspec.to_builtins(part)})
    for name in ChatMessage.TEMPLATE_TEXTS:
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if is_given(message.tool_calls):
        plain["tool_calls"] = _decode(message.tool_calls, list[dict[str, Any]], f"messages[{place}].tool_calls")
    return plain


def joined_texts(place: str, content: str | list[TextPart]) -> str:
    """The texts of a content of which the template gets one; ``place`` begins with the field that holds it."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"):
            name = place.partition("[")[0]
            raise unsupported(name, f"has a part of type {shorten(part.type)} ({place}); give texts")
    return "\n".join([part.text or part.refusal or "" for part in content])


async def read_prompts(raw: msgspec.Raw, *, max_prompts: int, max_ids: int) -> list[str | list[int]]:
    """A completion's prompts: a text, token ids, or a list of either; with turns for others between many ids.

    Args:
        max_ids: the most token ids of one prompt.
    """
    data = _required(raw, "prompt")
    match = _KIND.match(data)
    if match is None:
        needed = "a text, a list of token ids, or a list of texts or of lists of token ids is needed"
        raise _invalid_type("prompt", needed)
    kind = match.lastgroup
    if kind == "text":
        return [_decode(data, str, "prompt")]
    if kind == "ids":
        return [_read_ids(data, max_ids, "prompt")]
    if kind == "empty":
        raise invalid_value("prompt", "the prompt is empty; give at least one character or token id")
    if kind == "texts":
        if has_more_texts(data, 2 * max_prompts):
            raise too_many("prompts", max_prompts)
        prompts: list[Any] = _decode(data, list[str], "prompt")
    else:
        if data.count(b"[") > max_prompts + 1:
            raise too_many("prompts", max_prompts)
        prompts, num_ids = [], 0
        for place, item in enumerate(_decode(data, list[msgspec.Raw], "prompt")):
            prompts.append(_read_ids(bytes(item), max_ids, f"prompt[{place}]"))
            num_ids += len(prompts[-1])
            if num_ids > IDS_A_TURN:
                num_ids = 0
                await asyncio.sleep(0)
    if len(prompts) > max_prompts:
        raise too_many("prompts", max_prompts)
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise invalid_value("prompt", f"prompt[{place}] is empty; give at least one character or token id")
    return prompts


def is_text(raw: msgspec.Raw) -> bool:
    """Whether a field that is given holds a text."""
    return bytes(memoryview(raw)[:1]) == b'"'


def read_text(raw: msgspec.Raw, name: str) -> str:
    """A field that holds one text."""
    return str(_decode(_required(raw, name), str, name))


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
    ids: list[int] = _decode(data, list[int], name)
    return ids


_KIND = re.compile(rb'\s*(?:(?P<text>")|\[\s*(?:(?P<empty>\])|(?P<texts>")|(?P<lists>\[)|(?P<ids>-?\d)))')


def _required(raw: msgspec.Raw, name: str) -> bytes:
    if not is_given(raw):
        raise missing(name)
    return bytes(raw)


_HALF_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r" - at `(?:key` in `)?\$(.*)`$")


def _decode(data: bytes, kind: Any, name: str = "") -> Any:
    """The whole body, or a field of it that was left undecoded, as a ``kind``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        match = _PLACE.search(message)
        reason, place = (message[: match.start()], match[1]) if match is not None else (message, "")
        reason = reason[0].lower() + reason[1:].replace("int | float", "int")
        raise _invalid_type((name + place).removeprefix("."), reason) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if name:  # what was passed over undecoded may be no JSON
            raise _invalid_type(name, reason) from None
        if not data:
            reason = "it is empty"
        elif "truncated" in reason and _HALF_SURROGATE.search(data):
            reason = "it ends in the middle, or a text in it holds half a surrogate pair"
        raise ApiError(400, "invalid_json", f"the request's body is not valid JSON: {reason}") from None


def _invalid_type(place: str, reason: str) -> ApiError:
    """A value of another type than is needed, at a place such as ``stop[...]``; "": the whole body."""
    name = re.split(r"[.\[]", place, maxsplit=1)[0]
    return ApiError(400, "invalid_type", f"{place or 'the request body'}: {reason}", param=name or None)


def too_many(what: str, limit: int) -> ApiError:
    return ApiError(400, "invalid_value", f"more than {limit:,} {what} in one request; send fewer at once")


class ChatBuilder:
    """Puts messages together: one for consecutive pieces of the assistant, and one of the system, as templates need it.

    Attributes:
        messages: so far, as the engine takes them.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, text: str) -> None:
        """Add a message of another than the assistant; one of the system goes on with the one before."""
        if role == "system" and self._last_role == role:
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def add_answer(self, text: str) -> None:
        """Add a text of the assistant."""
        self._assistant_before("content", "tool_calls")["content"] = text

    def add_reasoning(self, text: str) -> None:
        """Add reasoning of the assistant, which is before its text."""
        self._assistant_before("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call that the assistant asks for; ``arguments`` is JSON."""
        function = {"name": name, "arguments": arguments}
        calls = self._assistant_before().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    @property
    def _last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def _assistant_before(self, *names: str) -> dict[str, Any]:
        """The assistant's message that is open, if it has none of these yet; else a new one."""
        if self._last_role != "assistant" or any(self.messages[-1].get(name) for name in names):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]
