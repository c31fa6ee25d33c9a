"""What the handlers see of HTTP: one request and its response, whatever framework carries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

CUT_EXTENSION = "aioengine.cut"
"""Of an ASGI scope's ``extensions``: a function that ends the connection at once. Our own server has it."""


class ClientGone(Exception):
    """The client has left: nobody will read the answer."""


class Response(msgspec.Struct, frozen=True):
    """An answer that is whole.

    Attributes:
        status: of HTTP.
        body: bytes.
        headers: names in lower case; the length is added by whoever sends it.
    """

    status: int
    body: bytes
    headers: dict[str, str]


class Exchange(Protocol):
    """One HTTP request and the response to it. One task uses it, and another one may wait in `gone`.

    Attributes:
        method: in capitals.
        path: below where the handlers are mounted; begins with "/". The handlers take a slash off its end.
        headers: by names in lower case; of one that came twice the last.
        client: the peer's address, for the log.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    client: str

    async def read(self) -> bytes:
        """The next piece of the request's body; empty at its end.

        Raises:
            ClientGone: the rest will not come.
        """
        ...

    async def gone(self) -> None:
        """Wait until the client has left. Only once the body has been read to its end."""
        ...

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a response that is written in pieces."""
        ...

    async def write(self, data: bytes) -> None:
        """Write the next piece; waits while the client reads more slowly than it is written to.

        Raises:
            ClientGone: the client has left; where a framework does not say so, nothing happens.
        """
        ...

    async def end(self) -> None:
        """End a response that was written in pieces."""
        ...

    async def respond(self, response: Response) -> None:
        """Give a whole response."""
        ...

    def cut(self) -> None:
        """End the connection at once, with what is still buffered for the client. Idempotent.

        Where the server offers no way to, the connection ends when its owner closes it.
        """
        ...
