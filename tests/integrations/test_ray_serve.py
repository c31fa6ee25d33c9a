"""The deployment of Ray Serve, on a Ray of this machine."""

from __future__ import annotations

import importlib
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import psutil
import pytest

from aioengine import ConfigError, Engine, EngineDead

PROMPT = "Once upon a time"
PATIENCE_S = 120.0

pytestmark = pytest.mark.filterwarnings("ignore")
"""Ray's own, also in threads and finalizers. A thread of Serve's client stays: hence one loop for all tests."""


class Serve:
    """A Ray with Serve on it, and the application that a test deploys."""

    def __init__(self) -> None:
        import ray
        from ray import serve

        from aioengine.integrations import ray_serve

        self.serve, self.made_by = serve, ray_serve
        self._ray = ray
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        ray.init(num_cpus=3, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": self.port}, logging_config={"log_level": "ERROR"})

    async def run(self, **arguments: Any) -> Any:
        """Deploy the bundled model; returns a handle."""
        app = self.made_by.build_app(**arguments)
        return await anyio.to_thread.run_sync(lambda: self.serve.run(app, name="app", route_prefix="/"))

    async def delete(self) -> None:
        await anyio.to_thread.run_sync(lambda: self.serve.delete("app"))

    def num_running(self) -> int:
        """Replicas that serve."""
        deployments = self.serve.status().applications["app"].deployments
        return int(deployments["aioengine"].replica_states.get("RUNNING", 0))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def shutdown(self) -> None:
        self.serve.shutdown()
        self._ray.shutdown()


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    pytest.importorskip("ray", reason="needs Ray Serve: pip install 'aioengine[ray_serve]'")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
        warnings.simplefilter("ignore")
        serve = Serve()
        yield serve
        serve.shutdown()
    signal.signal(signal.SIGTERM, handler)


async def counted(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    """The sum of a metric's values with these labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(maxsplit=1)[1])
        for line in lines
        if line.startswith(name) and all(label in line for label in wanted)
    )


def test_without_ray_serve_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "aioengine.integrations.ray_serve", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'aioengine\[ray_serve\]'"):
        importlib.import_module("aioengine.integrations.ray_serve")


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="module")
async def test_it_answers_over_http_and_by_handles_and_a_request_that_is_left_is_aborted(serve: Serve) -> None:
    async with Engine(dtype="float32") as engine:
        expected = (await engine.generate(PROMPT, temperature=0, max_tokens=24)).outputs[0].text
    handle = await serve.run(dtype="float32", max_num_seqs=8)
    body = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    long = {**body, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with serve.client() as client:
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == expected
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            events = [line async for line in response.aiter_lines() if line]
        assert len(events) > 3, "it comes in pieces"
        assert events[-1] == "data: [DONE]"

        output = await handle.generate.remote(PROMPT, temperature=0, max_tokens=24)
        assert output.outputs[0].text == expected
        deltas = handle.options(stream=True).stream.remote(PROMPT, temperature=0, max_tokens=24)
        assert "".join([delta.text async for delta in deltas]) == expected

        async with client.stream("POST", "/v1/completions", json=long) as response:
            async for _ in response.aiter_lines():
                break
        with anyio.fail_after(PATIENCE_S):
            while await counted(client, "vllm:request_success_total", finished_reason="abort") < 1:
                pass
        deltas = handle.options(stream=True).stream.remote(PROMPT, max_tokens=1500, ignore_eos=True)
        async for _ in deltas:
            break
        deltas.cancel()
        with anyio.fail_after(PATIENCE_S):
            while await counted(client, "vllm:request_success_total", finished_reason="abort") < 2:
                pass
            while await counted(client, "vllm:num_requests_running"):
                pass
    await serve.delete()


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="module")
async def test_serve_adds_a_replica_under_load_and_no_request_fails(serve: Serve) -> None:
    autoscaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5,
        "metrics_interval_s": 0.2, "look_back_period_s": 1.0,
    }  # fmt: skip
    handle = await serve.run(autoscaling=autoscaling, max_num_seqs=8)
    assert serve.num_running() == 1
    is_scaled = anyio.Event()
    num_outputs = 0

    async def load() -> None:
        nonlocal num_outputs
        while not is_scaled.is_set():
            output = await handle.generate.remote(PROMPT, max_tokens=300, ignore_eos=True)
            assert len(output.outputs[0].token_ids) == 300
            num_outputs += 1

    def wait_for_two() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while serve.num_running() < 2:
            assert time.monotonic() < deadline, "no second replica came"

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(load)
        await anyio.to_thread.run_sync(wait_for_two)
        is_scaled.set()
    assert num_outputs >= 8
    await serve.delete()


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="module")
async def test_a_replica_whose_engine_is_dead_is_replaced(serve: Serve) -> None:
    from ray.exceptions import RayError

    handle = await serve.run(process=True, deployment={"health_check_period_s": 0.5})
    await handle.generate.remote(PROMPT, max_tokens=4)
    (engine,) = [
        child
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and "ServeReplica:app" in process.info["cmdline"][0]
        for child in process.children()
        if "aioengine.transport.child" in child.cmdline()
    ]
    engine.kill()
    with anyio.fail_after(PATIENCE_S):
        while True:
            try:
                output = await handle.generate.remote(PROMPT, max_tokens=4)
            except (EngineDead, RayError):  # until Serve has checked it
                continue
            break
    assert len(output.outputs[0].token_ids) == 4
    await serve.delete()


@pytest.mark.nightly
@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_cannot_start_is_in_serves_status(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="max_num_seq"):
        serve.made_by.build_app(max_num_seq=8)
    with pytest.raises(RuntimeError):
        await serve.run(model="/nowhere/model", deployment={"max_constructor_retry_count": 1})
    assert "/nowhere/model" in serve.serve.status().applications["app"].deployments["aioengine"].message
    await serve.delete()


@pytest.mark.nightly
def test_what_the_command_line_says_is_read_as_numbers(serve: Serve) -> None:
    arguments = {"max_num_seqs": "4", "num_cpus": "0.5", "enable_prefix_caching": "false", "dtype": "float32"}
    deployment = serve.made_by.builder(arguments)._bound_deployment
    assert deployment.max_ongoing_requests == 8
    assert deployment.ray_actor_options["num_cpus"] == 0.5
    assert deployment.init_args[0] == {
        "model": None, "max_num_seqs": 4, "enable_prefix_caching": False, "dtype": "float32",
    }  # fmt: skip
