"""What is refused of Ray's options, without Ray."""

import pytest

from aioengine import ConfigError, ReplicaOptions
from aioengine.cluster.ray_launcher import _check_head


def test_a_placement_group_is_rays() -> None:
    with pytest.raises(ConfigError, match="launcher='ray'"):
        ReplicaOptions(ray_placement_group="gang")


def test_no_engine_joins_replicas_of_ray() -> None:
    with pytest.raises(ConfigError, match="where Ray has room"):
        ReplicaOptions(launcher="ray", join_address="tcp://127.0.0.1:5570")


def test_rays_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="Ray's client cannot be used"):
        _check_head("ray://head:10001")
