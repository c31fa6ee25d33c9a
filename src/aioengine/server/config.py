"""How the HTTP API is set up: one definition for `create_app` and for the flags of ``aioengine serve``."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, force_setattr

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.validation import Bytes, check_fields, shorten

MIN_API_KEY_CHARS = 8
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0.0)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the HTTP API; a bad value is a `ConfigError` that names the field."""

    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="a key that clients must send; every path but /health and /ping then asks for one"),
    ] = ()
    served_model_name: Annotated[
        tuple[Text, ...],
        Meta(description="names that requests may give as their model; the first one is in answers; absent: its own"),
    ] = ()
    max_body_bytes: Annotated[
        Bytes[Annotated[int, Meta(ge=1024)] | None],
        Meta(description="largest request body; absent: 32 bytes for each token of max_model_len, 1 MiB"),
    ] = None  # type: ignore[assignment]
    max_concurrent_requests: Annotated[
        Count | None,
        Meta(description="requests served at once; absent: max_num_seqs and max_waiting together, of each replica"),
    ] = None
    max_prompts: Annotated[Count, Meta(description="most prompts in one request")] = 128
    max_messages: Annotated[Count, Meta(description="most messages in one chat request")] = 2048
    body_timeout_s: Annotated[Seconds, Meta(description="a request body must have come within this time")] = 30.0
    write_timeout_s: Annotated[
        Seconds, Meta(description="a client that takes nothing of its answer for so long is cut off")
    ] = 30.0
    keepalive_s: Annotated[
        Seconds, Meta(description="a stream without events for so long sends a comment, for proxies")
    ] = 15.0
    max_unread_tokens: Annotated[
        Count, Meta(description="a stream whose client has so many tokens unread is not computed further until then")
    ] = 4096
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        Meta(description="of requests: ignore logs each one's name once, refuse answers 400"),
    ] = "ignore"
    max_stored_responses: Annotated[
        int,
        Meta(ge=0, description="responses (/v1/responses) kept in memory for clients that go on with them, or 0"),
    ] = 1000
    max_stored_response_bytes: Annotated[
        Bytes[int], Meta(ge=0, description="bytes of all of them together, each with the conversation before it")
    ] = 2**26  # type: ignore[assignment]
    tenant_header: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9-]*$")] | None,
        Meta(description="header with a request's tenant (fair scheduling), set by a proxy; absent: the body's tenant"),
    ] = None
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[A-Za-z0-9._~-]+)*$",
            description="prefix of all paths, such as /ai, behind a proxy, whether the proxy takes it off or not",
        ),
    ] = ""
    enable_force_include_usage: Annotated[
        bool, Meta(description="streams end with their usage, unless stream_options has include_usage false")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="write the tokens of log-probabilities as token_id:ID, unless a request asks otherwise")
    ] = False
    log_probes: Annotated[
        bool, Meta(description="log requests of /health, /ping, /load, /metrics and /version, too, that are answered")
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="serve /tokenizer_info: the tokenizer's configuration and the chat template")
    ] = False
    trust_request_chat_template: Annotated[
        bool, Meta(description="render chats by the chat_template of a request that has one; else that is a 400")
    ] = False
    allowed_origins: Annotated[
        tuple[Text, ...],
        Meta(description="origins whose pages may read answers (CORS), or *; for an app that is served alone"),
    ] = ()
    allowed_hosts: Annotated[
        Annotated[tuple[Text, ...], Meta(min_length=1)] | None,
        Meta(
            description="names that requests may call this server by (Host header), without port, or *; absent: any,"
            " but for `serve` at an address of this machine alone and without keys: that address and localhost"
        ),
    ] = None

    def __post_init__(self) -> None:
        # By hand, since the messages of `check_fields` show the value.
        keys: Any = self.api_keys
        if not isinstance(keys, tuple | list | set | frozenset) or not all(isinstance(key, str) for key in keys):
            raise ConfigError("api_keys: give a tuple of texts, also for a single key")
        if any(len(key) < MIN_API_KEY_CHARS for key in keys):
            raise ConfigError(f"api_keys: each key needs at least {MIN_API_KEY_CHARS} characters")
        if any(key != key.strip() or not key.isprintable() for key in keys):
            raise ConfigError("api_keys: no key may begin or end with a space, or have control characters")
        check_fields(self, lambda _, message: ConfigError(message))
        # As browsers send them, so that they can be compared as they are.
        force_setattr(self, "allowed_origins", tuple(map(_origin, self.allowed_origins)))
        if self.allowed_hosts is not None:
            force_setattr(self, "allowed_hosts", tuple(map(_host, self.allowed_hosts)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All fields; of the keys only their number."""
        return list({**asdict(self), "api_keys": f"{len(self.api_keys)} hidden"}.items())

    def body_limit(self, max_model_len: int) -> int:
        """The largest body, in bytes: what it holds is looked through on the loop, at about a millisecond a MiB."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        # A token id with its comma takes at most 9 bytes, a token's text rarely more than 24 when it is escaped.
        return max(2**20, 32 * max_model_len)

    def concurrency_limit(self, engine: EngineConfig, num_engines: int = 1) -> int:
        """How many requests are served at once.

        Args:
            engine: the config of one engine, of ``num_engines`` that requests may go to.
        """
        if self.max_concurrent_requests is not None:
            return self.max_concurrent_requests
        return (engine.max_num_seqs + engine.max_waiting) * num_engines


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a connection, below the app; a bad value is a `ConfigError` that names the field."""

    max_connections: Annotated[Count, Meta(description="connections at once; more are answered 503")] = 8192
    header_timeout_s: Annotated[
        Seconds, Meta(le=3600.0, description="a request's headers must have come within this time")
    ] = 10.0
    keep_alive_timeout_s: Annotated[
        Seconds, Meta(le=86400.0, description="an idle connection is closed after this time")
    ] = 75.0
    """Longer than clients keep one (5 s in httpx and openai), so that none is closed as a request is sent on it."""
    max_headers: Annotated[Count, Meta(description="headers of one request")] = 100
    max_header_bytes: Annotated[Bytes[int], Meta(ge=256, description="bytes of a request's headers")] = 32768  # type: ignore[assignment]
    max_url_bytes: Annotated[Bytes[int], Meta(ge=16, description="bytes of a request's URL")] = 8192  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_fields(self, lambda _, message: ConfigError(message))


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?/?")


def _origin(text: str) -> str:
    """An origin as browsers write it (RFC 6454, section 6.1)."""
    if text == "*":
        return text
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        raise ConfigError(
            f"allowed_origins: {shorten(text)} is no origin; write scheme://host or scheme://host:port, such as"
            " https://app.example, or *"
        )
    scheme, host, port = found.groups()
    is_default = (scheme, port) in (("http", "80"), ("https", "443"))
    return f"{scheme}://{host}" if port is None or is_default else f"{scheme}://{host}:{int(port)}"


def _host(text: str) -> str:
    """A name or an address as a Host header has it, in lower case, without brackets."""
    if text == "*":
        return text
    name = text.lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        if re.fullmatch(r"[a-z0-9._-]+", name):
            return name
    raise ConfigError(
        f"allowed_hosts: {shorten(text)} is no name of a host; write it without scheme and port, such as app.example"
        " or ::1, or *"
    )
