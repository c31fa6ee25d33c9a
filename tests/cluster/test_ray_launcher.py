"""Replicas on a real Ray of two nodes on this machine, which differ for Ray as two machines do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from cli.test_serve import ending_of, serve, story
from cli.test_serve_processes import ask

from aioengine import ConfigError, Engine, EngineDead, ModelLoadError
from aioengine.cluster.ray_launcher import RayLauncher
from aioengine.config import EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.core.protocol import CoreHooks
from aioengine.processes.worker_threads import TextWorker

PROMPTS = [f"Once upon a time there were {count} children who" for count in range(2, 8)]
SAMPLING: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
PATIENCE_S = 90.0


class TwoNodes:
    """A Ray cluster. No test is connected to it but through what it tests, or within `asked`."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args=NODE)
        self.address: str = self._cluster.address
        self.second = self.add_node()

    def add_node(self, **resources: Any) -> Any:
        """In the main thread, as it sets a handler of SIGTERM."""
        return self._cluster.add_node(
            **{"num_cpus": 1, "object_store_memory": NODE["object_store_memory"], **resources}
        )

    def remove_node(self, node: Any) -> None:
        self._cluster.remove_node(node)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    pytest.importorskip("ray", reason="needs Ray: pip install 'aioengine[ray]'")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it may write a token into the home folder
        cluster = TwoNodes()
        yield cluster
        cluster.shutdown()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, quiet_log: None) -> None:
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")


def options(nodes: TwoNodes, **fields: Any) -> ReplicaOptions:
    return ReplicaOptions(launcher="ray", ray_address=nodes.address, **{"replicas": 2, **fields})


async def asked(nodes: TwoNodes, question: Callable[[Any], Any]) -> Any:
    """What Ray says of the cluster. In a thread: in the main one ``ray.init`` would set a handler of SIGTERM."""
    import ray

    def ask() -> Any:
        ray.init(address=nodes.address, log_to_driver=False)
        try:
            return question(ray)
        finally:
            ray.shutdown()

    return await anyio.to_thread.run_sync(ask)


async def nothing_is_left(nodes: TwoNodes, num_cpus: int = 2) -> None:
    """All CPUs are free and no group is there, at once or as soon as Ray has seen the end of its workers."""
    import ray

    assert not ray.is_initialized(), "what was connected is disconnected"

    def wait_for_it(ray: Any) -> list[str]:
        deadline = time.monotonic() + PATIENCE_S
        while (free := ray.available_resources().get("CPU")) != num_cpus:
            assert time.monotonic() < deadline, f"{free} of {num_cpus} CPUs are free"
            threading.Event().wait(0.05)
        return [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]

    assert await asked(nodes, wait_for_it) == []


async def outputs_of(engine: Engine) -> list[list[int]]:
    outputs: dict[str, list[int]] = {}

    async def ask(prompt: str) -> None:
        outputs[prompt] = list((await engine.generate(prompt, **SAMPLING)).outputs[0].token_ids)

    async with anyio.create_task_group() as tasks:
        for prompt in PROMPTS:
            tasks.start_soon(ask, prompt)
    return [outputs[prompt] for prompt in PROMPTS]


def pid_of(engine: Engine, rank: int) -> int:
    return int(engine.replicas()[rank].where.split()[1])


# Without Ray


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'aioengine\[ray\]'"):
        Engine(replicas=ReplicaOptions(launcher="ray"))


@pytest.mark.parametrize(
    ("config", "process", "replicas", "message"),
    [
        ({}, {"visible_devices": (0,)}, {}, "Ray gives each replica its GPUs"),
        ({"device": "cuda:1"}, {}, {}, "say 'cuda'"),
        ({}, {}, {"ray_num_cpus": 0, "ray_num_gpus": 0}, "takes room of some kind"),
    ],
)
def test_what_does_not_go_with_ray_is_refused(
    config: Any, process: Any, replicas: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=message):
        RayLauncher(EngineConfig(**config), ProcessOptions(**process), ReplicaOptions(launcher="ray", **replicas))


async def test_what_was_killed_before_it_was_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    launcher = RayLauncher(EngineConfig(), ProcessOptions(), ReplicaOptions(launcher="ray"))
    worker = TextWorker()
    backend = launcher(0, CoreHooks(worker, worker, on_capacity=lambda: None))
    backend.kill()
    with pytest.raises(EngineDead, match=r"replica 0 \(on Ray\) was killed while it started"):
        await backend.open()
    await backend.aclose()
    await worker.aclose()


