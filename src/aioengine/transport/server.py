"""`EngineServer`: an engine core that other processes use.

Front ends reach it at one address, a ROUTER socket. The server runs the core and follows each sequence for its front
end. It ends the requests of a front end that goes, stops reading, or sends messages out of turn. Nothing here ever
waits for a front end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from aioengine.core.control import FILES, UNBLOCKING_CALLS, AnyControl, CommitWeights, DropWeights, StageWeights
from aioengine.core.engine_core import EngineCore
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Beat
from aioengine.core.listener import UNLIMITED, SampledLogprobs
from aioengine.core.observers import log_begin
from aioengine.core.protocol import check_limits
from aioengine.core.tracing import begin_engine_span
from aioengine.errors import AioEngineError, EngineClosed, EngineOverloaded, InvalidRequest, PromptTooLong, WireError
from aioengine.outputs.metrics import RequestMetrics, StepRecord
from aioengine.processes.turns import turns_here
from aioengine.processes.worker_threads import TextWorker
from aioengine.sampling_params import MAX_BAD_WORDS, MAX_BAD_WORDS_CHARS
from aioengine.scheduler.plan import Float32, Int32
from aioengine.scheduler.sequence import Request, Sequence
from aioengine.structured.constraints import unforced
from aioengine.transport import wire
from aioengine.transport.peers import LINGER_S, Arrival, PeerServer, PeerSession
from aioengine.transport.security import ServerKeys
from aioengine.transport.wire import to_fault
from aioengine.validation import invalid

logger = logging.getLogger("aioengine")

BEHIND_MESSAGES = 256
"""With so many unread a front end gets no more records and beats, which are not its own outputs."""

NO_OUTPUTS = wire.StepOutputsMessage()

LOGPROBS_A_MESSAGE = 8192
"""Its receiver takes in so many in some milliseconds, without a turn for its loop."""

FLOATS_OF_VECTOR = 2
"""Numbers of a vector that are as much of a message as a log-probability: a message has 64 KiB of vectors, or one."""

MAX_FAILED = 256
"""Failures in one message; each may have a long text."""

RETRY_AFTER_S = 1.0

MAX_HELD_FACTOR = 8
"""So many times what may wait and run at once may be held by a front end in all: the rest is blocked by its readers.
With what has moved here from an engine that died it may be twice as much."""

MAX_MARKER_TOKENS = 64
"""Most tokens of a marker of reasoning."""

MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_TOKENS = 2 * 4 * (MAX_BAD_WORDS_CHARS + MAX_BAD_WORDS)
"""Most tokens of all bad words: each is tokenized twice, once behind a space; a character is at most four tokens."""


class Session(PeerSession):
    """A front end that is attached to an engine.

    Args:
        worker: hashes long prompts.
        request_type: the class as which requests are read.
        mark: called when something is to be sent soon, beside a step's tokens.
        is_trusted: it is this user's, or has a key.
    """

    def __init__(
        self,
        core: EngineCore,
        worker: TextWorker,
        arrival: Arrival,
        request_type: type[Request],
        *,
        mark: Callable[[], None],
        is_trusted: bool = True,
    ) -> None:
        super().__init__(arrival)
        self.core = core
        self.mark = mark
        self.followers: dict[int, Follower] = {}
        """Followers whose end was not reported, by the front end's number."""
        self.num_unstarted = 0
        self.transfers: set[str] = set()
        """Transfers of weights that are neither committed nor dropped."""
        self._worker = worker
        self._request_type = request_type
        self._is_trusted = is_trusted
        self._reset()

    # Its requests

    async def add_request(self, body: wire.AddRequest) -> None:
        """Hand a request to the core. A bad one fails alone, and the front end gets its error."""
        core = self.core
        numbers = range(body.number, body.number + 1)
        try:
            request = wire.unpack_request(body.request, self._request_type)
            if request.params.structured is not None and not self._is_trusted:
                params = msgspec.structs.replace(request.params, structured=unforced(request.params.structured))
                request = msgspec.structs.replace(request, params=params)
            check_limits(request.params, core.config, core.info.vocab_size, core.eos_token_ids)
            if body.choice < 0:
                numbers = range(body.number, body.number + request.params.num_sequences)  # at most max_waiting
            core.check_accepting()
            check_request(request, core.info)
            self._check_output(body, request)
            self._check_numbers(body, numbers)
            # Hashing a token takes as long as tokenizing a character: a long prompt is hashed in the worker's thread.
            num_tokens = len(request.prompt_token_ids) + len(body.output_ids)
            sequence = await self._worker.run(self._make_sequence, num_tokens, body, request)
            if self.is_over or self._has_ended(body.number, sequence):
                return
            choices = (sequence, *sequence.children)
            allowed = UNLIMITED if body.num_allowed < 0 else body.num_allowed
            followers = [Follower(self, *choice, allowed) for choice in zip(numbers, choices, strict=True)]
            core.add(sequence, followers)
            end_choice = begin_engine_span(request, core.config.model or "demo", len(followers))
            for follower in followers:
                follower.end_span = end_choice
            self.num_unstarted += sum(follower.is_unstarted for follower in followers)
            self.followers.update(zip(numbers, followers, strict=True))
            for follower in followers:
                if not follower.is_unstarted:
                    core.block(follower.sequence)
        except AioEngineError as error:
            for number in numbers:
                if number not in self.followers:
                    self.outputs.failed.append(wire.Failed(number, to_fault(error)))
            self.mark()
        else:
            log_begin(core.config, request, whose=f"front end {self.index}: ")

    def _make_sequence(self, body: wire.AddRequest, request: Request) -> Sequence:
        """Make the sequence to compute: all choices of the request, or the rest of one."""
        if body.choice < 0:
            sequence = self.core.make_sequence(request)
        else:
            sequence = self.core.make_resumed(request, body.choice, body.output_ids)
        sequence.is_moved = body.is_moved
        return sequence

    def finish(self, body: wire.Finish) -> None:
        """End sequences; numbers of those that have ended, or never were, are passed over."""
        for number in body.numbers:
            follower = self.followers.get(number)
            if follower is not None:
                self.core.finish(follower.sequence, body.reason)

    def _check_numbers(self, body: wire.AddRequest, numbers: range) -> None:
        """Raise an error if the request's sequences are too many, or their numbers taken."""
        config = self.core.config
        if numbers[-1] >= 2**31 or any(number in self.followers for number in numbers):
            raise InvalidRequest(f"a sequence of number {body.number} is here already, or cannot be")
        most = (config.max_waiting + config.max_num_seqs) * (2 if body.is_moved else 1)
        if len(self.followers) + len(numbers) > MAX_HELD_FACTOR * most:
            raise EngineOverloaded(
                f"{len(self.followers)} sequences of this front end have not ended; read some of them to their ends",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.num_unstarted + len(numbers) > config.max_waiting and not body.is_moved:
            raise EngineOverloaded(
                f"{self.num_unstarted} sequences of this front end wait already (max_waiting)",
                retry_after_s=RETRY_AFTER_S,
            )

    def _check_output(self, body: wire.AddRequest, request: Request) -> None:
        """Raise an error if the tokens that another engine has sampled are not those of one choice."""
        output, num_choices, vocab_size = body.output_ids, request.params.num_sequences, self.core.info.vocab_size
        is_one = body.choice >= 0 and request.product == "tokens"
        if not -1 <= body.choice < num_choices or (len(output) and not is_one):
            raise InvalidRequest(f"choice={body.choice}: output is of one choice, from 0 to {num_choices - 1}")
        if len(request.prompt_token_ids) + len(output) > request.max_total_tokens:
            raise InvalidRequest(
                f"an output of {len(output)} tokens behind a prompt of {len(request.prompt_token_ids)} is more than "
                f"max_total_tokens={request.max_total_tokens}"
            )
        if not _are_tokens(output, vocab_size):
            raise InvalidRequest(f"output holds what is no token; the model has 0 to {vocab_size - 1}")

    def _has_ended(self, number: int, sequence: Sequence) -> bool:
        """Whether the last of its given tokens had ended it; then its end is reported, and nothing else."""
        if not sequence.output_ids:
            return False
        reason, stop_reason = sequence.check_stop(sequence.output_ids[-1], frozenset(self.core.eos_token_ids))
        if reason is not None:
            self.outputs.ended.append(wire.Ended(number, reason, stop_reason, 0))
            self.mark()
        return reason is not None

    # What its sequences bring

    def _reset(self) -> None:
        self.outputs = wire.StepOutputsMessage()
        """Its lists grow until it is sent."""
        # Fields of a struct are slower to reach, and these two are for each token.
        self.numbers, self.token_ids = self.outputs.numbers, self.outputs.token_ids
        self._num_logprobs = 0

    def make_room(self, num_logprobs: int) -> None:
        """Send what has come together if so many log-probabilities more would be too much for one message."""
        self._num_logprobs += num_logprobs
        if self._num_logprobs > LOGPROBS_A_MESSAGE:
            self.flush()

    def flush(self, record: StepRecord | None = None) -> None:
        """Send what has come together, with the step's record if the front end keeps up."""
        if self.num_unread >= BEHIND_MESSAGES:
            record = None
        outputs = self.outputs
        if record is None and outputs == NO_OUTPUTS:
            return
        failed = _share_dumps(outputs.failed[:MAX_FAILED])
        self._reset()
        try:
            self.send(msgspec.structs.replace(outputs, failed=failed, record=record))
            for begin in range(MAX_FAILED, len(outputs.failed), MAX_FAILED):
                self.send(wire.StepOutputsMessage(failed=_share_dumps(outputs.failed[begin : begin + MAX_FAILED])))
        except wire.TooLarge as error:  # whatever it made its sequences bring, it is alone with it
            self._server.cut_off(self, f"what its sequences bring is no message: {error}")

    def beat(self, beat: Beat) -> None:
        """Send a beat, if the front end keeps up."""
        if self.num_unread < BEHIND_MESSAGES:
            self.send(wire.Beating(beat))


class Follower:
    """The `Listener` of a sequence of a front end."""

    __slots__ = ("_num_tokens", "_session", "end_span", "is_unstarted", "num_allowed", "number", "sequence")

    def __init__(self, session: Session, number: int, sequence: Sequence, num_allowed: int) -> None:
        self._session = session
        self._num_tokens = len(sequence.output_ids)
        self.number = number
        self.sequence = sequence
        self.num_allowed = num_allowed
        self.is_unstarted = self._num_tokens < num_allowed
        """It waits for its first row here, and not for its reader alone."""
        self.end_span: Callable[[str, AioEngineError | None], None] | None = None

    def on_started(self) -> None:
        session = self._session
        session.num_unstarted -= self.is_unstarted
        self.is_unstarted = False
        session.outputs.started.append(wire.Started(self.number, self.sequence.num_cached_tokens))
        session.mark()

    def on_token(self, token_id: int, logprobs: SampledLogprobs | None) -> None:
        session = self._session
        if logprobs is not None:
            session.make_room(1 + len(logprobs.others))
            session.outputs.logprobs.append((len(session.numbers), logprobs))
        session.numbers.append(self.number)
        session.token_ids.append(token_id)
        self._num_tokens += 1
        if self._num_tokens == 1:
            time_s = self.sequence.first_token_at - self.sequence.admitted_at
            session.outputs.first.append(wire.First(self.number, 0.0 if math.isnan(time_s) else time_s))
        if self._num_tokens >= self.num_allowed:
            session.core.block(self.sequence)

    def on_vector(self, vector: Float32) -> None:
        self._session.make_room(len(vector) // FLOATS_OF_VECTOR)
        self._session.outputs.vectors.append(wire.VectorMessage(self.number, vector.tobytes()))

    def on_prompt_logprobs(self, position: int, logprobs: list[SampledLogprobs]) -> None:
        for offset, entry in enumerate(logprobs):
            self._session.make_room(1 + len(entry.others))
            self._session.outputs.prompts.append(wire.PromptLogprobsMessage(self.number, position + offset, entry))

    def on_end(self) -> None:
        sequence = self.sequence
        assert sequence.finish_reason is not None, f"{sequence} has not ended"
        self._leave(sequence.finish_reason)
        self._session.outputs.ended.append(
            wire.Ended(self.number, sequence.finish_reason, sequence.stop_reason, sequence.num_preemptions)
        )

    def on_error(self, error: AioEngineError) -> None:
        self._leave("error", error)
        self._session.outputs.failed.append(wire.Failed(self.number, to_fault(error)))

    def allow(self, num_tokens: int) -> None:
        """Its reader lets so many output tokens be computed."""
        self.num_allowed = UNLIMITED if num_tokens < 0 else num_tokens
        if self._num_tokens < self.num_allowed:
            self._session.core.unblock(self.sequence)

    def _leave(self, finish_reason: str, error: AioEngineError | None = None) -> None:
        if self.end_span is not None:
            self.end_span(finish_reason, error)
        session = self._session
        session.followers.pop(self.number, None)
        session.num_unstarted -= self.is_unstarted
        session.mark()


def check_request(request: Request, info: ExecutorInfo) -> None:
    """Check what has come as a request against the model; `check_limits` checks its parameters.

    Raises:
        InvalidRequest, PromptTooLong: a value, which the error names, does not fit.
    """
    prompt, vocab_size = request.prompt_token_ids, info.vocab_size
    if len(prompt) >= info.max_model_len:
        raise PromptTooLong(len(prompt), info.max_model_len - 1)
    if not len(prompt) or not _are_tokens(prompt, vocab_size):
        raise invalid("prompt", f"the prompt needs token ids, from 0 to {vocab_size - 1}")
    if not len(prompt) < request.max_total_tokens <= info.max_model_len:
        message = f"more than the prompt's {len(prompt)} and at most {info.max_model_len} are needed"
        raise invalid("max_tokens", f"max_total_tokens={request.max_total_tokens}: {message}")
    if request.product == "vector" and request.params.num_sequences > 1:
        raise invalid("n", "a vector is of one choice")
    num_bad = sum(map(len, request.bad_words))
    if len(request.bad_words) > MAX_BAD_SEQUENCES or num_bad > MAX_BAD_TOKENS:
        raise invalid("bad_words", "bad_words holds more than any text makes")
    if any(not word or not all(0 <= token < vocab_size for token in word) for word in request.bad_words):
        raise invalid("bad_words", "bad_words holds what is no token")
    if (thinking := request.thinking) is not None:
        markers = (thinking.begin_ids, thinking.end_ids, thinking.forced_end_ids, thinking.gap_ids)
        is_whole = thinking.end_ids and thinking.forced_end_ids[-len(thinking.end_ids) :] == thinking.end_ids
        if not is_whole or any(len(ids) > MAX_MARKER_TOKENS for ids in markers):
            raise invalid("max_thinking_tokens", "thinking has no end, or markers that no text makes")
        if not all(0 <= token < vocab_size for ids in markers for token in ids):
            raise invalid("max_thinking_tokens", "thinking holds what is no token")


def _are_tokens(ids: Int32, vocab_size: int) -> bool:
    return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size)


def _share_dumps(failed: list[wire.Failed]) -> list[wire.Failed]:
    """Each dump once: all sequences of a step that failed have the same, and it is long."""
    places: dict[str, int] = {}
    shared = []
    for place, each in enumerate(failed):
        first = places.setdefault(each.fault.dump, place)
        if first != place and each.fault.dump:
            each = wire.Failed(each.number, msgspec.structs.replace(each.fault, dump=""), dump_of=first)
        shared.append(each)
    return shared


PUBLISH_SLICE = 256
"""Tokens handed to followers between the loop's turns: they only note them, in half a microsecond each."""


class EngineServer(PeerServer[Session]):
    """Serves an engine core to other processes.

    Args:
        core: not running yet; `serve` runs it.
        address, keys: as of `PeerServer`.
        model_path: the model's folder, which front ends look for a tokenizer in.
    """

    kinds = wire.FromFrontEnd
    title = "engine"
    unbounded_calls = UNBLOCKING_CALLS
    request_type: type[Request] = Request
    """The class as which requests are read; one with more fields gives the core more attributes."""

    def __init__(self, core: EngineCore, address: str, *, model_path: Path, keys: ServerKeys | None = None) -> None:
        super().__init__(address, keys=keys, worker=TextWorker())
        self.core = core
        self._model_path = model_path
        self._left: deque[Session] = deque()
        """Sessions to be tidied, by a task that stands: one made for each, which a loop's end cancelled before its
        first turn, left a warning about its coroutine."""
        self._has_left = asyncio.Event()
        self._record: StepRecord | None = None
        self._is_marked = False
        self._beats_now = asyncio.Event()

    async def serve(self) -> None:
        """Run the core and serve it until cancelled, or until the core dies; then everything is closed.

        Every front end hears the end: `EngineDead` with what the core died of, or that the engine was closed.
        """
        if not self.core.config.log_stats_interval_s:
            self.core.observers.stop_metrics()  # each front end has its own, made of the same records
        self.core.observers.add(self)
        self.core.on_published = self._flush
        self.core.publish_slice = PUBLISH_SLICE
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._or_break, self.receive)
                self._tasks.start_soon(self.watch)
                self._tasks.start_soon(self._beat)
                self._tasks.start_soon(self._or_break, self._tidy)
                await self.core.run()
                self._tasks.cancel_scope.cancel()
        finally:
            self._end_all()
            with anyio.CancelScope(shield=True), anyio.move_on_after(2 * LINGER_S):
                await self.aclose()

    async def aclose(self) -> None:
        """Close the sockets; idempotent. `serve` does it by itself."""
        await self.close_sockets()
        await self._worker.aclose()

    # Tasks

    async def _or_break(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task that calls the core; what it raises is what the core dies of, for all to hear."""
        try:
            await task()
        except Exception as error:
            self.core.break_down(error)

    async def _beat(self) -> None:
        interval_s = self.core.config.heartbeat_interval_s
        if self.core.lockstep is not None:
            self.core.lockstep.on_report = self._beats_now.set
        while True:
            self._beats_now.clear()
            beat = msgspec.structs.replace(self.core.beat(), num_refused=self.num_refused.total())
            for session in self.attached:
                session.beat(beat)
            with anyio.move_on_after(interval_s):
                await self._beats_now.wait()

    # Messages

    async def act_on(self, session: Session, body: wire.FromFrontEnd) -> None:
        match body:
            case wire.AddRequest():
                await session.add_request(body)
            case wire.Finish():
                session.finish(body)
            case wire.Allow():
                follower = session.followers.get(body.number)
                if follower is not None:
                    follower.allow(body.num_allowed)
            case _:
                raise WireError(f"a {type(body).__name__} in the middle of a session")

    def unpack_call(self, raw: msgspec.Raw) -> AnyControl:
        control = wire.unpack_control(raw)
        if isinstance(control, FILES) and self.is_far:
            raise InvalidRequest(
                "any user of the machine can connect to this address, and this call reads or writes files as the "
                "engine's user: serve at an ipc:// address, or with keys (`aioengine keys`)"
            )
        return control

    async def perform_call(self, session: Session, control: AnyControl) -> Any:
        result = await self.core.call(control)
        if isinstance(control, StageWeights):
            session.transfers.add(control.transfer)
        elif isinstance(control, CommitWeights | DropWeights):
            session.transfers.discard(control.transfer)
        return result

    # Sessions

    def begin_session(self, arrival: Arrival) -> tuple[Session, wire.Attached]:
        core = self.core
        attached = wire.Attached(
            version=wire.PROTOCOL_VERSION,
            config=msgspec.structs.asdict(core.config),
            info=core.info,
            eos_token_ids=core.eos_token_ids,
            model_path=str(self._model_path),
            first_beat=core.beat(),
            stats=core.stats(),
        )
        is_trusted = not self.is_far
        session = Session(core, self._worker, arrival, self.request_type, mark=self._mark, is_trusted=is_trusted)
        return session, attached

    def on_left(self, session: Session) -> None:
        self._left.append(session)
        self._has_left.set()

    def _end_all(self) -> None:
        """Hand out what is left, and final messages: the core has ended, and all sequences with it."""
        for session in self.attached:
            session.flush()
        self.end_sessions(self.core.copy_death() if self.core.death is not None else EngineClosed("it was closed"))

    async def _tidy(self) -> None:
        """Put away what front ends have left: their sequences, and weights that they did not commit."""
        while True:
            await self._has_left.wait()
            self._has_left.clear()
            while self._left:
                session = self._left.popleft()
                for follower in list(session.followers.values()):
                    await turns_here().take()
                    self.core.finish(follower.sequence, "abort")
                for transfer in session.transfers:
                    with contextlib.suppress(AioEngineError):  # the engine is ending, and they with it
                        await self.core.call(DropWeights(transfer))

    # Sending

    def _mark(self) -> None:
        """Send what sessions have beside a step's outputs, at the end of this turn of the loop or with the step."""
        if not self._is_marked and not self.core.is_publishing:
            self._is_marked = True
            asyncio.get_running_loop().call_soon(self._flush_marked)

    def _flush_marked(self) -> None:
        if not self.core.is_publishing:  # else it goes with the step
            self._flush()

    def _flush(self) -> None:
        self._is_marked = False
        record, self._record = self._record, None
        for session in self.attached:
            session.flush(record)

    def on_step(self, record: StepRecord) -> None:
        """As an `Observer`: the step whose tokens are handed out next."""
        self._record = record

    def on_request(self, metrics: RequestMetrics, finish_reasons: tuple[str, ...]) -> None:
        """As an `Observer`: requests end in the processes where they were made."""
