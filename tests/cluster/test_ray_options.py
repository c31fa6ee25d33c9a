"""What is refused of Ray's options, without Ray."""

from typing import Any

import pytest

from aioengine import ConfigError, ReplicaOptions
from aioengine.cluster.ray_launcher import _check_head


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
