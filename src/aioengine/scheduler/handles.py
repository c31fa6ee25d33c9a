"""Handles: plain data in plans for what cannot leave its process, compiled grammars and logits processors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from aioengine.errors import InvalidRequest
from aioengine.structured.constraints import Constraint
from aioengine.structured.grammar import CompiledGrammar, Thinking

LogitsProcessor = Callable[[Any, list["LogitsRow"]], Any]
"""Changes logits: (float32 tensor [rows, vocab], the rows) → logits of the same shape, or None if changed in place.

It runs in the device thread before penalties and temperature, once a step, with all the rows of that step whose
requests were given this same object. In this process only: a function cannot be sent to another one. An exception that
it raises ends those rows' requests (`StepFailed`), and no others.
"""


class LogitsRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One row of the logits that a `LogitsProcessor` is given; equal to itself alone.

    Attributes:
        prompt_token_ids, output_token_ids: int32 [tokens] each, read-only; the next output token is being chosen.
        choice: which of the request's ``n`` choices; 0 where the first tokens of several are drawn from these logits,
            and for greedy choices, which are all alike and one row.
    """

    prompt_token_ids: NDArray[np.int32]
    output_token_ids: NDArray[np.int32]
    choice: int


class GrammarHandle(msgspec.Struct, frozen=True, eq=False, weakref=True, array_like=True):
    """A grammar, by all that it is compiled from; equal to itself alone.

    Attributes:
        constraint: on the text; None: any text.
        thinking: the reasoning before that text; None: there is none.
    """

    constraint: Constraint | None
    thinking: Thinking | None = None


class ProcessorHandle(msgspec.Struct, frozen=True, eq=False, weakref=True, array_like=True):
    """A logits processor; equal to itself alone.

    Attributes:
        number: means nothing in another process.
    """

    number: int


class Handles:
    """The grammars and logits processors of one executor, by their handles. Any thread may use it.

    The core fills it. An entry lasts as long as its handle, and so as long as a sequence or a plan has that.

    Attributes:
        compile_grammar: compiles a grammar whose handle came from another process; not called on the loop. None: plans
            come from this process alone.
    """

    compile_grammar: Callable[[GrammarHandle], CompiledGrammar] | None = None

    def __init__(self) -> None:
        self._grammars: WeakKeyDictionary[GrammarHandle, CompiledGrammar] = WeakKeyDictionary()
        self._processors: WeakKeyDictionary[ProcessorHandle, LogitsProcessor] = WeakKeyDictionary()
        self._numbers = itertools.count()

    def put_grammar(self, handle: GrammarHandle, grammar: CompiledGrammar) -> None:
        self._grammars[handle] = grammar

    def add_processors(self, processors: Iterable[LogitsProcessor]) -> tuple[ProcessorHandle, ...]:
        """Make a handle for each; a processor may have several."""
        handles = []
        for processor in processors:
            handles.append(ProcessorHandle(next(self._numbers)))
            self._processors[handles[-1]] = processor
        return tuple(handles)

    def get_grammar(self, handle: GrammarHandle) -> CompiledGrammar:
        """Return the grammar, which is compiled first if its handle came from another process.

        Raises:
            InvalidRequest: as the compiler.
        """
        grammar = self._grammars.get(handle)
        if grammar is None:
            assert self.compile_grammar is not None, "the plan's grammar is in another process"
            grammar = self._grammars[handle] = self.compile_grammar(handle)
        return grammar

    def get_processors(self, handles: Iterable[ProcessorHandle]) -> tuple[LogitsProcessor, ...]:
        """Return the processors.

        Raises:
            InvalidRequest: a handle came from another process.
        """
        try:
            return tuple(self._processors[handle] for handle in handles)
        except KeyError:
            message = "logits_processors are functions, and the device is in another process"
            raise InvalidRequest(message, param="logits_processors") from None
