"""How the HTTP face is set up: one definition for `create_app` and for the flags of ``aioengine serve``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.validation import check_fields

MIN_API_KEY_CHARS = 8
BYTES_A_TOKEN = 32
"""Of a body: a token id with its comma takes at most 9, a token's text rarely more than 24 when it is escaped."""
LEAST_BODY_BYTES = 2**20


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the HTTP face; a bad value is a `ConfigError` that names the field."""

    api_keys: Annotated[
        tuple[Annotated[str, Meta(min_length=MIN_API_KEY_CHARS)], ...],
        Meta(description="a key that clients must send; every path but /health then asks for one"),
    ] = ()
    served_model_name: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="names that requests may give as their model; the first one is in answers; absent: its own"),
    ] = ()
    max_body_bytes: (
        Annotated[
            int,
            Meta(ge=1024, description="largest request body; absent: 32 bytes for each token of max_model_len, 1 MiB"),
        ]
        | None
    ) = None
    max_concurrent_requests: (
        Annotated[int, Meta(ge=1, description="requests served at once; absent: max_num_seqs and max_waiting together")]
        | None
    ) = None
    max_prompts: Annotated[int, Meta(ge=1, description="most prompts in one request")] = 128
    max_messages: Annotated[int, Meta(ge=1, description="most messages in one chat request")] = 2048
    body_timeout_s: Annotated[float, Meta(gt=0.0, description="a request body must have come within this time")] = 30.0
    write_timeout_s: Annotated[
        float, Meta(gt=0.0, description="a client that takes nothing of its answer for so long is cut off")
    ] = 30.0
    keepalive_s: Annotated[
        float, Meta(gt=0.0, description="a stream that has nothing to say for so long sends a comment, for proxies")
    ] = 15.0
    max_unread_tokens: Annotated[
        int,
        Meta(ge=1, description="a stream whose client has so many tokens unread is not computed further until then"),
    ] = 4096
    metrics_prefix: Annotated[
        str, Meta(pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$", description="before the names of /metrics that vLLM has, too")
    ] = "vllm:"
    allowed_origins: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="origins whose pages may read answers (CORS), or *; for an app that is served alone"),
    ] = ()

    def __post_init__(self) -> None:
        check_fields(self, lambda _, message: ConfigError(message))

    def body_limit(self, max_model_len: int) -> int:
        """The largest body, in bytes: what it holds is looked through on the loop, at about a millisecond a MiB."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return max(LEAST_BODY_BYTES, BYTES_A_TOKEN * max_model_len)

    def concurrency_limit(self, engine: EngineConfig) -> int:
        """How many requests are served at once."""
        if self.max_concurrent_requests is not None:
            return self.max_concurrent_requests
        return engine.max_num_seqs + engine.max_waiting