# On it


@pytest.mark.nightly
async def test_replicas_are_on_both_nodes_and_answer_as_one_engine_does(nodes: TwoNodes) -> None:
    async with Engine(dtype="float32") as engine:
        expected = await outputs_of(engine)
    async with Engine(dtype="float32", replicas=options(nodes, balance="round_robin")) as engine:
        assert await outputs_of(engine) == expected
        addresses = sorted(replica._backend.address for replica in engine._runtime.backend._replicas.values())
        assert [address.split("://")[0] for address in addresses] == ["ipc", "tcp"], "one is on this process's node"
        folder = anyio.Path(addresses[0].removeprefix("ipc://")).parent
        assert not await folder.exists(), "both sides are connected"
        with pytest.raises(ConfigError, match="needs keys"):
            await Engine.connect(addresses[1])
        await engine.scale(1)
        assert await outputs_of(engine) == expected
        await engine.scale(2)
        assert [each.state for each in engine.replicas()] == ["serving"] * 2, "there was room again"
    await nothing_is_left(nodes)


@pytest.mark.nightly
async def test_each_replica_sees_a_gpu_of_its_own(nodes: TwoNodes) -> None:
    """Of GPUs that Ray is told of, and which nothing computes on."""
    with_gpus = nodes.add_node(num_cpus=0, num_gpus=2)
    process = ProcessOptions(executor="contract.fakes:make", plugins=("cluster.ray_devices",))
    async with Engine(process=process, replicas=options(nodes, ray_num_cpus=0.0, ray_num_gpus=1.0)) as engine:
        assert sorted(await engine.collective_rpc("visible devices")) == ["0", "1"]
    await nothing_is_left(nodes)
    await anyio.to_thread.run_sync(nodes.remove_node, with_gpus)


@pytest.mark.nightly
async def test_a_killed_actor_is_started_again_and_its_requests_go_on(nodes: TwoNodes) -> None:
    async with Engine(dtype="float32") as engine:
        expected = await outputs_of(engine)
    async with Engine(dtype="float32", replicas=options(nodes, balance="round_robin")) as engine:
        killed = pid_of(engine, 0)
        outputs: list[list[int]] = []

        async def ask() -> None:
            outputs.extend(await outputs_of(engine))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            async with engine.stream(PROMPTS[0], **SAMPLING) as stream:
                async for _ in stream:
                    break
                os.kill(killed, signal.SIGKILL)
        assert outputs == expected
        with anyio.fail_after(PATIENCE_S):
            await engine._runtime.core.when(lambda: engine.replicas()[0].state == "serving")
        status = engine.replicas()[0]
        assert status.num_restarts == 1
        assert pid_of(engine, 0) != killed
        assert await outputs_of(engine) == expected
    await nothing_is_left(nodes)


