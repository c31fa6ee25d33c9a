"""The interface of an engine core to its callers, wherever it runs: in this loop, or in another process."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from aioengine.config import EngineConfig
from aioengine.core.control import AnyControl
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Health
from aioengine.core.listener import Conditions, Listener
from aioengine.core.observers import Observers, UserCode
from aioengine.errors import EngineDead, InvalidRequest
from aioengine.models.folder import ModelFolder
from aioengine.outputs import FinishReason
from aioengine.outputs.metrics import StepRecord
from aioengine.processes.progress import OnProgress
from aioengine.processes.worker_threads import TextWorker
from aioengine.sampling_params import TOKEN_FIELDS, SamplingParams
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.scheduler.sequence import Request, Sequence
from aioengine.schemas.plain_struct import PlainStruct
from aioengine.validation import shorten

T = TypeVar("T")

CLOSE_DEADLINE_S = 60.0
"""How long closing waits for the step that runs. A device that hangs longer is left to its daemon thread."""


class Core(Protocol):
    """An engine core: `EngineCore` in this process, `RemoteCore` for one in another.

    All but `call` and `run` is synchronous, so that a cancelled caller needs no await to clean up.
    """

    config: EngineConfig
    eos_token_ids: tuple[int, ...]
    death: EngineDead | None
    clock: Callable[[], float]
    observers: Observers
    user_code: UserCode

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def capacity(self) -> int:
        """Sequences that may be accepted and not have run yet: ``max_waiting`` of each engine that serves."""

    @property
    def num_unstarted(self) -> int:
        """Sequences that were added here and never had a row."""

    @property
    def is_drained(self) -> bool:
        """Whether all sequences that were added here have ended, and their listeners know."""

    @property
    def is_sleeping(self) -> bool: ...

    def make_sequence(self, request: Request) -> Sequence:
        """Turn a request into a sequence, its prompt hashed; pure, so that a long one may be made in a thread.

        Its other choices are its children, but for greedy ones: those are all alike, and are computed once.
        """

    def check_accepting(self) -> None:
        """Raise EngineDead or EngineClosed where `add` would."""

    def add(self, sequence: Sequence, listeners: Iterable[Listener], *, arrived_at: float | None = None) -> None:
        """Accept a sequence and its children: from now on each one's listener gets one end or one error.

        Args:
            listeners: the sequence's, then those of its children.
            arrived_at: when the request was made, by ``clock``; absent: now.
        Raises:
            EngineDead, EngineClosed: it is not accepted.
        """

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence now (abort, stop string); idempotent. Its listener gets the end before this returns.

        It is in no later plan. Its blocks are free at once for plans launched from now on, which the device runs after
        those in flight. Children that were to begin with what it computes end with it.
        """

    def abort_all(self) -> None:
        """End all sequences that were added here, with what they have: they are in no later plan.

        Their listeners get the ends in this turn of the loop and the next ones, or from `finish` before that.
        """

    def block(self, sequence: Sequence) -> None:
        """Its reader is behind: compute no more than its listener's ``num_allowed``; tokens in flight still come."""

    def unblock(self, sequence: Sequence) -> None:
        """Its reader has caught up, and ``num_allowed`` has grown; idempotent."""

    async def call(self, control: AnyControl) -> Any:
        """Perform a control call and return its result; up to its first wait it is performed at once.

        Cancelling stops it where it is: a pause or sleep holds sequences back until `resume` or `WakeUp`; what the
        device has begun it carries out; what waits for the device is not done.

        Raises:
            InvalidRequest: it cannot be done now, or was asked for badly.
            EngineClosed, EngineDead: the engine came to an end.
            Exception: what went wrong at the device.
        """

    def resume(self) -> None:
        """Go on after a pause; idempotent. A sleeping engine sleeps on."""

    def when(self, is_so: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that is done once ``is_so``, checked between two steps; or when this core stops."""

    def recheck(self) -> None:
        """Check the awaited conditions again, soon."""

    def last_token_at(self, sequence: Sequence) -> float:
        """When its newest token came, by ``clock``; NaN before the first."""

    def stats(self) -> SchedulerStats: ...

    def health(self) -> Health:
        """Whether the loop and the device make progress."""

    def copy_death(self) -> EngineDead:
        """A copy of a dead engine's error, one for each request: a shared one would collect all tracebacks."""

    async def run(self) -> None:
        """Serve until cancelled, or until the engine breaks; every sequence has got its end then."""


class InFlightSequence(NamedTuple):
    """A sequence that its core no longer has and that has not ended; it can go on at another core, with its tokens.

    Attributes:
        sequence: with its listener. With its children if none of the choices has a token, and all live; else each
            choice is an entry of its own.
        was_running: whether it was known to have a row.
        is_unaffected: whether the core's death had nothing to do with what it computed.
    """

    sequence: Sequence
    was_running: bool
    is_unaffected: bool = False


class ClusterHooks(NamedTuple):
    """Arguments of a backend whose core is one of several that serve as one."""

    conditions: Conditions
    """Shared by all replicas; a core checks them, and must not end them."""
    user_code: UserCode
    """Shared by all replicas; a core must not call `keep`."""
    on_record: Callable[[StepRecord], None]
    """Called with the record of each step, instead of the core's observers."""
    on_death: Callable[[list[InFlightSequence]], None]
    """Called once, when the core has died, with its sequences that had not ended."""
    folder: str | None = None
    """A private one to serve in, for further front ends to connect there all the while; None: there are none."""
    stall_timeout_s: float = math.inf
    """As `ReplicaOptions.stall_timeout_s`."""

    def shared_address(self, rank: int) -> str | None:
        """A new one in ``folder``, for the engine of a rank; None: there is no folder."""
        return None if self.folder is None else f"ipc://{self.folder}/{rank}-{secrets.token_hex(3)}"


class CoreHooks(NamedTuple):
    """Arguments of a backend from the caller's side."""

    worker: TextWorker
    """For imports and files."""
    dump_worker: TextWorker
    """For work that takes long and must hold up nothing else."""
    on_capacity: Callable[[], None]
    """To be called when a waiting sequence has begun to run or has ended."""
    cluster: ClusterHooks | None = None
    """None: the core serves alone."""


class ReplicaStatus(PlainStruct, frozen=True, kw_only=True):
    """One engine of several that serve the same model.

    Attributes:
        rank: its place among all, from 0.
        state: "serving"; "starting"; "draining": it gets no new requests; "backing off": it has died and is to be
            started again; "failed": it could not be started too often, and is given up; "stopped".
        reason: of its last death or failure, for a person; empty while it serves.
        num_restarts: how often it was started again.
        where: its process or address, for a person.
        running, waiting: sequences, of all front ends.
        free_blocks, num_blocks: of its KV cache.
        num_moved: sequences of this front end that were here, and went on at another one.
    """

    rank: int
    state: str
    reason: str = ""
    num_restarts: int = 0
    where: str = ""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    num_moved: int = 0


class Cluster(Protocol):
    """Several engines that serve the same model, as their owner sees them."""

    def statuses(self) -> list[ReplicaStatus]:
        """By rank."""

    async def scale(self, replicas: int) -> None:
        """As `Engine.scale`."""

    async def restart(self) -> None:
        """As `Engine.restart_replicas`."""


class Backend(Protocol):
    """Where an engine core comes from. To be used by one task, on one loop."""

    @property
    def cluster(self) -> Cluster | None:
        """The engines behind the core, where there are several; None: it is one."""

    @property
    def core(self) -> Core:
        """The core, once `open` has returned."""

    async def find_model(self) -> ModelFolder:
        """Find the model's small files: what the caller's side needs for its tokenizer. Called first, once.

        Raises:
            ModelLoadError, ConfigError, EngineDead: there is none.
        """

    async def open(self, on_progress: OnProgress | None = None) -> None:
        """Load the model, or reach an engine that has; then there is a ``core``, which ``core.run`` serves.

        Args:
            on_progress: called on the loop while weights are loaded.
        Raises:
            ModelLoadError, ConfigError, EngineDead: it cannot be.
        """

    async def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        """As `Engine.apply_model`."""

    def kill(self) -> None:
        """End a process that it has started now, without asking; on the loop, before `aclose`. Idempotent."""

    async def aclose(self) -> None:
        """Close all that was opened, in any state. Idempotent."""

    def abandon(self) -> None:
        """End what would outlive the loop, which is gone: nothing can be awaited. From any thread, at any moment."""


def check_limits(params: SamplingParams, config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """Check sampling parameters against an engine's limits: what needs no tokenizer.

    Raises:
        InvalidRequest: they ask for more than the engine or the model has.
    """
    for name, most, setting in (
        ("n", config.max_n, "max_n"),
        ("logprobs", config.max_logprobs, "max_logprobs"),
        ("prompt_logprobs", config.max_logprobs, "max_logprobs"),
    ):
        asked = getattr(params, name)
        if asked is not None and asked > most:
            raise InvalidRequest(f"{name}={asked} is more than this engine allows ({most}, {setting})", param=name)
    if params.extra_args:
        names = [path.partition(":")[2] for path in config.logits_processors]
        for name in params.extra_args:
            if name not in names:
                raise InvalidRequest(
                    f"extra_args names {shorten(name)}, and this engine has no such logits processor (it has: "
                    f"{', '.join(names) or 'none'}); name its place in the engine's logits_processors",
                    param="extra_args",
                )
    if params.num_sequences > config.max_waiting:
        raise InvalidRequest(
            f"n={params.n} choices never find room where max_waiting={config.max_waiting} may wait", param="n"
        )
    if len(params.allowed_token_ids or ()) > vocab_size:  # before a million of them are looked at
        raise InvalidRequest(
            f"allowed_token_ids holds {len(params.allowed_token_ids or ())} ids; the model has {vocab_size}: name each "
            "once",
            param="allowed_token_ids",
        )
    for name in TOKEN_FIELDS:
        worst = max(getattr(params, name) or (), default=0)
        if worst >= vocab_size:
            raise InvalidRequest(f"{name} holds {worst}; the model has 0 to {vocab_size - 1}", param=name)
    if params.allowed_token_ids and params.min_tokens:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if all(token_id in ends for token_id in params.allowed_token_ids):
            raise InvalidRequest(
                f"allowed_token_ids holds only tokens that end the output, and min_tokens={params.min_tokens} forbids "
                "them at first",
                param="allowed_token_ids",
            )
