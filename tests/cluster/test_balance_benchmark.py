"""``python benchmarks/balance.py`` runs to its end, and what it shows is so with few replicas, too."""

from __future__ import annotations

import pytest

from aioengine.testing import run
from benchmarks.balance import POLICIES, WORKLOADS, Figures, Workload, simulate

OF_NAME = {workload.name: workload for workload in WORKLOADS}


def figures_of(workload: Workload, policy_name: str) -> Figures:
    (policy,) = (policy for policy in POLICIES if policy.name == policy_name)
    return run(simulate(workload, policy, num_replicas=6, seed=1), seed=1)


@pytest.mark.parametrize("name", OF_NAME)
def test_each_workload_runs(name: str) -> None:
    figures = figures_of(OF_NAME[name]._replace(duration_s=3.0), "session, prefix")
    assert figures.requests > 3
    assert figures.ttft_median_s <= figures.ttft_p99_s


def test_chats_find_their_prefixes_and_wait_less() -> None:
    chats = OF_NAME["chats"]._replace(duration_s=10.0)
    apart, together = (figures_of(chats, name) for name in ("round robin", "session, prefix"))
    assert together.requests == apart.requests
    assert together.hits > apart.hits + 0.1
    assert together.ttft_median_s < apart.ttft_median_s
