"""Replicas as actors of a Ray cluster (https://docs.ray.io).

Ray finds a replica its place, starts its process, and reports its end; an actor's calls carry what a handshake's
socket carries elsewhere. Requests and tokens never go through Ray: they have the engine's own connection, which is ipc
where the actor runs beside this process, and tcp with keys where it does not. The actor makes its pair in memory, and
so does this side for each replica; with further front ends there is one pair for all of them, in the cluster's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import socket
import sys
import threading
from typing import Any, NamedTuple

import anyio
import msgspec

from aioengine.cluster.launchers import Launcher
from aioengine.config import EngineConfig, ProcessOptions, ReplicaOptions
from aioengine.core.in_process import find
from aioengine.core.protocol import CoreHooks
from aioengine.errors import ConfigError, EngineDead
from aioengine.models.folder import ModelFolder
from aioengine.processes.own_process import limit_spinning
from aioengine.processes.progress import OnProgress
from aioengine.processes.worker_threads import run_abandonable
from aioengine.transport.addresses import pair_in, remove_private
from aioengine.transport.backends import ATTACH_TIMEOUT_S, EXIT_GRACE_S, refuse_function
from aioengine.transport.client import RemoteCore
from aioengine.transport.engine_process import serve_init
from aioengine.transport.handshake import Failing, Init, Loading, Ready, start_error
from aioengine.transport.link import Link
from aioengine.transport.security import ClientKeys, KeyPair, ServerKeys, shared_pair
from aioengine.transport.wire import PROTOCOL_VERSION, Attached, Fault, WireMessage, to_error, to_fault

logger = logging.getLogger("aioengine")

PENDING_AFTER_S = 10.0
"""A replica without a place for so long is logged. An actor takes a second where there is room."""

END_NEWS_S = 0.5
"""How long Ray may take to report an actor's end after its connection has ended; on one machine it takes 10 ms."""

HEAD_TIMEOUT_S = 5.0

RELEASE_GRACE_S = 10.0
"""For calls of Ray's that a cancelled start has begun; those here take milliseconds while its head answers."""


class Introduction(NamedTuple):
    """Where an actor was placed.

    Attributes:
        node_id: Ray's, of its node.
        ip: of that node, as others reach it.
        uid: of the user that it runs as.
        key: the public half of the pair that it made; the secret one never travels.
    """

    node_id: str
    ip: str
    pid: int
    uid: int
    key: bytes


class ReplicaActor:
    """An engine that Ray starts: `run` serves it; meanwhile `next_update` and `end` are called beside.

    Ray runs an actor with async methods in one loop, and each call as a task of it. Errors are returned as messages:
    Ray would wrap them.

    Args:
        log_level: of this package's logger; what it writes to stderr Ray shows in the driver's terminal.
    """

    def __init__(self, log_level: int) -> None:
        limit_spinning()
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("aioengine").setLevel(log_level)
        self._pair = KeyPair.make()
        self._scope = anyio.CancelScope()
        self._update: WireMessage | None = None
        self._has_update = asyncio.Event()

    async def introduce(self) -> Introduction:
        """Return where this is."""
        import ray

        node_id, ip = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Introduction(node_id, ip, os.getpid(), os.geteuid(), self._pair.public)

    async def run(self, init: Init, client_key: bytes | None) -> Fault | None:
        """Load the model and serve it until `end`; or until it dies, and return what of.

        Args:
            client_key: public, of those that may connect over tcp: this actor's driver, and further front ends that
                have its pair. None: it serves where its driver is, by ipc.
        """
        keys = None if client_key is None else ServerKeys.admitting(self._pair, client_key)
        try:
            with self._scope:
                await serve_init(init, keys, self._report)
        except Exception as error:  # of plugins and executors it may be any
            fault = to_fault(error)
            self._report(Failing(fault))
            return fault
        return None

    async def next_update(self) -> WireMessage | None:
        """The newest of `Loading`, `Ready` and `Failing` that was not returned yet, once there is one."""
        await self._has_update.wait()
        self._has_update.clear()
        return self._update

    async def end(self) -> None:
        """Let `run` end."""
        self._scope.cancel()

    def _report(self, update: WireMessage) -> None:
        self._update = update
        self._has_update.set()


