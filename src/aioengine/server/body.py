"""From an exchange to a decoded body: within a size and a time, and never in one piece that would hold the loop."""

from __future__ import annotations

import asyncio
import zlib
from typing import TypeVar

import anyio
from anyio import CapacityLimiter, to_thread

from aioengine.server.config import ServerConfig
from aioengine.server.decoding import SMALL_BODY_BYTES, TEXTS_A_MESSAGE, IgnoredFields, decode, decode_in_turns
from aioengine.server.errors import ApiError, overloaded
from aioengine.server.exchange import Exchange, PerLoop
from aioengine.server.schema import Body
from aioengine.turns import turns_here

T = TypeVar("T", bound=Body)

TINY_BODY_BYTES = 2**12
"""A body up to here is decoded in the turn in which it has come."""
MAX_BODIES_AT_ONCE = 64
"""Bodies of the largest size that may be on their way in at once."""
LINGER_S = 2.0
MAX_LINGER_BYTES = 2**26
"""What is still taken from a client whose body is refused: most read no answer before they have sent it all."""


class BodyReader:
    """Reads bodies and decodes them, and bounds what all of them hold together."""

    def __init__(self, config: ServerConfig) -> None:
        self._timeout_s = config.body_timeout_s
        self._max_texts = TEXTS_A_MESSAGE * config.max_messages
        self._ignored = IgnoredFields(config.unknown_fields)
        self._decoding = PerLoop(asyncio.Lock)
        """For large bodies: one of them a turn of the loop."""
        self._inflating = PerLoop(lambda: CapacityLimiter(1))
        """A thread for compressed bodies: one of them at a time."""
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
        if len(body) > TINY_BODY_BYTES:  # many such may have come to their ends together
            await turns_here().take()
        if len(body) <= SMALL_BODY_BYTES:
            return decode(body, kind, ignored=self._ignored)
        async with self._decoding.get():  # many that came together would hold the loop together
            return await decode_in_turns(body, kind, max_texts=self._max_texts, ignored=self._ignored)

    async def _read_whole(self, exchange: Exchange, max_bytes: int) -> bytes:
        """The whole body, of at most ``max_bytes``, inflated where it is compressed.

        Raises:
            ApiError: it is too large (413, from its announced length if it has one), too slow (408), there is no
                room for it beside the others (503), or it is compressed in a way that is not known (415), or
                damaged (400).
            ClientGone: it did not come to its end.
        """
        announced = exchange.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > max_bytes:
            await self._refuse(exchange, _too_large(max_bytes))
        encoding = exchange.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity", *ENCODINGS):
            await self._refuse(exchange, _unknown_encoding(encoding))
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
                        await self._refuse(exchange, _too_large(max_bytes))
                    if self._num_bytes > MAX_BODIES_AT_ONCE * max_bytes:
                        message = "too many large requests are being sent at once; try again later"
                        raise overloaded(message, 1, connection="close")
                body = b"".join(pieces)
                # aiohttp inflates bodies itself, unless it was told not to; nothing compressed begins as JSON does.
                if encoding in ENCODINGS and body.lstrip()[:1] not in (b"{", b"[", b""):
                    thread = self._inflating.get()
                    return await to_thread.run_sync(_inflated, body, encoding, max_bytes, limiter=thread)
                return body
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


ENCODINGS = ("gzip", "x-gzip", "deflate")


def _inflated(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """A compressed body, inflated: without the interpreter's lock, and so for a thread.

    Raises:
        ApiError: it is too large (413), or damaged (400).
    """
    inflater = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # its header says whether it is gzip or zlib
    try:
        inflated = inflater.decompress(body, max_bytes + 1)
        if len(inflated) > max_bytes:
            raise _too_large(max_bytes)
        if not inflater.eof:
            raise zlib.error("it ends in the middle")
        if inflater.unused_data:
            raise zlib.error("something follows its end")
    except zlib.error as error:
        raise ApiError(400, "invalid_encoding", f"the body is no valid {encoding}: {error}") from None
    return inflated


def _unknown_encoding(encoding: str) -> ApiError:
    message = f"Content-Encoding {encoding[:100]!r} is not taken: send gzip, deflate, or the body as it is"
    headers = {"accept-encoding": "gzip, deflate", "connection": "close"}
    return ApiError(415, "unsupported_encoding", message, headers=headers)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the request's body is larger than this server takes ({max_bytes:,} bytes, max_body_bytes)"
    return ApiError(413, "request_too_large", message, headers={"connection": "close"})
