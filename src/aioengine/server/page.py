"""The built-in page: a chat and the engine's numbers as plots, in one file that fetches nothing from elsewhere.

`page.html` is read when this module is imported: no request waits for a disk, and no loop is held by one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aioengine.server.exchange import Response


def _content_security_policy(html: bytes) -> str:
    """Only the page's own script and style run, and they reach only the server that it came from.

    A model's texts may hold anything. The page puts them in as text; should it ever forget to, the trusted types make
    the browser refuse.
    """
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(html, b"script"),
        "style-src": _hashes(html, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{directive} {sources}" for directive, sources in policy.items())


def _hashes(html: bytes, tag: bytes) -> str:
    """The texts between each ``<tag …>`` and its end, as CSP sources (W3C CSP 3, section 6.7.3.3)."""
    texts: list[bytes] = re.findall(rb"<%b\b[^>]*>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)


def page_of(html: bytes) -> Response:
    """A page, with the headers that keep everything else out of it."""
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": _content_security_policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(200, html, headers)


# A browser hashes the text after it has made its line ends \n, as a checkout elsewhere may not have them.
_HTML = (resources.files("aioengine.server") / "page.html").read_bytes().replace(b"\r\n", b"\n")

PAGE = page_of(_HTML)