@pytest.mark.nightly
async def test_further_front_ends_reach_replicas_of_both_nodes_and_those_that_come_in_their_place(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    async with Engine(dtype="float32") as engine:
        expected = await outputs_of(engine)
    address = f"ipc://{tmp_path}/c"
    in_turn = options(nodes, balance="round_robin", cluster_address=address)
    async with Engine(dtype="float32", replicas=in_turn) as engine:
        async with await Engine.connect(f"cluster+{address}") as other:
            assert await outputs_of(other) == expected
            cores = [replica.core for replica in other._runtime.core.replicas.values()]
            assert sorted(core.is_far for core in cores) == [False, True], "one is on another node"
            assert addresses_in_folder(engine) == shared_addresses(engine, "ipc")
            for rank in range(2):
                os.kill(pid_of(engine, rank), signal.SIGKILL)
                with anyio.fail_after(PATIENCE_S):
                    for each in (engine, other):
                        await each._runtime.core.when(lambda each=each, rank=rank: has_come_back(each, rank))
                assert await outputs_of(other) == expected
                assert addresses_in_folder(engine) == shared_addresses(engine, "ipc"), "none is of one that was killed"
        assert await outputs_of(engine) == expected
        assert [len(shared_addresses(engine, scheme)) for scheme in ("ipc", "tcp")] == [1, 1]
    await nothing_is_left(nodes)


def addresses_in_folder(engine: Engine) -> list[str]:
    """Of the sockets in the folder of an engine's cluster."""
    folder = Path(engine._runtime.backend._folder.path)
    return [f"ipc://{path}" for path in folder.iterdir() if path.is_socket()]


def shared_addresses(engine: Engine, scheme: str) -> list[str]:
    replicas = engine._runtime.backend._replicas.values()
    return [each.shared_address for each in replicas if each.shared_address.startswith(scheme)]


def has_come_back(engine: Engine, rank: int) -> bool:
    status = engine.replicas()[rank]
    return status.num_restarts == 1 and status.state == "serving" and engine._runtime.core.replicas[rank].is_serving


@pytest.mark.nightly
async def test_several_http_servers_before_replicas_on_ray(nodes: TwoNodes, tmp_path: Path) -> None:
    def serve_and_ask() -> tuple[set[str], str]:
        args = ("--port", "0", "--api-servers", "2", "--replicas", "2", "--launcher", "ray", "--balance", "round_robin")
        with serve(tmp_path, *args, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled") as server:
            url = server.serves()
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as client, contextlib.ExitStack() as stack:
                # Of three streams one server has two, and sends them to both replicas, each on a node of its own.
                stories = [stack.enter_context(story(client, 900)) for _ in range(3)]
                metrics = ask(url, "GET", "/metrics").text
                deadline = time.monotonic() + PATIENCE_S
                while computing_ranks(metrics) != {"0", "1"}:
                    assert time.monotonic() < deadline, metrics
                    metrics = ask(url, "GET", "/metrics").text
                assert [ending_of(pieces)[1] for pieces in stories] == ["length"] * 3
            body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
            texts = {ask(url, "POST", "/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(8)}
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == 0
            return texts, metrics

    texts, metrics = await anyio.to_thread.run_sync(serve_and_ask)
    assert len(texts) == 1
    assert "\naioengine:api_servers 2.0\n" in metrics
    assert metrics.count("\naioengine:replica_serving{") == 2
    await nothing_is_left(nodes)


def computing_ranks(metrics: str) -> set[str]:
    """Of the replicas that have requests running."""
    return set(re.findall(r'^aioengine:replica_num_requests_running{.*rank="(\d+)"} [1-9]', metrics, re.MULTILINE))


@pytest.mark.nightly
async def test_an_actor_that_is_stopped_is_killed_and_replaced(nodes: TwoNodes) -> None:
    async with Engine(replicas=options(nodes, stall_timeout_s=2.0), heartbeat_interval_s=0.2) as engine:
        os.kill(stopped := pid_of(engine, 0), signal.SIGSTOP)
        with anyio.fail_after(PATIENCE_S):
            await outputs_of(engine)
            await engine._runtime.core.when(lambda: engine.replicas()[0].num_restarts == 1)
            await engine._runtime.core.when(lambda: engine.replicas()[0].state == "serving")
        assert pid_of(engine, 0) != stopped
    await nothing_is_left(nodes)


@pytest.mark.nightly
async def test_when_a_node_goes_requests_go_on_elsewhere_and_its_replica_comes_back_with_a_node(
    nodes: TwoNodes,
) -> None:
    async with Engine(dtype="float32") as engine:
        expected = await outputs_of(engine)
    async with Engine(dtype="float32", replicas=options(nodes, balance="round_robin")) as engine:
        outputs: list[list[int]] = []

        async def ask() -> None:
            outputs.extend(await outputs_of(engine))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            async with engine.stream(PROMPTS[0], **SAMPLING) as stream:
                async for _ in stream:
                    break
            await anyio.to_thread.run_sync(nodes.remove_node, nodes.second)
        assert outputs == expected
        with anyio.fail_after(PATIENCE_S):
            await engine._runtime.core.when(lambda: engine.replicas()[1].state == "starting")
        assert "its node is gone" in engine.replicas()[1].reason
        nodes.second = nodes.add_node()
        with anyio.fail_after(PATIENCE_S):
            await engine._runtime.core.when(lambda: engine.replicas()[1].state == "serving")
        assert await outputs_of(engine) == expected
    await nothing_is_left(nodes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("process", "replicas", "kind", "message"),
    [
        ({"plugins": ("not.there",)}, {}, ConfigError, "not.there cannot be imported"),
        ({"executor": "cluster.ray_devices:failing"}, {}, ModelLoadError, "no such weights"),
        ({"executor": "cluster.ray_devices:crashing"}, {}, EngineDead, "its process was killed or has crashed"),
        ({"start_timeout_s": 1.0}, {"ray_num_cpus": 7.0}, EngineDead, r"no room \(CPU 7 on one node\) within 1 s"),
        ({}, {"ray_num_cpus": 0.0}, ConfigError, "the cluster has no GPU: a replica takes room of some kind"),
        ({"start_timeout_s": 5.0}, {"ray_num_cpus": 1e-5}, ConfigError, "on Ray"),
        ({}, {"ray_placement_group": "elsewhere"}, ConfigError, "elsewhere"),
        ({}, {"ray_address": "127.0.0.1:1"}, ConfigError, "no Ray cluster answers"),
        ({}, {"ray_address": "local"}, ConfigError, "ray start --head"),
    ],
)
async def test_a_replica_that_cannot_start_says_why_and_leaves_nothing(
    nodes: TwoNodes, process: Any, replicas: Any, kind: type[Exception], message: str
) -> None:
    replicas = {"ray_address": nodes.address, "replicas": 2, **replicas}
    with pytest.raises(kind, match=message):
        async with Engine(process=ProcessOptions(**process), replicas=ReplicaOptions(launcher="ray", **replicas)):
            raise AssertionError
    await nothing_is_left(nodes)


@pytest.mark.nightly
async def test_a_group_that_is_there_is_used_and_stays(nodes: TwoNodes) -> None:
    def make(ray: Any) -> None:
        group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="SPREAD", name="mine", lifetime="detached")
        assert group.wait(PATIENCE_S)

    def remove(ray: Any) -> str:
        group = ray.util.get_placement_group("mine")
        state: str = ray.util.placement_group_table(group)["state"]
        ray.util.remove_placement_group(group)
        return state

    import ray

    # Names of groups are those of a namespace, which a connection has.
    await anyio.to_thread.run_sync(lambda: ray.init(address=nodes.address, log_to_driver=False))
    try:
        await anyio.to_thread.run_sync(make, ray)
        process = ProcessOptions(executor="contract.fakes:make")
        async with Engine(process=process, replicas=options(nodes, ray_placement_group="mine")) as engine:
            assert [each.state for each in engine.replicas()] == ["serving"] * 2
        assert ray.is_initialized(), "the program has connected itself, and stays connected"
        assert await anyio.to_thread.run_sync(remove, ray) == "CREATED"
    finally:
        await anyio.to_thread.run_sync(ray.shutdown)
    await nothing_is_left(nodes)


@pytest.mark.nightly
async def test_inside_a_group_replicas_are_placed_in_it(nodes: TwoNodes) -> None:
    def ask(ray: Any) -> tuple[list[str], int]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="SPREAD")
        inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        program = ray.remote(states_inside_a_group).options(num_cpus=0, scheduling_strategy=inside)
        found = ray.get(program.remote(), timeout=PATIENCE_S)
        ray.util.remove_placement_group(group)
        return found

    states, num_groups = await asked(nodes, ask)
    assert (states, num_groups) == (["serving"] * 2, 1)
    await nothing_is_left(nodes)


async def _states_inside_a_group() -> tuple[list[str], int]:
    import ray

    process = ProcessOptions(executor="contract.fakes:make")
    async with Engine(process=process, replicas=ReplicaOptions(launcher="ray", replicas=2)) as engine:
        groups = [each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
        return [each.state for each in engine.replicas()], len(groups)


def states_inside_a_group() -> tuple[list[str], int]:
    return anyio.run(_states_inside_a_group)


@pytest.mark.nightly
async def test_a_program_that_disconnects_from_ray_first_closes_its_engine_all_the_same(nodes: TwoNodes) -> None:
    import ray

    async with Engine(process=ProcessOptions(executor="contract.fakes:make"), replicas=options(nodes)):
        await anyio.to_thread.run_sync(ray.shutdown)
    await nothing_is_left(nodes)


@pytest.mark.nightly
async def test_a_start_that_is_cancelled_leaves_nothing(nodes: TwoNodes) -> None:
    engine = Engine(replicas=options(nodes))
    with anyio.move_on_after(1.5) as scope:
        async with engine:
            raise AssertionError
    assert scope.cancelled_caught
    await nothing_is_left(nodes)
