"""Grammars of requests, compiled in threads beside the loop; each once, while it is remembered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioengine.errors import AioEngineError, EngineOverloaded, InternalError, InvalidRequest
from aioengine.models.folder import ModelFolder
from aioengine.scheduler.sequence import Request
from aioengine.structured.constraints import Constraint
from aioengine.structured.grammar import STACK_BYTES, CompiledGrammar, ThinkingGrammar
from aioengine.text.loading import has_tokenizer, load_tokenizer
from aioengine.text.worker import TextWorker, outside_work

if TYPE_CHECKING:
    from aioengine.structured.guidance import GuidanceGrammar, Vocabulary

logger = logging.getLogger("aioengine")

COMPILE_TIMEOUT_S = 3.0
"""Of one grammar, of which most take milliseconds; its thread is left alone then, and another takes the next one."""

MAX_OVERDUE = 2
"""Threads that may be left alone; with more grammars are refused until one has ended."""

MAX_REMEMBERED_LEXERS = 64
"""Of a grammar with many rows there are several, of 20 MB at most (`guidance.LIMITS`), and mostly below 1 MB."""
MAX_REMEMBERED_BYTES = 8 * 2**20
"""Of the constraints' texts."""

CLOSE_GRACE_S = 1.0

OnCompiled = Callable[[CompiledGrammar | AioEngineError], None]
IsWanted = Callable[[], bool]


