"""The native kernels, compiled once."""

from collections.abc import Iterator

import pytest

from aioengine.kernels.native.compilation import compile_library
from aioengine.kernels.native.library import Library
from aioengine.kernels.native.team import Team


@pytest.fixture(scope="session")
def library() -> Library:
    return compile_library()


@pytest.fixture
def team(library: Library) -> Iterator[Team]:
    team = Team(library, 2)
    yield team
    team.close()


@pytest.fixture
def teams(library: Library) -> Iterator[list[Team]]:
    """Of one and of two threads: what they compute is equal to the last bit."""
    teams = [Team(library, num_threads) for num_threads in (1, 2)]
    yield teams
    for team in teams:
        team.close()