class RayLauncher(Launcher):
    """Makes the backends of replicas on Ray; a `MakeBackend`.

    This process is connected to a cluster when the first replica opens, unless the program has done so; what was
    connected here `aclose` disconnects. ``ray.init`` sets no signal handlers, being called in a thread.

    Raises:
        ConfigError: Ray is not installed, or an option does not go with it.
    """

    def __init__(self, config: EngineConfig, process: ProcessOptions, options: ReplicaOptions) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("launcher='ray' needs Ray: pip install 'aioengine[ray]'")
        if process.visible_devices is not None:
            raise ConfigError(
                f"visible_devices={process.visible_devices}: Ray gives each replica its GPUs; leave it out, and say "
                "how many in ray_num_gpus"
            )
        if config.device.startswith("cuda:"):
            raise ConfigError(f"device={config.device!r}: Ray gives each replica its GPU; say 'cuda' or 'auto'")
        if options.ray_num_cpus == options.ray_num_gpus == 0:
            raise ConfigError("ray_num_cpus=0 and ray_num_gpus=0: a replica takes room of some kind; ask for one")
        self.config = config
        self.process = process
        self.options = options
        self.turn = anyio.Lock()
        """To be held while a replica is placed: those that are asked for first are beside this process."""
        self._is_connected_here = False

    def __call__(self, rank: int, hooks: CoreHooks) -> InActor:
        return InActor(rank, self, hooks)

    def connect(self) -> None:
        """Connect this process to Ray unless it is; to be called in a thread, one at a time.

        Raises:
            ConfigError: there is no cluster at the address, or this is a client of Ray's outside of the cluster.
        """
        import ray

        if ray.is_initialized():
            if ray.util.client.ray.is_connected():
                raise ConfigError(
                    "this process is a client of a Ray cluster (ray://), and replicas are reached from inside of it: "
                    "run it as a job, or on one of the cluster's machines"
                )
            return
        address = self.options.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
        _check_head(address)
        try:
            ray.init(address=address)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            why = str(error).rstrip(".")
            raise ConfigError(
                f"cannot connect to a Ray cluster ({address}): {why}; start one with `ray start --head`, say where it "
                "is in ray_address, or call ray.init() first"
            ) from error
        self._is_connected_here = True

    def resources(self) -> dict[str, float]:
        """CPUs and GPUs that a replica asks for; to be called in a thread.

        Raises:
            ConfigError: it asks for neither.
        """
        import ray

        num_gpus = self.options.ray_num_gpus
        may_use_gpu = self.config.device != "cpu" and self.process.executor is None
        if num_gpus is None:
            num_gpus = float(may_use_gpu and ray.cluster_resources().get("GPU", 0.0) >= 1.0)
        wanted = {"CPU": self.options.ray_num_cpus, "GPU": num_gpus}
        resources = {name: amount for name, amount in wanted.items() if amount}
        if not resources:  # Ray makes no group of nothing
            why_no_gpu = "the cluster has no GPU" if may_use_gpu else "it computes on no GPU"
            raise ConfigError(
                f"ray_num_cpus=0, and {why_no_gpu}: a replica takes room of some kind; ask for ray_num_cpus or "
                "ray_num_gpus"
            )
        return resources

    async def aclose(self) -> None:
        """Disconnect this process from Ray if it was connected here; after all backends are closed. Idempotent."""
        if self._is_connected_here:
            self._is_connected_here = False
            import ray

            await run_abandonable(ray.shutdown)


