"""Which requests are let in: those that call the server by its name, and have one of its keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence

from aioengine.server.errors import ApiError

ASK_A_PERSON = {"www-authenticate": 'Basic realm="aioengine", charset="UTF-8"'}
"""A browser then asks its user; for the page alone, which tells of the other paths' refusals itself."""
ASK_A_PROGRAM = {"www-authenticate": "Bearer"}


def check_host(headers: Mapping[str, str], allowed: Sequence[str] | None) -> None:
    """Raise for a name that is not ours, where ours are known.

    A page of another origin can have its own name point to this machine, and its browser then takes us for it (DNS
    rebinding); but it sends that name along.

    Raises:
        ApiError: 403.
    """
    if allowed is None or "*" in allowed:
        return
    host = headers.get("host", "").strip().lower()
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.rstrip(".") not in allowed:
        what_to_do = "allow the name with --allowed-hosts, or ask for keys with --api-keys"
        raise ApiError(403, "host_not_allowed", f"this server is not called {name[:100]!r}: {what_to_do}")


class ApiKeys:
    """The keys that are accepted, compared in a time that tells nothing of them; with none, every request is let in.

    A key comes as ``Authorization: Bearer KEY``, as the password of ``Authorization: Basic``, with any user's name, or
    as ``X-Api-Key``.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        # Hashed, so that all are of one length, and comparing tells nothing of that either.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Mapping[str, str], *, is_page: bool = False) -> None:
        """Raise where the request has none of the keys.

        Args:
            is_page: it is a person that looks at a page, and may be asked.
        Raises:
            ApiError: 401.
        """
        if not self._digests:
            return
        keys = (_key_of(headers.get("authorization", "")), headers.get("x-api-key", "").encode("latin-1", "replace"))
        given = [hashlib.sha256(key).digest() for key in keys]
        # All of them, always: how long it takes does not tell which one it was.
        matches = [hmac.compare_digest(one, digest) for one in given for digest in self._digests]
        if True not in matches:
            message = "a valid API key is needed: send it as `Authorization: Bearer KEY`, or as `X-Api-Key: KEY`"
            raise ApiError(401, "invalid_api_key", message, headers=ASK_A_PERSON if is_page else ASK_A_PROGRAM)


def _key_of(header: str) -> bytes:
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("latin-1", "replace")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
