"""The messages of the wire: a closed set in msgpack, a frame each.

A message is an `Envelope`: a number that counts the messages of one direction of one session, and the body, a tagged
array. Prompts and pieces of tensors are bytes in it, which are copied and not parsed.

Messages evolve by appending fields with defaults: an older reader skips what it does not know, a newer one fills in
what is missing. What changes otherwise raises `PROTOCOL_VERSION`, which both sides compare before anything else.

Nothing here trusts its input: `Reader.read` returns a message that is whole and in its turn, or raises `WireError`.
Each side's half of an encoding stands beside the other's.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

import aioengine.errors as errors
from aioengine.core.control import AnyControl
from aioengine.core.executor_protocol import ExecutorInfo
from aioengine.core.health import Beat
from aioengine.core.listener import SampledLogprobs
from aioengine.errors import InvalidRequest, WireError
from aioengine.outputs import FinishReason
from aioengine.outputs.metrics import StepRecord
from aioengine.scheduler.scheduler import SchedulerStats
from aioengine.scheduler.sequence import Request

PROTOCOL_VERSION = 4

MAX_FINISHED = 65_536
"""Sequences that one message may end: more than any request has choices."""

MAX_BYTES = 16 * 2**20
"""Most bytes of a message. The largest is a request with every list at its limit, or a result of `collective_rpc`."""

INT32, FLOAT32, FLOAT64 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8")

Number = Annotated[int, Meta(ge=0, lt=2**31)]


class WireMessage(msgspec.Struct, frozen=True, array_like=True):
    """Any message of the wire."""


# From a front end to an engine


class Attach(WireMessage, frozen=True, tag=1):
    """A front end asks to use the engine; the first message of a session."""

    version: int
    name: Annotated[str, Meta(max_length=256)] = ""
    """For logs."""


class AddRequest(WireMessage, frozen=True, tag=2):
    """A request; its choices are ``number`` and those that follow."""

    number: Number
    """Chosen by the front end, rising; of this session only."""
    request: msgspec.Raw
    """A `Request`, read by itself, so that a bad one fails alone and not with the message."""
    num_allowed: int = -1
    """Output tokens of each choice that may be computed for now; -1: all."""
    choice: int = -1
    """The only choice that is wanted; -1: all."""
    output: bytes = b""
    """Token ids of this choice that another engine has sampled, int32, little-endian; it goes on behind them."""
    is_moved: bool = False
    """Moved here: `max_waiting` does not apply."""

    def __post_init__(self) -> None:
        if len(self.output) % INT32.itemsize:
            raise WireError(f"an output of {len(self.output)} bytes, which are no int32")

    @property
    def output_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.output, INT32)


class Finish(WireMessage, frozen=True, tag=3):
    """End these sequences with what they have."""

    numbers: Annotated[list[int], Meta(max_length=MAX_FINISHED)]
    reason: FinishReason
    stop_reason: int | str | None = None
    """Not read: the front end has ended them already, and knows why."""


class Allow(WireMessage, frozen=True, tag=4):
    """So many output tokens of a sequence may be computed for now; -1: all."""

    number: int
    num_allowed: int


class CallControl(WireMessage, frozen=True, tag=5):
    """A control call."""

    call_id: int
    control: msgspec.Raw
    """An `AnyControl`, read by itself, so that an unknown one fails its caller and not the message."""


class Acknowledge(WireMessage, frozen=True, tag=6):
    """The front end has read the engine's messages up to this number."""

    number: int


class Detach(WireMessage, frozen=True, tag=7):
    """The front end leaves; what it has running ends."""


class CancelCall(WireMessage, frozen=True, tag=8):
    """The caller of a control call has given up: the call stops where it is."""

    call_id: int


FromFrontEnd = Attach | AddRequest | Finish | Allow | CallControl | Acknowledge | Detach | CancelCall


# From an engine to a front end


