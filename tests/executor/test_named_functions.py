"""Functions by name: registered once, found by everyone, and no others."""

from collections.abc import Callable
from typing import Any

import pytest

from aioengine.core import named_functions
from aioengine.core.named_functions import registered, worker_function
from aioengine.errors import ConfigError, InvalidRequest


@pytest.fixture(autouse=True)
def _an_empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_functions, "_functions", {})


def first(worker: Any) -> int:
    return 1


def second(worker: Any) -> int:
    return 2


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (worker_function("a name"), "a name"),
        (worker_function, f"{__name__}.first"),
        (worker_function(), f"{__name__}.first"),
    ],
    ids=["given", "without brackets", "with brackets"],
)
def test_a_function_has_the_name_that_it_was_given_or_its_own(register: Callable[..., Any], name: str) -> None:
    assert register(first) is first
    assert registered(name) is first


def test_a_name_has_one_function() -> None:
    worker_function("a name")(first)
    worker_function("a name")(first)
    with pytest.raises(ConfigError, match=r"'a name' is .*first already: give .*second another name"):
        worker_function("a name")(second)
    assert registered("a name") is first

    def make(number: int) -> Callable[[Any], int]:
        return lambda worker: number

    worker_function("two")(make(1))
    with pytest.raises(ConfigError, match="another name"):
        worker_function("two")(make(2))


def test_a_function_that_is_defined_anew_takes_the_old_ones_place() -> None:
    def redefined() -> Callable[[Any], int]:
        scope: dict[str, Any] = {"__name__": "a_notebook"}
        exec("def cell(worker): return 0", scope)
        cell: Callable[[Any], int] = scope["cell"]
        return cell

    worker_function(redefined())
    latest = worker_function(redefined())
    assert registered("a_notebook.cell") is latest


def test_an_unknown_name_says_what_comes_near_or_what_there_is() -> None:
    with pytest.raises(InvalidRequest, match=r"no function 'weights' .*\(there are: none\)") as raised:
        registered("weights")
    assert raised.value.param == "name"
    worker_function("count_weights")(first)
    worker_function("other")(second)
    with pytest.raises(InvalidRequest, match=r"are: count_weights\)"):
        registered("count_weight")
    with pytest.raises(InvalidRequest, match=r"are: count_weights, other\)"):
        registered("xyz")