class Grammars:
    """Compiles what requests ask for, for one model's vocabulary, one after the other.

    The tokenizer is read when the first grammar comes. A text is compiled once, and those that were used last are
    remembered.

    Args:
        folder: the model's.
        num_tokens: of its vocabulary.
        ending_ids: tokens that end an output.
    """

    def __init__(self, folder: ModelFolder, num_tokens: int, ending_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._num_tokens = num_tokens
        self._ending_ids = ending_ids
        self._worker = TextWorker(close_grace_s=CLOSE_GRACE_S, stack_bytes=STACK_BYTES)
        self._vocabulary: Vocabulary | None = None
        self._remembered: OrderedDict[bytes, GuidanceGrammar] = OrderedDict()
        """Those that were used last, at the end."""
        self._queue: OrderedDict[bytes, tuple[Constraint, list[tuple[OnCompiled, IsWanted]]]] = OrderedDict()
        """What is to be compiled, what is told of it, and whether that still waits; the first is being compiled."""
        self._num_overdue = 0

    def get(self, request: Request) -> CompiledGrammar | None:
        """The request's grammar, if there is nothing left to compile."""
        constraint = request.params.structured
        if constraint is None:
            return self._with_thinking(request, None)
        key = constraint.content
        compiled = self._remembered.pop(key, None)
        if compiled is None or compiled.is_spent:
            return None
        self._remember(key, compiled)
        return self._with_thinking(request, compiled)

    def begin(self, request: Request, on_compiled: OnCompiled, is_wanted: IsWanted) -> None:
        """Compile the request's grammar; ``on_compiled`` is called, in a later turn of the loop, with it or with what
        keeps it from being one. A grammar is left out if no request is waiting for it when its turn comes."""
        constraint = request.params.structured
        assert constraint is not None, "there is nothing to compile"

        def tell(compiled: CompiledGrammar | AioEngineError) -> None:
            on_compiled(compiled if isinstance(compiled, AioEngineError) else self._with_thinking(request, compiled))

        key = constraint.content
        if key in self._queue:
            self._queue[key][1].append((tell, is_wanted))
            return
        self._queue[key] = constraint, [(tell, is_wanted)]
        if len(self._queue) == 1:
            asyncio.get_running_loop().call_soon(self._compile_next)

    async def aclose(self) -> None:
        """Compile no more. A thread that is still at one ends by itself."""
        self._queue.clear()
        await self._worker.aclose()

    def _with_thinking(self, request: Request, compiled: CompiledGrammar | None) -> CompiledGrammar:
        if request.thinking is not None:
            return ThinkingGrammar(request.thinking, compiled, self._ending_ids)
        assert compiled is not None, "the request has no grammar"
        return compiled

    def _compile_next(self) -> None:
        """Compile the first of the queue that is wanted; with too many threads left alone all are to come again."""
        while self._queue:
            key, (_, waiting) = next(iter(self._queue.items()))
            wanted = [tell for tell, is_wanted in waiting if is_wanted()]
            if wanted and self._num_overdue < MAX_OVERDUE:
                self._compile(key)
                return
            del self._queue[key]
            for tell in wanted:
                tell(EngineOverloaded("grammars that take long are being compiled; try again later", retry_after_s=1.0))

    def _compile(self, key: bytes) -> None:
        """Hand the first of the queue to the thread, and go on with the next when it is done or overdue."""
        loop, constraint = asyncio.get_running_loop(), self._queue[key][0]
        timer: asyncio.TimerHandle | None = None

        def compile_it() -> GuidanceGrammar:
            vocabulary = self._load_vocabulary()
            loop.call_soon_threadsafe(begin_timer)
            return vocabulary.compile(constraint)

        def begin_timer() -> None:
            nonlocal timer
            timer = None if outcome.done() else loop.call_later(COMPILE_TIMEOUT_S, give_up)

        outcome = self._worker.begin(compile_it)
        outside = contextlib.ExitStack()
        outside.enter_context(outside_work("grammar"))
        is_overdue = False

        def give_up() -> None:
            nonlocal is_overdue
            is_overdue = True
            outside.close()
            self._num_overdue += 1
            self._worker.leave_behind()
            told = f"structured: it takes more than {COMPILE_TIMEOUT_S:g} s to compile; give a simpler one"
            self._end(key, InvalidRequest(told, param="structured"))

        def on_done(done: asyncio.Future[GuidanceGrammar]) -> None:
            if timer is not None:
                timer.cancel()
            outside.close()
            error = None if done.cancelled() else done.exception()
            if is_overdue:
                self._num_overdue -= 1
            elif error is None and not done.cancelled():
                self._remember(key, done.result())
                self._end(key, done.result())
            elif isinstance(error, AioEngineError):
                self._end(key, error)
            else:
                logger.error("a grammar could not be compiled", exc_info=error)
                self._end(key, InternalError(f"the grammar could not be compiled: {error}"))

        outcome.add_done_callback(on_done)

    def _end(self, key: bytes, compiled: CompiledGrammar | AioEngineError) -> None:
        """Tell what waits for the first of the queue, and begin with the next."""
        if key not in self._queue:  # closed
            return
        _, waiting = self._queue.pop(key)
        self._compile_next()
        for tell, _ in waiting:
            tell(compiled)

    def _remember(self, key: bytes, compiled: GuidanceGrammar) -> None:
        """Put it at the end, and forget those at the beginning for which there is no room."""
        self._remembered[key] = compiled
        num_lexers = sum(grammar.num_lexers for grammar in self._remembered.values())
        num_bytes = sum(map(len, self._remembered))
        while num_lexers > MAX_REMEMBERED_LEXERS or num_bytes > MAX_REMEMBERED_BYTES:
            forgotten, grammar = self._remembered.popitem(last=False)
            num_lexers, num_bytes = num_lexers - grammar.num_lexers, num_bytes - len(forgotten)

    def _load_vocabulary(self) -> Vocabulary:
        """In the thread; the first time it takes from 10 ms to a second."""
        if self._vocabulary is None:
            from aioengine.structured.guidance import Vocabulary

            backend = load_tokenizer(self._folder.path).backend if has_tokenizer(self._folder.path) else None
            if backend is None:
                raise InvalidRequest(
                    "structured: the model has no tokenizer.json, which grammars are compiled for", param="structured"
                )
            self._vocabulary = Vocabulary(backend.to_str(), self._num_tokens, self._ending_ids)
        return self._vocabulary
