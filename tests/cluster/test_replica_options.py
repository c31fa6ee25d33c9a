"""What `ReplicaOptions` refuses: what cannot be, and what would do nothing; `launcher_of`, what does not go with the
engine's config."""

from typing import Any

import pytest

from aioengine import ConfigError, Engine, EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.cluster.backend import launcher_of
from aioengine.cluster.ray_launcher import _check_head

ADDRESSES = ["tcp://a:5555", "tcp://b:5555"]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5571", "tcp://127.0.0.1:0", "tcp://0.0.0.0:5571", "cluster"])
def test_further_front_ends_connect_at_a_socket_that_is_this_users(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster_address=.*: give an ipc:///path in a folder that only you"):
        ReplicaOptions(replicas=2, cluster_address=address)
    assert ReplicaOptions(replicas=2, cluster_address="ipc:///run/user/1/c").cluster_address == "ipc:///run/user/1/c"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": []}, "replicas"),
        ({"replicas": ["a:5555"]}, "'a:5555' is no address: give tcp://HOST:PORT"),
        ({"replicas": ADDRESSES * 2}, "an address stands there twice"),
        ({"replicas": ADDRESSES, "launcher": "ray"}, "launcher='ray' is for replicas that are started here"),
        ({"replicas": ADDRESSES, "lockstep": True}, "lockstep=True is for replicas that are started here"),
        ({"replicas": 2, "keys": "keys/"}, "keys are for replicas at addresses"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicaOptions(**fields)


def test_replicas_are_a_number_or_addresses() -> None:
    assert (ReplicaOptions(replicas=2).num_replicas, ReplicaOptions(replicas=2).addresses) == (2, ())
    options = ReplicaOptions(replicas=tuple(ADDRESSES), keys="keys/")
    assert (options.num_replicas, options.addresses) == (2, tuple(ADDRESSES))


@pytest.mark.parametrize(
    ("engine", "process", "named"),
    [
        ({"max_num_seqs": 3, "device": "cpu"}, {}, "device, max_num_seqs"),
        ({"model": "org/name", "max_n": 3}, {}, "max_n"),
        ({}, {"plugins": ("mine",)}, "plugins"),
        ({}, {"executor": "mine:make"}, "executor"),
    ],
)
def test_settings_of_engines_at_addresses_are_theirs(
    engine: dict[str, Any], process: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: give it to the engines at tcp://a:5555, tcp://b:5555$"):
        Engine(replicas=ADDRESSES, process=ProcessOptions(**process), **engine)


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


@pytest.mark.parametrize(
    "of_ray",
    [
        {"ray_address": "head:6379"},
        {"ray_num_cpus": 2.0},
        {"ray_num_gpus": 0.0},
        {"ray_placement_group": "gang"},
    ],
)
def test_options_of_ray_are_for_its_replicas(of_ray: dict[str, Any]) -> None:
    (name,) = of_ray
    with pytest.raises(ConfigError, match=f"^{name} is for replicas on Ray: add launcher='ray', or leave it out"):
        ReplicaOptions(**of_ray)
    assert getattr(ReplicaOptions(launcher="ray", **of_ray), name) == of_ray[name]


def test_rays_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="Ray's client cannot be used"):
        _check_head("ray://head:10001")
