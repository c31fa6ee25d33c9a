"""What `ReplicaOptions` refuses: what cannot be, and what would do nothing; `launcher_of`, what does not go with the
engine's config."""

from typing import Any

import pytest

from aioengine import ConfigError, Engine, EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.cluster.backend import launcher_of

JOIN = {"replicas": 2, "replicas_local": 1, "join_address": "tcp://0.0.0.0:5570"}


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5571", "tcp://127.0.0.1:0", "tcp://0.0.0.0:5571", "cluster"])
def test_further_front_ends_connect_at_a_socket_that_is_this_users(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster_address=.*: give an ipc:///path in a folder that only you"):
        ReplicaOptions(replicas=2, cluster_address=address)
    assert ReplicaOptions(replicas=2, cluster_address="ipc:///run/user/1/c").cluster_address == "ipc:///run/user/1/c"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 2, "replicas_local": 3}, "replicas_local=3 of replicas=2"),
        ({"replicas": 2, "replicas_local": 1}, "say where in join_address"),
        ({"join_keys": "keys/"}, "say in join_address where they join"),
        (
            {**JOIN, "join_address": "ipc:///run/j", "join_keys": "keys/"},
            "join_keys are for tcp: .* leave join_keys out",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicaOptions(**fields)


def test_keys_are_for_engines_that_join_by_tcp() -> None:
    assert ReplicaOptions(**JOIN, join_keys="keys/").num_remote == 1
    assert ReplicaOptions(**{**JOIN, "join_address": "ipc:///run/j"}).num_remote == 1


def test_a_stall_is_no_shorter_than_two_beats() -> None:
    config, process = EngineConfig(heartbeat_interval_s=1.5), ProcessOptions()
    says = (
        "stall_timeout_s=2.9 is less than two beats, heartbeat_interval_s=1.5 .*: give a stall_timeout_s of 3 or more"
    )
    for lockstep in (False, True):
        with pytest.raises(ConfigError, match=says):
            launcher_of(config, process, ReplicaOptions(replicas=2, stall_timeout_s=2.9, lockstep=lockstep))
    with pytest.raises(ConfigError, match=says):
        Engine(replicas=ReplicaOptions(replicas=2, stall_timeout_s=2.9), heartbeat_interval_s=1.5)
    launcher_of(config, process, ReplicaOptions(replicas=2, stall_timeout_s=3.0))