class Attached(WireMessage, frozen=True, tag=1):
    """The answer to `Attach`: the first message of an engine's side of a session."""

    version: int
    config: dict[str, Any]
    """An `EngineConfig`, of a version that may have other settings."""
    info: ExecutorInfo
    eos_token_ids: tuple[int, ...]
    model_path: str
    """The model's folder on the engine's machine."""
    first_beat: Beat
    stats: SchedulerStats


class Refused(WireMessage, frozen=True, tag=2):
    """The answer to what cannot be served; the session is over."""

    version: int
    reason: str


class Started(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence has taken its first row."""

    number: int
    num_cached_tokens: int


class First(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence's first token is among these, so long after its prompt was first scheduled."""

    number: int
    prefill_time_s: float


class Ended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence has ended, behind its tokens in this message."""

    number: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_preemptions: int


class Failed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence has ended by an error."""

    number: int
    fault: Fault
    dump_of: int = -1
    """Its dump is that of the message's failure at this place: hundreds may have one in common. -1: its own."""


class PromptLogprobsMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of a sequence's prompt token."""

    number: int
    position: int
    logprobs: SampledLogprobs


class VectorMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The vector of a sequence, which ends with it.

    Raises:
        WireError: ``values`` are no float32.
    """

    number: int
    values: bytes
    """float32 [hidden_size], little-endian."""

    def __post_init__(self) -> None:
        if len(self.values) % FLOAT32.itemsize:
            raise WireError(f"a vector of {len(self.values)} bytes, which are no float32")


class StepOutputsMessage(WireMessage, frozen=True, tag=3):
    """The products of a step for a front end.

    In this order: started, first, prompts, vectors, tokens, ended and failed, record.

    Raises:
        WireError: there are more or fewer sequences than tokens.
    """

    numbers: list[Number] = []
    """The sequence of each token."""
    token_ids: list[Number] = []
    started: list[Started] = []
    first: list[First] = []
    prompts: list[PromptLogprobsMessage] = []
    ended: list[Ended] = []
    failed: list[Failed] = []
    record: StepRecord | None = None
    logprobs: list[tuple[int, SampledLogprobs]] = []
    """(index of the token in this message, its log-probabilities), rising."""
    vectors: list[VectorMessage] = []

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.token_ids):
            raise WireError(f"{len(self.token_ids)} tokens of {len(self.numbers)} sequences")


class Returned(WireMessage, frozen=True, tag=4):
    """The result of a control call, or its error."""

    call_id: int
    result: Any = None
    fault: Fault | None = None


class Beating(WireMessage, frozen=True, tag=5):
    """The engine's loop lives."""

    beat: Beat


class Shutdown(WireMessage, frozen=True, tag=6):
    """The engine's final message to a front end: it is closed, or cut this front end off, or has died."""

    fault: Fault


FromEngine = Attached | Refused | StepOutputsMessage | Returned | Beating | Shutdown


# What is read by itself


def _encode_array(value: Any) -> memoryview:
    if isinstance(value, np.ndarray):  # of one dimension: token ids, or a record's latencies
        return np.ascontiguousarray(value).data
    raise TypeError(f"a {type(value).__name__} is no plain data")


T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=Request)

_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_plain_encoder = msgspec.msgpack.Encoder()
_control_decoder: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def check_sendable(request: Request) -> None:
    """Raise InvalidRequest if a request holds functions, which cannot travel."""
    if request.params.logits_processors:
        raise InvalidRequest(
            "logits_processors are functions, and this engine's device is in another process: run the engine in this "
            "one for them",
            param="logits_processors",
        )


def pack_request(request: Request) -> msgspec.Raw:
    """The form in which a request travels: an array of its fields, the prompt as bytes."""
    return msgspec.Raw(_encoder.encode(request))


@functools.cache
def _request_decoder(kind: type[Request]) -> Any:
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda _, value: np.frombuffer(value, INT32))


