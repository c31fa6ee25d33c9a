"""The HTTP server's settings: what is refused, what is shown, and what never is."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.server import HttpLimits, ServerConfig


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("good-secret", "secret1"), "each key needs at least 8 characters"),
        ("secret-text", "give a tuple of texts"),
        (b"secret-bytes", "give a tuple of texts"),
        ((b"secret-bytes",), "give a tuple of texts"),
        (({"secret": "dict"},), "give a tuple of texts"),
        (None, "give a tuple of texts"),
        ((" secret-spaced",), "begin or end with a space"),
        (("secret\nlines",), "control characters"),
    ],
)
def test_a_bad_key_is_refused_and_never_shown(keys: Any, says: str) -> None:
    with pytest.raises(ConfigError, match="api_keys: ") as refused:
        ServerConfig(api_keys=keys)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is refused.value.__context__ is None


def test_a_config_shows_all_but_its_keys() -> None:
    config = ServerConfig(api_keys=("a-long-secret", "another-secret"), tenant_header="fox")
    for shown in (repr(config), str(config), f"{config}", repr([config]), repr(config.__rich_repr__())):
        assert "secret" not in shown
        assert "tenant_header" in shown
        assert "fox" in shown
    assert "api_keys='2 hidden'" in repr(config)
    assert "api_keys='0 hidden'" in repr(ServerConfig())
    assert config.api_keys == ("a-long-secret", "another-secret")


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("allowed_origins", "*", "*"),
        ("allowed_origins", "https://app.example", "https://app.example"),
        ("allowed_origins", "http://app.example:8080/", "http://app.example:8080"),
        ("allowed_origins", "HTTPS://App.Example:443", "https://app.example"),
        ("allowed_origins", "http://localhost:80/", "http://localhost"),
        ("allowed_origins", "http://[::1]:3000", "http://[::1]:3000"),
        ("allowed_origins", "chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("allowed_hosts", "*", "*"),
        ("allowed_hosts", "App.Example.", "app.example"),
        ("allowed_hosts", "127.0.0.1", "127.0.0.1"),
        ("allowed_hosts", "::1", "::1"),
        ("allowed_hosts", "[::1]", "::1"),
        ("allowed_hosts", "0:0:0:0:0:0:0:1", "::1"),
    ],
)
def test_origins_and_hosts_are_kept_as_browsers_write_them(name: str, given: str, kept: str) -> None:
    assert getattr(ServerConfig(**{name: (given,)}), name) == (kept,)


def test_what_is_no_origin_or_host_is_refused_with_what_to_write() -> None:
    no_origins = (
        "notanorigin",
        "app.example:80",
        "http://",
        "https://a.example/path",
        "https://*.example",
        "null",
        " *",
    )
    for given in no_origins:
        with pytest.raises(ConfigError, match=r"allowed_origins: .* write scheme://host"):
            ServerConfig(allowed_origins=("https://app.example", given))
    for given in ("app.example:8000", "http://app.example", "a b", "[::1]:80", "a/b"):
        with pytest.raises(ConfigError, match=r"allowed_hosts: .* without scheme and port"):
            ServerConfig(allowed_hosts=(given,))


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(ServerConfig, "allowed_hosts", ()), (HttpLimits, "max_headers", 0)]
)
def test_a_bad_value_names_its_field(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        kind(**{name: value})


def test_each_replica_adds_to_how_many_are_served_at_once_unless_that_is_said() -> None:
    engine = EngineConfig(max_num_seqs=2, max_waiting=3)
    assert ServerConfig().concurrency_limit(engine) == 5
    assert ServerConfig().concurrency_limit(engine, 4) == 20
    assert ServerConfig(max_concurrent_requests=7).concurrency_limit(engine, 4) == 7
