"""The check of requests: they call the server by its name, and have one of its keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence

from aioengine.server.errors import ApiError

ASK_A_PERSON = {"www-authenticate": 'Basic realm="aioengine", charset="UTF-8"'}
"""A browser then asks its user; for the page alone, which shows the other paths' refusals itself."""
ASK_A_PROGRAM = {"www-authenticate": "Bearer"}


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{0,5})?")


def host_name(header: str) -> str | None:
    """The name or address that a Host header holds (RFC 9110, section 7.2), in lower case and without brackets.

    Returns:
        None: the header is malformed, such as by a user's name, or by anything behind the brackets but a port.
    """
    found = _HOST.fullmatch(header.strip().lower())
    if found is None:
        return None
    if not found[1].startswith("["):
        return found[1].removesuffix(".")
    try:
        return str(ipaddress.IPv6Address(found[1][1:-1]))
    except ValueError:
        return None


def check_host(headers: Mapping[str, str], allowed: Sequence[str] | None) -> None:
    """Raise for a name that is not ours, where ours are known.

    A page of another origin can have its own name point to this machine, and its browser then takes us for it (DNS
    rebinding); but it sends that name along.

    Raises:
        ApiError: 403; or 400: the header is malformed.
    """
    if allowed is None or "*" in allowed:
        return
    given = headers.get("host", "")
    name = host_name(given)
    if given and name is None:
        raise ApiError(
            400, "malformed_request", f"the Host header {given[:100]!r} is no name with a port or without one"
        )
    if name not in allowed:
        what_to_do = "the server's owner can allow the name (allowed_hosts), or ask for keys (api_keys)"
        raise ApiError(403, "host_not_allowed", f"this server is not called {name or ''!r}: {what_to_do}")


class ApiKeys:
    """The keys that are accepted, compared in a time that does not depend on them; with none, every request is let in.

    A key comes as ``Authorization: Bearer KEY``, as the password of ``Authorization: Basic``, with any user's name, or
    as ``X-Api-Key``.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        # Hashed, so that all are of one length, and comparing does not depend on that either.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Mapping[str, str], *, is_page: bool = False) -> str:
        """Raise where the request has none of the keys.

        Args:
            is_page: it is a person that looks at a page, and may be asked.
        Returns:
            the number of its key, as a text; empty where no key is asked for.
        Raises:
            ApiError: 401.
        """
        if not self._digests:
            return ""
        keys = (_key_of(headers.get("authorization", "")), headers.get("x-api-key", "").encode("latin-1", "replace"))
        given = [hashlib.sha256(key).digest() for key in keys]
        # All of them, always: the time does not depend on which one it was.
        matches = [hmac.compare_digest(one, digest) for one in given for digest in self._digests]
        if True not in matches:
            message = "a valid API key is needed: send it as `Authorization: Bearer KEY`, or as `X-Api-Key: KEY`"
            raise ApiError(401, "invalid_api_key", message, headers=ASK_A_PERSON if is_page else ASK_A_PROGRAM)
        return str(matches.index(True) % len(self._digests))


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