def unpack_request(raw: msgspec.Raw, kind: type[RequestT]) -> RequestT:
    """Read a request of this class. Raises InvalidRequest: it is malformed, or a value is out of its bounds."""
    decoder: msgspec.msgpack.Decoder[RequestT] = _request_decoder(kind)
    return unpack(decoder, raw, "the request cannot be read")


def unpack(decoder: msgspec.msgpack.Decoder[T], raw: msgspec.Raw, problem: str, param: str | None = None) -> T:
    """Read what stands by itself in a message. Raises InvalidRequest: it is malformed or unknown."""
    try:
        return decoder.decode(raw)
    except InvalidRequest:
        raise
    except Exception as error:  # msgspec's own, text that is none, a nesting too deep
        raise InvalidRequest(f"{problem}: {error}", param=param) from None


def pack_control(control: msgspec.Struct) -> msgspec.Raw:
    """Raises InvalidRequest: it holds what no message can."""
    try:
        return msgspec.Raw(_plain_encoder.encode(control))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"only plain data can be sent to another process: {error}") from None


def unpack_control(raw: msgspec.Raw) -> AnyControl:
    """Raises InvalidRequest: there is no such call, or its arguments are bad."""
    return unpack(_control_decoder, raw, "this engine knows no such call")


# Reading and writing

Body = TypeVar("Body", bound=WireMessage)


class Envelope(msgspec.Struct, Generic[Body], frozen=True, array_like=True, gc=False):
    number: int
    body: Body


class TooLarge(InvalidRequest):
    """The contents of a message are more than one may have."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes:,} bytes cannot be sent to another process at once; {MAX_BYTES:,} can")


class Writer:
    """Numbers and encodes the messages of one direction of one session."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the next message."""

    def write(self, body: WireMessage) -> bytes:
        """The frame of a message.

        Raises:
            TooLarge: a reader would refuse it.
            TypeError, ValueError, OverflowError, RecursionError: it holds what is no plain data.
        """
        frame = _encoder.encode(Envelope(self.number, body))
        if len(frame) > MAX_BYTES:
            raise TooLarge(len(frame))
        self.number += 1  # not before: what cannot be encoded is no message, and leaves no gap
        return frame


class OutOfTurn(WireError):
    """A message is not the next one of its session.

    Attributes:
        is_gap: messages before it are missing; else it, or one of its number, has been read already.
    """

    def __init__(self, number: int, expected: int) -> None:
        super().__init__(f"message {number} where {expected} was due")
        self.is_gap = number > expected


class Reader(Generic[Body]):
    """Reads the messages of one direction of one session, in their turn.

    What is refused changes nothing: the message that was due before is due after it.

    Args:
        kinds: the union of the messages that may come.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Envelope[Body]] = msgspec.msgpack.Decoder(
            Envelope[kinds], dec_hook=lambda _, value: np.frombuffer(value, FLOAT64)
        )
        self.due = 0
        """The number of the next message."""

    def read(self, frames: Sequence[bytes]) -> Body:
        """The message that these frames are, which is to be one.

        Raises:
            WireError: it is malformed, truncated, too large, or has more in it than belongs there.
            OutOfTurn: it is not the next one.
        """
        if len(frames) != 1:
            raise WireError(f"{len(frames)} frames; one is a message")
        if len(frames[0]) > MAX_BYTES:
            raise WireError(f"a frame of {len(frames[0])} bytes; {MAX_BYTES} are allowed")
        try:
            envelope = self._decoder.decode(frames[0])
        except WireError:
            raise
        except Exception as error:  # msgspec's own, and what a struct's __post_init__ finds wrong with its values
            raise WireError(f"a malformed message: {error}") from None
        if envelope.number != self.due:
            raise OutOfTurn(envelope.number, self.due)
        self.due += 1
        return envelope.body


MAX_MESSAGE_CHARS = 10_000
MAX_DUMP_CHARS = 200_000


class Fault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An error as a message.

    Attributes:
        kind: the name of its type, looked up among aioengine's errors and `PLAIN`, nowhere else.
        param, retry_after_s, dump, length, limit, is_lower_bound: of the types that have them.
        errno: of an OSError; with ``filename``.
        hint: of one of aioengine's own, which its message is without.
    """

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float = 0.0
    dump: str = ""
    length: int = 0
    limit: int = 0
    is_lower_bound: bool = False
    errno: int | None = None
    filename: str | None = None
    hint: str = ""


PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ArithmeticError, AttributeError, AssertionError, EOFError, IndexError, KeyError, LookupError, MemoryError,
        NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError, ZeroDivisionError,
    )
}  # fmt: skip
"""Python's own that are made of a message alone."""

_OS_ERRORS: dict[str, type[OSError]] = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)
}


_FIELDS: dict[str, tuple[str, ...]] = {
    "InvalidRequest": ("param",),
    "PromptTooLong": ("length", "limit", "is_lower_bound"),
    "EngineOverloaded": ("retry_after_s",),
    "StepFailed": ("dump",),
    "NoTokenLeft": ("dump",),
    "EngineDead": ("dump",),
}
"""The fields of aioengine's own errors beside their messages."""


def to_fault(error: BaseException) -> Fault:
    """The message that stands for an error; the cause's text is part of it, since tracebacks do not travel."""
    kind, message = type(error).__name__, _text_of(error)
    if isinstance(error, errors.AioEngineError):
        own = next(base.__name__ for base in type(error).__mro__ if vars(errors).get(base.__name__) is base)
        fields = {name: getattr(error, name) for name in _FIELDS.get(own, ())}
        if "dump" in fields:
            fields["dump"] = cut(fields["dump"], MAX_DUMP_CHARS)
        hint = cut(error.hint, MAX_MESSAGE_CHARS) if isinstance(error.hint, str) else ""
        return Fault(own, message.removesuffix(f"; {hint}") if hint else message, hint=hint, **fields)
    # The attributes of others may be anything.
    if isinstance(error, OSError) and kind in _OS_ERRORS:
        filename = cut(error.filename, MAX_MESSAGE_CHARS) if isinstance(error.filename, str) else None
        if isinstance(error.errno, int) and abs(error.errno) < 2**31:
            strerror = cut(error.strerror, MAX_MESSAGE_CHARS) if isinstance(error.strerror, str) else message
            return Fault(kind, strerror, errno=error.errno, filename=filename)
        return Fault(kind, message, filename=filename)
    return Fault(kind, message) if kind in PLAIN else Fault("RuntimeError", f"{kind}: {message}"[:MAX_MESSAGE_CHARS])


def _text_of(error: BaseException) -> str:
    # A KeyError shows its key by repr, and will do so when it is made again.
    is_key = type(error) is KeyError and len(error.args) == 1 and isinstance(error.args[0], str)
    return cut(error.args[0] if is_key else errors.text_of(error), MAX_MESSAGE_CHARS)


def cut(text: str, max_chars: int) -> str:
    """The part of a text that can be sent: file names may hold what has no UTF-8 form."""
    return text[:max_chars].encode(errors="replace").decode()


def to_error(fault: Fault) -> Exception:
    """Make the error that a message stands for; of an unknown type an `InternalError`."""
    if fault.kind in PLAIN:
        return PLAIN[fault.kind](fault.message)
    if fault.kind in _OS_ERRORS:
        of_system = _OS_ERRORS[fault.kind]
        return (
            of_system(fault.message) if fault.errno is None else of_system(fault.errno, fault.message, fault.filename)
        )
    kind: Any = getattr(errors, fault.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.AioEngineError)):
        return errors.InternalError(f"{fault.kind}: {fault.message}")
    fields = {name: getattr(fault, name) for name in _FIELDS.get(fault.kind, ())}
    made: errors.AioEngineError = kind(**fields) if kind is errors.PromptTooLong else kind(fault.message, **fields)
    return made.with_hint(fault.hint)
