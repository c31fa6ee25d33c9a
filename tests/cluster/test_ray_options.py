"""What is refused of Ray's options, without Ray."""

import pytest

from aioengine import ConfigError, ReplicaOptions
from aioengine.cluster.ray_launcher import _check_head


def test_a_placement_group_is_rays() -> None:
    with pytest.raises(ConfigError, match="launcher='ray'"):
        ReplicaOptions(ray_placement_group="gang")


def test_rays_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="Ray's client cannot be used"):
        _check_head("ray://head:10001")