class InActor:
    """A `ReplicaBackend` whose core is in an actor of a Ray cluster.

    Attributes:
        address, keys: where the engine serves and the keys to connect to it with (None for ipc), once it is open.
    """

    core: RemoteCore
    address: str
    cluster = None

    def __init__(self, rank: int, launcher: RayLauncher, hooks: CoreHooks) -> None:
        self.keys: ClientKeys | None = None
        self._rank = rank
        self._where = ""
        self._shared_socket = ""
        """The file that it serves at for further front ends, too."""
        self._launcher = launcher
        self._hooks = hooks
        self._folder = None if hooks.cluster is None else hooks.cluster.folder
        """For further front ends."""
        self._link = Link(hooks.worker)
        self._lock = threading.Lock()
        self._is_released = False
        self._around: Any = None
        """The placement group that this process is inside of, if what it starts is to be, too."""
        self._group: Any = None
        """The one that was made for this replica."""
        self._actor: Any = None
        self._driver_node = ""
        self._resources: dict[str, float] = {}
        self._has_begun = False
        self._has_ended = asyncio.Event()
        self._end_news: str | None = None
        self._is_end_expected = False

    async def find_model(self) -> ModelFolder:
        self._around = _group_around()
        async with self._launcher.turn:
            await run_abandonable(self._create, grace_s=RELEASE_GRACE_S)
        return await find(self._launcher.config, self._hooks.worker, with_weights=False)

    async def open(self, on_progress: OnProgress | None = None) -> None:
        timeout_s = self._launcher.process.start_timeout_s
        with anyio.move_on_after(timeout_s) as scope:
            introduction = await self._introduced()
            await self._begin(introduction)
            await self._loaded(on_progress)
        if scope.cancelled_caught:
            late = "was not ready" if self._has_begun else f"found no room ({self._wanted()} on one node)"
            raise EngineDead(f"{self._name} {late} within {timeout_s:g} s (start_timeout_s)")
        try:
            attached = await self._link.attach(
                self.address, self.keys, Attached, name="its driver", timeout_s=ATTACH_TIMEOUT_S
            )
        except EngineDead as error:  # its end, where there is one, is the cause
            raise EngineDead(await self._news_of_end() or str(error)) from error
        self.core = RemoteCore(
            self._link,
            attached,
            config=self._launcher.config,
            hooks=self._hooks,
            is_far=self.keys is not None,
            describe_cut=self._describe_cut,
            logs_stats=True,
        )
        if self._end_news is not None:  # meanwhile
            self.core.die(EngineDead(self._end_news))
        if self._has_own_folder:  # no other peer is to connect, and what is killed from now on leaves no file
            await self._hooks.worker.run(remove_private, None, self.address)

    apply_model = refuse_function

    @property
    def where(self) -> str:
        """Its node and process, for a person."""
        return self._where

    @property
    def shared_address(self) -> str:
        """As `ReplicaBackend.shared_address`."""
        return self.address if self._folder is not None and hasattr(self, "address") else ""

    @property
    def server_key(self) -> str:
        """As `ReplicaBackend.server_key`."""
        return self.keys.server.decode() if self.keys is not None else ""

    @property
    def _has_own_folder(self) -> bool:
        """Whether it serves in a folder that it has made itself."""
        return hasattr(self, "address") and self.keys is None and self._folder is None

    async def aclose(self) -> None:
        """Ask it to end, and kill it where it does not within ``stop_timeout_s``; its placement group goes with it."""
        self._is_end_expected = True
        try:
            try:
                await self._link.aclose()
            finally:
                await self._ask_to_end()
                await run_abandonable(self._release, grace_s=RELEASE_GRACE_S)
        except asyncio.CancelledError:
            self.abandon()
            raise

    def kill(self) -> None:
        """By a thread: the loop is not to wait for Ray."""
        self._is_end_expected = True
        self._release_in_thread()

    def abandon(self) -> None:
        self._is_end_expected = True
        self._link.abandon()
        self._release_in_thread()

    def _release_in_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and the actor with it
            threading.Thread(target=self._release, name="aioengine-ray", daemon=True).start()

    @property
    def _name(self) -> str:
        return f"replica {self._rank} ({self._where or 'on Ray'})"

    # In threads: Ray's calls may wait for its head

    def _create(self) -> None:
        """Have Ray begin to look for a place and to start the actor there.

        Raises:
            ConfigError: there is no such cluster or group, or no place could do.
            EngineDead: Ray fails.
        """
        self._launcher.connect()
        import ray

        with self._lock:
            if self._is_released:
                return
            try:
                self._place()
            except ValueError as error:  # no bundle of the group can hold a replica, or Ray has no such amounts
                raise ConfigError(f"{self._name}: {error}") from error
            except ray.exceptions.RayError as error:
                raise EngineDead(f"{self._name} cannot start: {_reason(error)}") from error

    def _place(self) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._driver_node = ray.get_runtime_context().get_node_id()
        self._resources = self._launcher.resources()
        group = self._given_group()
        if not group:  # one bundle, on this process's node if there is room: a replica has one node by itself
            group = self._group = placement_group(
                [self._resources], strategy="STRICT_PACK", _soft_target_node_id=self._driver_node or None
            )
        self._actor = (
            ray.remote(ReplicaActor)
            .options(
                num_cpus=self._resources.get("CPU", 0),
                num_gpus=self._resources.get("GPU", 0),
                # Any bundle with room: this process may have one of a given group.
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, -1, True),
            )
            .remote(logging.getLogger("aioengine").getEffectiveLevel())
        )

    def _given_group(self) -> Any:
        """The placement group that was named, or the one around this process; or None."""
        from ray.util.placement_group import get_placement_group

        name = self._launcher.options.ray_placement_group
        if name is None:
            return self._around
        try:
            return get_placement_group(name)
        except ValueError as error:
            raise ConfigError(f"ray_placement_group={name!r}: {error}") from error

    def _release(self) -> None:
        """Kill the actor, remove the group that was made for it and what a killed one leaves. Idempotent; once Ray is
        gone, so are they."""
        with self._lock:
            self._is_released = True
            actor, self._actor = self._actor, None
            group, self._group = self._group, None
            if actor is not None or group is not None:
                _give_back(actor, group)
            # Each time: since it was killed before, the start may have learnt where it serves.
            if self._has_own_folder:
                remove_private(self.address)
            elif self._shared_socket:
                # Also where it still listens: its end comes a little after it is killed, and the name is its alone.
                with contextlib.suppress(OSError):
                    os.unlink(self._shared_socket)

    # The start

    async def _introduced(self) -> Introduction:
        """Wait until the actor is there."""
        message = "%s waits for room in the cluster: %s on one node"
        loop = asyncio.get_running_loop()
        pending = loop.call_later(PENDING_AFTER_S, lambda: logger.warning(message, self._name, self._wanted()))
        try:
            introduction: Introduction = await self._answer(self._call("introduce"))
        finally:
            pending.cancel()
        return introduction

    async def _begin(self, introduction: Introduction) -> None:
        """Have it load and serve, where this process can reach it."""
        node_id, ip, pid, uid, key = introduction
        self._where = f"pid {pid} at {ip}, on Ray"
        address = None if self._hooks.cluster is None else self._hooks.cluster.shared_address(self._rank)
        client_key = None
        # A socket in a folder is another user's where Ray was started by one.
        if node_id != self._driver_node or uid != os.geteuid():
            folder = self._folder  # a pair of its own, or that of all front ends
            pair = KeyPair.make()
            if folder is not None:
                pair = await self._hooks.worker.run(lambda: shared_pair(pair_in(folder)), None)
            self.keys, client_key = ClientKeys(server=key, pair=pair), pair.public
            address = f"tcp://[{ip}]:0" if ":" in ip else f"tcp://{ip}:0"
        elif address is not None:
            self._shared_socket = address.removeprefix("ipc://")
        init = Init(
            version=PROTOCOL_VERSION,
            address=address,
            # This side logs load and requests: once is enough.
            config=msgspec.structs.replace(self._launcher.config, log_stats_interval_s=0.0, log_requests=False),
            plugins=self._launcher.process.plugins,
            executor=self._launcher.process.executor,
        )
        run = self._call("run", init, client_key)
        self._has_begun = True
        asyncio.wrap_future(run.future()).add_done_callback(self._on_end)

    async def _loaded(self, on_progress: OnProgress | None) -> None:
        """Wait until it serves."""
        while True:
            update = await self._answer(self._call("next_update"))
            match update:
                case Loading() if on_progress is not None and update.total:
                    on_progress(update.done, update.total)
                case Ready():
                    self.address = update.address
                    return
                case Failing():
                    raise start_error(to_error(update.fault))

    def _call(self, method: str, *args: Any) -> Any:
        """Begin a call of the actor. → Ray's reference to what it returns.

        Raises:
            EngineDead: it was killed by a thread, or the program has disconnected from Ray.
        """
        actor = self._actor
        if actor is None:
            raise EngineDead(f"{self._name} was killed while it started")
        import ray

        if not ray.is_initialized():  # the call would connect to some cluster, or start one
            raise EngineDead(f"{self._name} is gone: this process was disconnected from Ray")
        try:
            return getattr(actor, method).remote(*args)
        except Exception as error:  # a bare one, where this process has connected again and the actor is not known
            raise EngineDead(f"{self._name} cannot be reached by Ray: {_reason(error)}") from error

    async def _answer(self, ref: Any) -> Any:
        """Return the actor's answer.

        Raises:
            EngineDead: it cannot be placed, or has died.
        """
        import ray

        try:
            return await ref
        except ray.exceptions.RayError as error:
            raise EngineDead(f"{self._name} cannot start: {_reason(error)}") from error

    def _wanted(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self._resources.items())

    # The end

    async def _ask_to_end(self) -> None:
        if not self._has_begun or self._has_ended.is_set():
            return
        try:
            self._call("end")
        except EngineDead:  # it was killed, or has ended with this process's connection to Ray
            return
        with anyio.move_on_after(self._launcher.process.stop_timeout_s):
            await self._has_ended.wait()

    def _on_end(self, run: asyncio.Future[Fault | None]) -> None:
        if run.cancelled():
            return
        error = run.exception()
        fault = None if error is not None else run.result()
        how = "has died" if error is not None or fault is not None else "has ended"
        reason = _reason(error) if error is not None else fault.message if fault is not None else "it was told to"
        self._end_news = f"{self._name} {how}: {reason}"
        self._has_ended.set()
        if hasattr(self, "core") and not self._is_end_expected:  # the final message comes first
            death = EngineDead(self._end_news, dump="" if fault is None else fault.dump)
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.core.die, death)

    async def _news_of_end(self) -> str | None:
        """How it has ended, if that is so, or becomes known now."""
        with anyio.move_on_after(END_NEWS_S):
            await self._has_ended.wait()
        return self._end_news

    async def _describe_cut(self) -> str:
        return await self._news_of_end() or f"the connection to {self._name} was cut, and Ray says nothing of its end"


