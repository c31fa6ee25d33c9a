"""The formats of texts that JSON schemas name, as patterns."""

from __future__ import annotations

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_ANY_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY_OF_ANY_YEAR}|{_LEAP_YEAR}-02-29)"
# No leap seconds, and capital letters: what parsers of times commonly read.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
MAX_HOSTNAME_CHARS = 253
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:"
_OF_HOST = "(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_OF_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_SEGMENTS = f"(?:/{_OF_PATH}*)*"
_PLACE = (
    f"(?:(?:{_SCHEME})?//(?:(?:{_OF_HOST}|:)*@)?{_OF_HOST}*(?::[0-9]*)?{_SEGMENTS}"
    f"|(?:{_SCHEME})?/(?:{_OF_PATH}+{_SEGMENTS})?|{_SCHEME}(?:{_OF_PATH}+{_SEGMENTS})?"
    f"|(?:(?:{_OF_HOST}|@)+{_SEGMENTS})?)"
)
_BEHIND_PATH = f"(?:{_OF_PATH}|[/?])*"
_UUID = "^[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{}[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}$"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "json-pointer": f"^{_POINTER}$",
    "uri-reference": rf"^{_PLACE}(?:\?{_BEHIND_PATH})?(?:#{_BEHIND_PATH})?$",
    "base64": BASE64,
    "byte": BASE64,
    "base64url": BASE64.replace("+/", "_-"),
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
"""Formats as patterns."""
FORMATS_BY_OTHER_NAMES = {"host-name": "hostname", "ip-address": "ipv4", "url": "uri"}
FORMATS_LEFT = frozenset(
    {"duration", "email", "ipv4", "ipv6", "uri", "uuid"}
    | {"idn-email", "idn-hostname", "iri", "iri-reference", "regex", "relative-json-pointer", "uri-template"}
)
"""Of JSON Schema: the first ones are the library's, the others it refuses. Those that are not named are annotations."""
