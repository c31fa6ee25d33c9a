"""The sequences of an engine in another process, on the caller's side: filled from its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec
import numpy as np

from aioengine.core.engine_core import PUBLISH_SLICE
from aioengine.core.listener import Endings, Listener, SampledLogprobs
from aioengine.core.protocol import InFlightSequence
from aioengine.errors import AioEngineError, EngineClosed, EngineDead
from aioengine.outputs import FinishReason
from aioengine.scheduler.sequence import Sequence
from aioengine.transport import wire
from aioengine.transport.link import death_of
from aioengine.transport.wire_errors import to_error

Update = TypeVar(
    "Update", wire.Started, wire.First, wire.PromptLogprobsMessage, wire.VectorMessage, wire.Ended, wire.Failed
)


class Mirrors:
    """The sequences of one engine that have not ended here.

    Args:
        endings: gets the ends that the engine brings.
        on_capacity: called when a sequence takes of ``max_waiting`` no more.
    Attributes:
        live: by the numbers that the engine knows them by, which are their orders.
        unstarted: numbers of those that take of ``max_waiting``.
        next_number: of the next one.
    """

    def __init__(self, endings: Endings, on_capacity: Callable[[], None]) -> None:
        self.live: dict[int, Sequence] = {}
        self.unstarted: set[int] = set()
        self.next_number = 0
        self._rowless: set[int] = set()
        """Numbers of sequences that never had a row at this engine."""
        self._endings = endings
        self._on_capacity = on_capacity

    def add_sequence(self, sequence: Sequence, listener: Listener) -> None:
        """Add a sequence, which the engine has as ``next_number``."""
        number = sequence.order = self.next_number
        sequence.listener = listener
        self.live[number] = sequence
        self._rowless.add(number)
        if len(sequence.output_ids) < listener.num_allowed:  # else it does not wait for a row, but for its reader
            self.unstarted.add(number)
        self.next_number += 1

    def end_sequence(
        self, sequence: Sequence, finish_reason: FinishReason, stop_reason: int | str | None = None
    ) -> Listener:
        """End a sequence for its caller; returns the listener, which is to get the end."""
        sequence.finish_reason, sequence.stop_reason = finish_reason, stop_reason
        return self._release(sequence)

    def fail_all(self, error: Callable[[], AioEngineError]) -> None:
        """End all sequences by an error each, which `Endings` is to report."""
        for sequence in list(self.live.values()):
            self._endings.add_end(sequence.order, self._release(sequence), error())

    def release_all(self) -> list[InFlightSequence]:
        """Release all sequences, to go on elsewhere. Only the ends of those that have ended are reported."""
        for sequence in list(self.live.values()):
            if sequence.finish_reason is not None:  # its last token is handed out, and its end was next
                self._endings.add_end(sequence.order, self._release(sequence))
        in_flight: list[InFlightSequence] = []
        of_families: set[int] = set()
        for number, sequence in self.live.items():
            sequence.is_moved = True
            choices = (sequence, *sequence.children)
            if not all(choice.order in self.live and not choice.output_ids for choice in choices):
                sequence.children = ()
            of_families.update(child.order for child in sequence.children)
            if number not in of_families:
                in_flight.append(InFlightSequence(sequence, number not in self._rowless))
        self.live.clear()
        self.unstarted.clear()
        self._rowless.clear()
        return in_flight

    # What the engine brings

    async def take_outputs(self, body: wire.StepOutputsMessage, now: float) -> None:
        """Take in all updates but ends, with turns for the loop.

        Outputs of a second engine change none of a sequence's times: to its caller it has begun before.
        """
        for started, sequence in self._with_sequences(body.started):
            if not sequence.has_run:
                sequence.num_cached_tokens = started.num_cached_tokens
                sequence.admitted_at = now
                sequence.has_run = True
            sequence.listener.on_started()
            self._rowless.discard(started.number)
            self._waits_no_more(started.number)
        for first, sequence in self._with_sequences(body.first):
            sequence.children = ()  # its other choices are on their own from now on
            sequence.first_token_at = now
            if not sequence.admitted_at < now - first.prefill_time_s:
                sequence.admitted_at = now - first.prefill_time_s
        # Before its tokens: a sequence with a token is not asked again for these, should the engine die in between.
        for of_prompt, sequence in self._with_sequences(body.prompts):
            sequence.listener.on_prompt_logprobs(of_prompt.position, [of_prompt.logprobs])
        for vector, sequence in self._with_sequences(body.vectors):
            sequence.listener.on_vector(np.frombuffer(vector.values, wire.FLOAT32))
        logprobs = dict(body.logprobs)
        last_of = {ended.number: ended for ended in body.ended}
        for begin in range(0, len(body.numbers), PUBLISH_SLICE):
            if begin:
                await asyncio.sleep(0)
            self._take_tokens(body, begin, logprobs, last_of, now)

    def _take_tokens(
        self,
        body: wire.StepOutputsMessage,
        begin: int,
        logprobs: dict[int, SampledLogprobs],
        last_of: dict[int, wire.Ended],
        now: float,
    ) -> None:
        """Hand out a slice of tokens. An end by a token must be known when that token is handed out."""
        live, numbers = self.live, body.numbers
        for index in range(begin, min(begin + PUBLISH_SLICE, len(numbers))):
            number, token_id = numbers[index], body.token_ids[index]
            sequence = live.get(number)
            if sequence is None:
                continue
            sequence.output_ids.append(token_id)
            sequence.last_token_at = now
            if last_of and number in last_of and number not in numbers[index + 1 :]:
                ended = last_of[number]
                sequence.finish_reason, sequence.stop_reason = ended.finish_reason, ended.stop_reason
            sequence.listener.on_token(token_id, logprobs.get(index) if logprobs else None)

    def take_ends(self, body: wire.StepOutputsMessage) -> EngineDead | None:
        """Take in the ends, which `Endings` is to report.

        Returns:
            what the engine has died of, if that is what ended any: these live, for the caller to end.
        """
        for ended, sequence in self._with_sequences(body.ended):
            sequence.finish_reason, sequence.stop_reason = ended.finish_reason, ended.stop_reason
            sequence.num_preemptions += ended.num_preemptions
            self._endings.add_end(sequence.order, self._release(sequence))
        death: EngineDead | None = None
        for failed, sequence in self._with_sequences(body.failed):
            fault = failed.fault
            if 0 <= failed.dump_of < len(body.failed):
                fault = msgspec.structs.replace(fault, dump=body.failed[failed.dump_of].fault.dump)
            error = to_error(fault)
            if isinstance(error, EngineClosed | EngineDead):
                death = death or death_of(fault)
            else:
                failure = error if isinstance(error, AioEngineError) else death_of(fault)
                self._endings.add_end(sequence.order, self._release(sequence), failure)
        return death

    def _with_sequences(self, updates: Iterable[Update]) -> Iterator[tuple[Update, Sequence]]:
        """Updates with their sequences; without those whose sequence has ended here."""
        return ((each, sequence) for each in updates if (sequence := self.live.get(each.number)) is not None)

    def _release(self, sequence: Sequence) -> Listener:
        """Forget a sequence; returns its listener, which gets the end now and nothing else."""
        del self.live[sequence.order]
        listener: Listener = sequence.listener
        sequence.listener = None
        self._rowless.discard(sequence.order)
        self._waits_no_more(sequence.order)
        return listener

    def _waits_no_more(self, number: int) -> None:
        """A sequence has started, or ended without that."""
        if number in self.unstarted:
            self.unstarted.discard(number)
            self._on_capacity()