def _group_around() -> Any:
    """The placement group that this task or actor of Ray's runs in, where its children are to; to be called in its own
    thread, since others know nothing of a task."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return ray.util.get_current_placement_group() if context.should_capture_child_tasks_in_placement_group else None


def _give_back(actor: Any, group: Any) -> None:
    """Kill an actor and remove a group, where they are not None and Ray is there; in a thread."""
    import ray
    from ray.util.placement_group import remove_placement_group

    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            if actor is not None:
                ray.kill(actor)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            if group is not None:
                remove_placement_group(group)


def _check_head(address: str) -> None:
    """Raise ConfigError where Ray would wait for minutes, as nothing listens there, or start a cluster of its own.

    That would end with the thread that starts it.
    """
    if address == "local":
        raise ConfigError(
            "ray_address='local': start a cluster with `ray start --head`, or by ray.init() in the program"
        )
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray_address={address!r}: Ray's client cannot be used, since replicas are reached from inside of the "
            "cluster: run this as a job, or on one of its machines, with the address host:port"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():  # "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at ray_address={address!r}: {error}") from error


def _reason(error: BaseException) -> str:
    """Why, in one line, of an error of Ray's: no ids, and no list of what may kill a process anywhere."""
    text = " ".join(line for line in str(error).splitlines()[1:] if not line.startswith("\t")) or str(error)
    if "its node has died" in text:
        return "its node is gone"
    if "Worker unexpectedly exits" in text:
        return "its process was killed or has crashed; Ray's log of that worker may say more"
    return text.strip()
