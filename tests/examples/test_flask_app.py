"""The Flask app, served by werkzeug's threads to several clients at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import httpx
import pytest
from examples.conftest import NO_TLS, TIMEOUT_S, load
from werkzeug.serving import make_server

SUMS = {f"What is {a} + {b}?": f"{a} + {b} = {a + b}." for a in range(5, 9) for b in range(5, 9)}


@pytest.fixture
def module() -> Iterator[ModuleType]:
    module = load("flask_app")
    yield module
    module.llm.close()


@pytest.fixture
def url(module: ModuleType) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, module.app, threaded=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()
    serving.join()
    server.server_close()


def ask(url: str, question: object) -> httpx.Response:
    with httpx.Client(base_url=url, verify=NO_TLS, timeout=TIMEOUT_S, trust_env=False) as http:
        return http.post("/ask", json={"question": question})


def test_requests_of_several_threads_are_answered_side_by_side(module: ModuleType, url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [answer.json() for answer in pool.map(lambda question: ask(url, question), SUMS)]
    assert answers == [{"answer": answer} for answer in SUMS.values()]
    assert module.llm.stats().running == module.llm.stats().waiting == 0


def test_what_does_not_fit_is_a_400_and_the_next_one_is_answered(url: str) -> None:
    for _ in range(2):
        refused = ask(url, "fox " * 5000)
        assert refused.status_code == 400
        assert "prompt" in refused.json()["error"]
        assert ask(url, "What is 8 + 7?").json() == {"answer": "8 + 7 = 15."}
