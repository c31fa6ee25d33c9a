"""Reading a request's body: within a size and a time, and never in one piece that would hold the loop."""

from __future__ import annotations

import anyio

from aioengine.server.exchange import Exchange
from aioengine.server.faults import HttpFault

LINGER_S = 2.0
MAX_LINGER_BYTES = 2**26
"""What is still taken from a client whose body is refused: most read no answer before they have sent it all."""


class BodyReader:
    """Reads bodies, and bounds what all of them hold together.

    Args:
        timeout_s: for one body to come.
        max_bodies: so many of the largest size may be on their way at once.
    """

    def __init__(self, *, timeout_s: float, max_bodies: int) -> None:
        self._timeout_s = timeout_s
        self._max_bodies = max_bodies
        self._num_bytes = 0
        """Held by bodies that have not come to their end yet."""

    async def read(self, exchange: Exchange, max_bytes: int) -> bytes:
        """The whole body, of at most ``max_bytes``.

        Raises:
            HttpFault: it is too large (413, from its announced length if it has one), too slow (408), or there is no
                room for it beside the others (503).
            ClientGone: it did not come to its end.
        """
        announced = exchange.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > max_bytes:
            await self._refuse(exchange, _too_large(max_bytes))
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
                    if self._num_bytes > self._max_bodies * max_bytes:
                        raise HttpFault(
                            503,
                            "too many large requests are being sent at once; try again later",
                            kind="server_error",
                            code="overloaded",
                            headers={"retry-after": "1", "connection": "close"},
                        )
        except TimeoutError:
            raise HttpFault(
                408,
                f"the request's body did not come within {self._timeout_s:g} s",
                code="timeout",
                headers={"connection": "close"},
            ) from None
        finally:
            self._num_bytes -= num_bytes
        return b"".join(pieces)

    async def _refuse(self, exchange: Exchange, fault: HttpFault) -> None:
        """Raise, but first take what still comes, for a while: a client that is cut off in sending hears no answer."""
        if exchange.headers.get("expect", "").lower() != "100-continue":  # that one waits to be asked for it
            with anyio.move_on_after(LINGER_S):
                num_bytes = 0
                while num_bytes < MAX_LINGER_BYTES and (piece := await exchange.read()):
                    num_bytes += len(piece)
        raise fault


def _too_large(max_bytes: int) -> HttpFault:
    return HttpFault(
        413,
        f"the request's body is larger than this server takes ({max_bytes:,} bytes, max_body_bytes)",
        code="request_too_large",
        headers={"connection": "close"},
    )
