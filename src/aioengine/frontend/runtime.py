"""The parts of a started engine, and the one task that owns them.

An `Engine` holds a `Runtime`, and no part holds the `Engine`, so that an engine that is dropped unclosed is noticed.
The supervisor task opens everything, serves, and closes everything, whatever ends it: `aclose`, a dead device, a
garbage-collected engine, or the end of `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

import anyio

from aioengine.config import EngineConfig
from aioengine.core.control import AnyControl, Pause, Sleep, WakeUp
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Health
from aioengine.core.observers import UserCode
from aioengine.core.protocol import CLOSE_DEADLINE_S, Backend, Core, CoreHooks
from aioengine.errors import (
    WAIT,
    AioEngineError,
    ConfigError,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InternalError,
    InvalidRequest,
    ModelLoadError,
    describe,
)
from aioengine.frontend.admission import Admission, OnFull
from aioengine.frontend.answer_format import AnswerFormats
from aioengine.frontend.request_state import RequestState
from aioengine.models.folder import ModelFolder
from aioengine.outputs.metrics import EngineMetrics
from aioengine.processes.progress import OnProgress, loading_bar
from aioengine.processes.turns import running_loop, turns_here
from aioengine.processes.worker_threads import TextWorker, run_abandonable
from aioengine.scheduler.policy import POLICIES, ByPriority, Policy, make_policy
from aioengine.text.loading import has_tokenizer
from aioengine.text.template_limits import TemplateLimits
from aioengine.text.token_table import TokenTable
from aioengine.text.tokenizer import Tokenizer

logger = logging.getLogger("aioengine")

LARGE_TEXT_CHARS = 100_000
"""About 20 ms of tokenization, and a long prompt for any model."""

LOAD_GRACE_S = 5.0
"""Longest wait of a cancelled start for a tokenizer that is being loaded; a usual one takes less time."""

CHAT_CLOSE_GRACE_S = 1.0
"""Longest wait of closing for chats that are being rendered; their closed limits stop them at the next step."""

SIDE_TASK_GRACE_S = 5.0
"""Longest wait of closing for side tasks; they have nothing left to wait for, and end in milliseconds."""


class Runtime:
    """The parts of a started engine; made on the engine's loop.

    Args:
        config: the caller's; the core may have that of another process.
        make_backend: makes the backend, which has the core.
    """

    files: ModelFolder
    tokenizer: Tokenizer | None
    core: Core
    answer_formats: AnswerFormats

    def __init__(self, config: EngineConfig, make_backend: Callable[[CoreHooks], Backend]) -> None:
        self._given_config = config
        self.worker = TextWorker()
        self._large_worker = TextWorker()
        """For huge texts and for writing reports: they take long, and delay no other work here."""
        self._chat_worker = TextWorker(close_grace_s=CHAT_CLOSE_GRACE_S)
        """For chats: a template is a program, and may take long over little."""
        self.weights_turn = anyio.Lock()
        self.turns = turns_here()
        self.longest_token_chars: int | None = None
        """Characters of the longest token; None if the tokenizer has no table of them."""
        self.admission = Admission(config.max_waiting, lambda: self.core.num_unstarted, on_left=self._recheck)
        self.backend = make_backend(
            CoreHooks(worker=self.worker, dump_worker=self._large_worker, on_capacity=self._on_capacity)
        )
        self._loop = asyncio.get_running_loop()
        self._started = asyncio.Event()
        """Set when the engine serves, or when its start has failed and everything is closed again."""
        self._start_error: Exception | None = None
        self._start_traceback: TracebackType | None = None
        self._is_serving = False
        self.is_closing = False
        """Whether closing has begun, which nothing stops."""
        self._is_stoppable = False
        self._side_tasks: dict[asyncio.Task[None], Callable[[], None]] = {}
        """The tasks of `start_task` that have not ended, each with its ``on_closed``."""
        # In no task group: start and aclose may be called from different tasks.
        self._supervisor = self._make_task(self._supervise(), "aioengine supervisor")

    @property
    def config(self) -> EngineConfig:
        """The core's config, which may be that of another process."""
        return self.core.config

    @property
    def info(self) -> ExecutorInfo:
        return self.core.info

    # Life

    async def start(self) -> None:
        """Wait until the engine serves. Raises the error of the start, once everything is closed again."""
        try:
            await self._started.wait()
        except asyncio.CancelledError:
            self._stop()
            with anyio.CancelScope(shield=True):  # closing has a deadline of its own
                await asyncio.wait({self._supervisor})
            raise
        self._check_started()

    @property
    def is_starting(self) -> bool:
        return not (self._is_serving or self.is_closing)

    async def wait_started(self, on_full: OnFull = "wait") -> None:
        """See `Engine.wait_started`; EngineOverloaded if ``max_waiting`` others wait and ``on_full`` is "raise"."""
        num_others = len(self.admission.requests) - 1
        if on_full == "raise" and self.is_starting and num_others >= self.admission.capacity:
            message = f"{num_others} requests wait for the engine to start (max_waiting); try again later"
            raise EngineOverloaded(message, retry_after_s=1.0).with_hint(WAIT)
        await self._started.wait()
        self._check_started()

    def _check_started(self) -> None:
        if self._start_error is not None:  # raised to each waiting task, without the other tasks' tracebacks
            raise self._start_error.with_traceback(self._start_traceback)
        if not self._is_serving:
            raise EngineClosed("the engine was closed while it was starting")

    async def aclose(self, *, drain: bool) -> None:
        """End all requests, and wait until everything is closed; as `Engine.aclose`."""
        if self._loop.is_closed():
            self.backend.abandon()
            return
        self.check_loop()
        self.is_closing = True
        failure: Exception | None = None
        if drain and self._is_stoppable and self._is_serving:
            try:
                await self._wake_up()
                # By a callback: cancelling this wait must not stop the closing.
                self._drain(_closed, self._is_drained).add_done_callback(lambda _: self._stop())
            except Exception as error:  # it cannot wake up, or has ended meanwhile: nothing can be drained
                failure = None if isinstance(error, EngineClosed | EngineDead) else error
                self._stop()
            except BaseException:
                self._stop()
                raise
        else:
            self._stop()
        await asyncio.wait({self._supervisor})
        if failure is not None:
            raise failure
        if not self._supervisor.cancelled() and isinstance(broke := self._supervisor.exception(), Exception):
            raise InternalError(f"closing the engine failed: {describe(broke)}") from broke

    def abandon(self) -> None:
        """Close without a task that waits for it, since the engine is garbage. For any thread, at any moment."""
        self.is_closing = True
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:  # the loop is gone, and no task can close anything
            self.backend.abandon()

    def _stop(self) -> None:
        """Interrupt the supervisor, which then closes everything; only once: again would interrupt the closing."""
        self.is_closing = True
        if self._is_stoppable:
            self._is_stoppable = False
            self._user_code.keep()  # tokens may still come before it is interrupted
            self._supervisor.cancel()

    @property
    def is_open(self) -> bool:
        return not self._supervisor.done()

    @property
    def state(self) -> str:
        """The state, for a person: "dead", "open" or "closed"."""
        if self._is_serving and self.core.death is not None:
            return "dead"
        return "open" if self.is_open else "closed"

    def check_running(self) -> None:
        """Raise EngineDead or EngineClosed if no request can be taken. For any thread."""
        if self._is_serving and self.core.death is not None:
            raise self.core.copy_death()
        if self.is_closing:
            raise _closed()
        if not self._is_serving:
            raise EngineClosed("the engine is still starting")

    def check_loop(self) -> None:
        if running_loop() is not self._loop:
            raise RuntimeError(
                "this engine was started on another event loop: use it there, start one here, or go through "
                "asyncio.run_coroutine_threadsafe or loop.call_soon_threadsafe"
            )

    def start_task(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str, on_closed: Callable[[], None]
    ) -> asyncio.Task[None]:
        """Run work that outlives its caller and raises nothing, in a task that the engine owns.

        When the engine is closed, ``on_closed`` is called after all requests have ended. The task then has
        `SIDE_TASK_GRACE_S` to end, before it is cancelled.

        Raises:
            EngineClosed, EngineDead: the engine is closed, or being closed.
        """
        if self.is_closing:
            raise self._end_error()
        task = self._make_task(work(), name)
        self._side_tasks[task] = on_closed
        task.add_done_callback(self._side_tasks.pop)
        return task

    def _make_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._loop.create_task(work, name=name)

    async def _supervise(self) -> None:
        is_loop_gone = False
        try:
            if not self.is_closing:
                self._is_stoppable = True
                await self._open()
                self._is_serving = True
                self._started.set()
                await self.core.run()
        except GeneratorExit:  # nothing can be awaited any more; threads notice that their loop is gone
            is_loop_gone = True
            self.backend.abandon()
            raise
        except asyncio.CancelledError:
            if not self.is_closing:
                warnings.warn("the event loop ended before the engine was closed", ResourceWarning, stacklevel=1)
            raise
        except Exception as error:
            if self._is_serving:
                raise
            self._start_error, self._start_traceback = error, error.__traceback__
        finally:
            self.is_closing = True
            self._is_stoppable = False
            if not is_loop_gone:
                await self._close()
                self._user_code.let_go()

    @property
    def _user_code(self) -> UserCode:
        return self.core.user_code if hasattr(self, "core") else UserCode()

    async def _open(self) -> None:
        self.files = await self.backend.find_model()
        self.sampling_defaults = self.files.sampling_defaults
        with loading_bar(f"loading {self.files.path.name}", is_shown=self._given_config.show_progress) as show:
            await self._load(show)
        self.core = self.backend.core
        if self.tokenizer is not None and self.config.chat_template is not None:
            self.tokenizer.chat_template = self.config.chat_template
        # A name that is not built in is looked for in files.
        self.answer_formats = await self.worker.run(AnswerFormats, None, self.config, self.tokenizer)
        self.core.observers.num_at_door = lambda: self.admission.num_waiting
        self.admission.capacity = self.core.capacity
        self.admission.policy = await self._policy()
        logger.info("%s", self.describe())

    async def _policy(self) -> Policy:
        """The core's policy. For an engine that others have started, their class only if it is imported here."""
        scheduler = self.config.scheduler
        module = scheduler.partition(":")[0]
        is_own = scheduler in POLICIES or scheduler == self._given_config.scheduler
        if is_own or (module in sys.modules and module != "__main__"):
            try:
                return await self.worker.run(make_policy, None, scheduler)
            except ConfigError:
                if is_own:
                    raise
        logger.info("requests wait by priority to be admitted: the engine's policy %s is not known here", scheduler)
        return ByPriority()

    async def _load(self, show: OnProgress | None) -> None:
        """Load the tokenizer and the model; each step of progress extends the deadline by ``load_timeout_s``."""
        timeout_s = self._given_config.load_timeout_s
        with anyio.CancelScope(deadline=self._loop.time() + timeout_s) as scope:

            def on_progress(done: int, total: int, *of_what: str) -> None:
                scope.deadline = self._loop.time() + timeout_s  # called by the loop itself, where anyio has no clock
                if show is not None:
                    show(done, total, *of_what)

            folder = self.files.path
            # Not in the worker, since closing waits for the worker and cannot stop a library that runs for ever.
            self.tokenizer = await run_abandonable(
                lambda: Tokenizer.load(folder) if has_tokenizer(folder) else None, grace_s=LOAD_GRACE_S
            )
            if self.tokenizer is not None:
                self.tokenizer.template_limits = TemplateLimits(self._given_config.chat_template_timeout_s)
                table = self.tokenizer.token_table()
                if isinstance(table, TokenTable):
                    self.longest_token_chars = max((len(piece) for piece in table.pieces if piece), default=1)
            await self.backend.open(on_progress)
        if scope.cancelled_caught:
            raise ModelLoadError(
                f"{self.files.path}: loading made no progress for {timeout_s:g} s (load_timeout_s); its files "
                "cannot be read, or one of them makes its library run for ever"
            )

    async def _close(self) -> None:
        """Close all parts that were opened, in any state; then set `_started`, for tasks that wait in `start`."""
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_DEADLINE_S) as deadline:
                try:
                    await self._close_parts()
                except asyncio.CancelledError:
                    if not deadline.cancel_called:  # then the loop is ending, and waits for this task
                        await self._close_parts()
                    raise
            if deadline.cancelled_caught:
                logger.error("closing took more than %s s; what hangs is left behind", CLOSE_DEADLINE_S)
        finally:
            self._started.set()

    async def _close_parts(self) -> None:
        await self.admission.close(self._end_error)
        # The core has ended all requests, unless it broke meanwhile: none may wait for ever.
        for request in list(self.admission.requests):
            with self._user_code.called("while ending what was running"):
                request.fail(self._end_error)
        self.admission.requests.clear()
        tokenizer = getattr(self, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.template_limits.is_closed = True
        async with contextlib.AsyncExitStack() as parts:  # closes the last one first, and each, whatever others raise
            for part in (self._chat_worker, self._large_worker, self.worker, self.backend):
                parts.push_async_callback(part.aclose)
        await self._end_side_tasks()
        if tokenizer is not None:
            # The caller may still use it. Only now: chats that wait for their thread must find closed limits.
            tokenizer.template_limits.is_closed = False

    async def _end_side_tasks(self) -> None:
        for on_closed in list(self._side_tasks.values()):
            on_closed()
        try:
            if self._side_tasks:
                await asyncio.wait(list(self._side_tasks), timeout=SIDE_TASK_GRACE_S)
        finally:
            for task in self._side_tasks:
                task.cancel()
        if self._side_tasks:
            await asyncio.wait(list(self._side_tasks))

    # Requests

    def worker_for(self, num_chars: int | None) -> TextWorker:
        """The worker for a text of so many characters; None: for a chat. No text waits for one that takes seconds."""
        if num_chars is None:
            return self._chat_worker
        return self._large_worker if num_chars > LARGE_TEXT_CHARS else self.worker

    def open_worker_for(self, num_chars: int | None) -> TextWorker:
        """The worker for one of several pieces of work; raises if the engine was closed between two pieces."""
        self.check_running()
        return self.worker_for(num_chars)

    def abort(self, request: RequestState) -> None:
        """End a request with the output that it has, in any state. Idempotent."""
        request.is_aborted = True
        if request.is_begun:
            request.abort()
        else:  # it ends at its admission, or instead of it
            self.admission.dismiss(request)

    def abort_named(self, request_id: str) -> None:
        """Abort all requests of this id."""
        requests = [request for request in self.admission.requests if request.request_id == request_id]
        if requests:
            self.check_loop()
        for request in requests:
            self.abort(request)

    def abort_all(self) -> None:
        """Abort all requests; readers of requests that have begun may wake in later turns of the loop."""
        requests = list(self.admission.requests)
        if requests:
            self.check_loop()
        if self._is_serving:
            self.core.abort_all()
        for request in requests:
            if not request.is_begun:
                self.abort(request)

    # The whole engine

    async def drain(self) -> None:
        """Refuse new requests, and wait until all earlier ones have ended, or the engine is resumed."""
        was_over = False

        def is_over() -> bool:
            nonlocal was_over
            was_over = self._is_drained() or self.admission.refusal is None
            return was_over

        self.admission.refusal = _draining
        await self._wake_up()
        await self._drain(_draining, is_over)
        if not was_over:  # nothing runs in a closed or dead engine, either
            raise self._end_error()

    async def call(self, control: AnyControl) -> Any:
        """Have the core perform a control call."""
        if isinstance(control, Pause | Sleep) and control.mode == "abort":
            self.abort_all()  # requests on their way to the core, too
        return await self.core.call(control)

    def health(self) -> Health:
        if self._is_serving:
            return self.core.health()
        if self.is_starting:
            return Health(status="STARTING", reason="it is still starting")
        return Health(status="DEAD", reason="it is closed")

    def current_metrics(self) -> EngineMetrics:
        """The metrics, with the gauges set to the current load."""
        stats, metrics = self.core.stats(), self.core.observers.metrics
        waiting = stats.waiting + stats.blocked + self.admission.num_waiting
        metrics.set_load(stats.running, waiting, stats.blocked, stats.free_blocks, stats.num_blocks)
        metrics.num_requests_waiting_for_admission.value = self.admission.num_waiting
        return metrics

    async def _wake_up(self) -> None:
        """Wake the engine up if it sleeps, since requests of a sleeping engine never end."""
        if self.core.is_sleeping:
            await self.core.call(WakeUp())

    def _drain(self, refusal: Callable[[], AioEngineError], is_over: Callable[[], bool]) -> asyncio.Future[None]:
        self.admission.refusal = refusal
        self.core.resume()  # requests of a paused engine never end
        return self.core.when(is_over)

    def _is_drained(self) -> bool:
        return self.core.is_drained and self.admission.is_quiet

    # Text

    def require_tokenizer(self, param: str = "prompt") -> Tokenizer:
        """The tokenizer, or InvalidRequest about this parameter of a call if the model has none."""
        if self.tokenizer is None:
            instead = "give the prompt as token ids" if param == "prompt" else "it gives token ids alone"
            raise InvalidRequest(f"this model has no tokenizer; {instead}", param=param)
        return self.tokenizer

    def describe(self) -> str:
        """One line about the model, its weights and its KV cache, for a person."""
        info = self.info
        held = info.most_held(info.max_model_len, self.config.max_num_batched_tokens)
        num_fitting = min(count / most for count, most in zip(info.pool_blocks, held, strict=True))
        return (
            f"{self.files.path.name} on {info.device} in {info.dtype}: weights {info.weight_bytes / 2**20:,.0f} MiB; "
            f"KV cache {info.kv_cache_bytes / 2**20:,.0f} MiB = {info.num_blocks:,} blocks of {info.block_size} tokens "
            f"= {round(num_fitting * info.max_model_len):,} tokens, {num_fitting:,.1f} sequences of "
            f"{info.max_model_len:,}"
        )

    def _on_capacity(self) -> None:
        if self._is_serving:
            self.admission.capacity = self.core.capacity
        self.admission.admit()

    def _recheck(self) -> None:
        if self._is_serving:
            self.core.recheck()

    def _end_error(self) -> AioEngineError:
        return self.core.copy_death() if self._is_serving and self.core.death is not None else _closed()


def _closed() -> EngineClosed:
    return EngineClosed("the engine is closed")


def _draining() -> EngineClosed:
    return EngineClosed("the engine is draining: it takes no new requests until it is resumed")
