"""Grammars of requests, compiled in threads beside the loop, and cached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioengine.errors import AioEngineError, EngineOverloaded, InternalError, InvalidRequest
from aioengine.models.folder import ModelFolder
from aioengine.processes.worker_threads import TextWorker, outside_work
from aioengine.scheduler.plan import GrammarHandle
from aioengine.structured.constraints import Constraint
from aioengine.structured.grammar import STACK_BYTES, CompiledGrammar, ThinkingGrammar
from aioengine.structured.trials import WALL_S, is_to_be_tried
from aioengine.text.loading import has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from aioengine.structured.guidance import GuidanceGrammar, Vocabulary

logger = logging.getLogger("aioengine")

COMPILE_TIMEOUT_S = 3.0
"""Longest time to compile one grammar; then its requests fail, and its thread is abandoned."""

GIVE_WAY_S = 0.5
"""Time after which a grammar gives way: the next one is compiled beside it, in another thread."""

MAX_OVERDUE = 4
"""Most constraints of a lane that have given way and not ended; further ones wait."""
MAX_OVERDUE_OF_TENANT = 2

MAX_QUEUED = 64
"""Most constraints of one tenant that wait in a lane; further ones are refused."""

MAX_REMEMBERED_LEXERS = 64
"""A grammar with many rows has several lexers, each of 20 MB at most (`guidance.LIMITS`), mostly below 1 MB."""
MAX_REMEMBERED_BYTES = 8 * 2**20
"""Most bytes of the texts of all cached constraints."""

CLOSE_GRACE_S = 1.0

OnCompiled = Callable[[CompiledGrammar | AioEngineError], None]
IsWanted = Callable[[], bool]


class _Lane:
    """Constraints that are compiled one after the other; tenants take turns.

    Attributes:
        queues: the constraints that wait, by tenant; the tenant whose turn is next comes first.
        is_busy: whether a constraint is being compiled that has not given way.
        overdue: number of constraints that have given way and not ended, by tenant.
        given_up: number of these that exceeded their time limit, and may never end, by tenant.
    """

    def __init__(self) -> None:
        self.worker = TextWorker(close_grace_s=CLOSE_GRACE_S, stack_bytes=STACK_BYTES)
        self.queues = OrderedDict[str, dict[bytes, Constraint]]()
        self.is_busy = False
        self.overdue, self.given_up = Counter[str](), Counter[str]()


class Grammars:
    """Compiles the constraints of requests for one model's vocabulary, in two lanes: small constraints, and constraints
    that may take long, which are tried in a process first.

    The tokenizer is loaded with the first grammar. The most recently used grammars are cached.

    Args:
        folder: the model's.
        num_tokens: the size of its vocabulary.
        ending_ids: tokens that end an output.
    """

    def __init__(self, folder: ModelFolder, num_tokens: int, ending_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._num_tokens = num_tokens
        self._ending_ids = ending_ids
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._remembered: OrderedDict[bytes, GuidanceGrammar] = OrderedDict()
        """Cached grammars by their constraints, the most recently used last."""
        self._waiting: dict[bytes, list[tuple[OnCompiled, IsWanted]]] = {}
        """Callbacks for the result and whether each is still wanted, by constraints that are queued or compiled."""
        self._compiling = set[bytes]()
        self._num_begun = 0
        self._small, self._tried = _Lane(), _Lane()

    def get(self, handle: GrammarHandle) -> CompiledGrammar | None:
        """Return a grammar; None: it must be compiled first."""
        if handle.constraint is None:
            return self._with_thinking(handle, None)
        key = handle.constraint.content
        compiled = self._remembered.pop(key, None)
        if compiled is None or compiled.is_spent:
            return None
        self._remember(key, compiled)
        return self._with_thinking(handle, compiled)

    def compile(self, handle: GrammarHandle) -> CompiledGrammar:
        """Return a grammar, compiled now if it must be; for an executor whose plans come from another process.

        Raises:
            InvalidRequest: as `Vocabulary.compile`.
        """
        grammar = self.get(handle)
        if grammar is None:
            assert handle.constraint is not None
            compiled = self._load_vocabulary().compile(handle.constraint)
            self._remember(handle.constraint.content, compiled)
            grammar = self._with_thinking(handle, compiled)
        return grammar

    def begin(self, handle: GrammarHandle, on_compiled: OnCompiled, is_wanted: IsWanted, *, tenant: str = "") -> None:
        """Compile a grammar, and call ``on_compiled`` with it or an error, in a later turn of the loop. A
        grammar is skipped if no request waits for it when its turn comes.

        Args:
            tenant: takes turns with the other tenants, and so waits for at most one constraint of each.
        """
        constraint = handle.constraint
        assert constraint is not None, "there is nothing to compile"

        def report(compiled: CompiledGrammar | AioEngineError) -> None:
            on_compiled(compiled if isinstance(compiled, AioEngineError) else self._with_thinking(handle, compiled))

        key = constraint.content
        lane = self._tried if is_to_be_tried(constraint) else self._small
        if key not in self._compiling:
            self._num_begun += 1
            if not self._num_begun % MAX_QUEUED:
                self._forget_unwanted()
            queue = lane.queues.setdefault(tenant, {})
            if len(queue) >= MAX_QUEUED and key not in queue:
                self._forget_unwanted()
                queue = lane.queues.setdefault(tenant, {})
            if len(queue) >= MAX_QUEUED and key not in queue:
                asyncio.get_running_loop().call_soon(report, _overloaded())
                return
            queue[key] = constraint  # also if another tenant waits for it: that tenant's turn may come later
            asyncio.get_running_loop().call_soon(self._compile_next, lane)
        self._waiting.setdefault(key, []).append((report, is_wanted))

    def _forget_unwanted(self) -> None:
        """Drop requests that have ended, and constraints that none waits for: a lane may be blocked for seconds."""
        for key, waiting in list(self._waiting.items()):
            waiting[:] = [(report, is_wanted) for report, is_wanted in waiting if is_wanted()]
            if not waiting and key not in self._compiling:
                del self._waiting[key]
        for lane in (self._small, self._tried):
            for tenant, queue in list(lane.queues.items()):
                lane.queues[tenant] = {key: queued for key, queued in queue.items() if key in self._waiting}
                if not lane.queues[tenant]:
                    del lane.queues[tenant]

    async def aclose(self) -> None:
        """Stop compiling. A thread that is still compiling ends by itself."""
        self._waiting.clear()
        for lane in (self._small, self._tried):
            lane.queues.clear()
        await self._small.worker.aclose()
        await self._tried.worker.aclose()

    def _with_thinking(self, handle: GrammarHandle, compiled: CompiledGrammar | None) -> CompiledGrammar:
        if handle.thinking is not None:
            return ThinkingGrammar(handle.thinking, compiled, self._ending_ids)
        assert compiled is not None, "the request has no grammar"
        return compiled

    def _compile_next(self, lane: _Lane) -> None:
        """Compile a lane's next wanted constraint. A tenant whose places are all taken waits; if constraints that were
        given up hold them, its requests are refused, to be tried again later."""
        for tenant, queue in list(lane.queues.items()):
            while queue and not lane.is_busy:
                is_refused = _has_no_place(lane.given_up, tenant)
                if _has_no_place(lane.overdue, tenant) and not is_refused:
                    break
                key = next(iter(queue))
                constraint = queue.pop(key)
                if key in self._compiling:
                    continue
                wanted = [report for report, is_wanted in self._waiting.get(key, ()) if is_wanted()]
                if wanted and not is_refused:
                    lane.queues.move_to_end(tenant)
                    self._compile(lane, tenant, key, constraint)
                    continue
                self._waiting.pop(key, None)
                for report in wanted:
                    report(_overloaded())
            if not queue:
                lane.queues.pop(tenant, None)

    def _compile(self, lane: _Lane, tenant: str, key: bytes, constraint: Constraint) -> None:
        """Hand a constraint to the lane's thread; go on with the next one when it is done or overdue."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        outside = contextlib.ExitStack()
        is_overdue = is_given_up = is_done = False  # a closure over the future would keep its error's frames
        lane.is_busy = True
        self._compiling.add(key)

        def compile_it() -> GuidanceGrammar:
            vocabulary = self._load_vocabulary()
            loop.call_soon_threadsafe(begin_timer, GIVE_WAY_S, give_way)
            trial_s = WALL_S if lane is self._tried else 0.0
            loop.call_soon_threadsafe(begin_timer, COMPILE_TIMEOUT_S + trial_s, give_up)
            return vocabulary.compile(constraint)

        def begin_timer(after_s: float, act: Callable[[], None]) -> None:
            if not is_done:
                timers.append(loop.call_later(after_s, act))

        def give_way() -> None:
            nonlocal is_overdue
            if not is_overdue:
                is_overdue, lane.is_busy = True, False
                lane.overdue[tenant] += 1
                lane.worker.leave_behind()
                self._compile_next(lane)

        def give_up() -> None:
            nonlocal is_given_up
            is_given_up = True
            lane.given_up[tenant] += 1
            outside.close()
            message = f"structured: it takes more than {COMPILE_TIMEOUT_S:g} s to compile; give a simpler one"
            self._end(key, InvalidRequest(message, param="structured"))
            give_way()
            self._compile_next(lane)

        def on_done(done: asyncio.Future[GuidanceGrammar]) -> None:
            nonlocal is_done
            is_done = True
            for timer in timers:
                timer.cancel()
            outside.close()
            error = None if done.cancelled() else done.exception()
            if is_overdue:
                lane.overdue -= Counter([tenant])
            else:
                lane.is_busy = False
            if is_given_up:
                lane.given_up -= Counter([tenant])
            self._compile_next(lane)
            if key not in self._waiting or done.cancelled():  # given up, or closed
                return
            if error is None:
                self._remember(key, done.result())
                self._end(key, done.result())
            elif isinstance(error, AioEngineError):
                self._end(key, error)
            else:
                logger.error("a grammar could not be compiled", exc_info=error)
                self._end(key, InternalError(f"the grammar could not be compiled: {error}"))

        outcome = lane.worker.begin(compile_it)
        outside.enter_context(outside_work("grammar"))
        outcome.add_done_callback(on_done)

    def _end(self, key: bytes, compiled: CompiledGrammar | AioEngineError) -> None:
        """Call all callbacks that wait for a constraint."""
        self._compiling.discard(key)
        for report, _ in self._waiting.pop(key, ()):
            report(compiled)

    def _remember(self, key: bytes, compiled: GuidanceGrammar) -> None:
        """Cache a grammar as the most recently used, and drop the least recently used ones beyond the limits."""
        self._remembered[key] = compiled
        num_lexers = sum(grammar.num_lexers for grammar in self._remembered.values())
        num_bytes = sum(map(len, self._remembered))
        while num_lexers > MAX_REMEMBERED_LEXERS or num_bytes > MAX_REMEMBERED_BYTES:
            forgotten, grammar = self._remembered.popitem(last=False)
            num_lexers, num_bytes = num_lexers - grammar.num_lexers, num_bytes - len(forgotten)

    def _load_vocabulary(self) -> Vocabulary:
        """Load the vocabulary, in the thread; the first time takes 10 ms to a second."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                from aioengine.structured.guidance import Vocabulary

                backend = load_tokenizer(self._folder.path).backend if has_tokenizer(self._folder.path) else None
                if backend is None:
                    raise InvalidRequest(
                        "structured: the model has no tokenizer.json, which grammars are compiled for",
                        param="structured",
                    )
                self._vocabulary = Vocabulary(backend.to_str(), self._num_tokens, self._ending_ids)
        return self._vocabulary


def _has_no_place(taken: Counter[str], tenant: str) -> bool:
    return taken[tenant] >= MAX_OVERDUE_OF_TENANT or taken.total() >= MAX_OVERDUE


def _overloaded() -> EngineOverloaded:
    return EngineOverloaded("grammars that take long are being compiled; try again later", retry_after_s=1.0)
