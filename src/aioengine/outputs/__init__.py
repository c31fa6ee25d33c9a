"""The outputs of a request, and in `metrics` the counters and times of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal

import msgspec

from aioengine.outputs.metrics import RequestMetrics
from aioengine.schemas.plain_struct import PlainStruct
from aioengine.tool_calls.calls import ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from typing_extensions import TypeForm as TypeForm
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # `RequestOutput` alone stays a whole annotation under mypy --strict
else:
    from typing import TypeVar

    T, TypeForm = TypeVar("T"), type

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a choice ended."""

MAX_SHOWN_CHOICES, MAX_SHOWN_CHARS = 4, 200


class Logprob(PlainStruct, frozen=True, gc=False):
    """One candidate for one output position.

    Attributes:
        logprob: natural logarithm of its probability, before temperature and filters.
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: its text alone; None where the engine has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""By token id, for one position: the sampled token first, then the likeliest ones."""


class CompletionDelta(PlainStruct, frozen=True, kw_only=True):
    """The part of a completion that came since the delta before.

    The last delta, and only that, has a ``finish_reason``. Deltas that were not read are merged.

    Attributes:
        index: which choice of the request.
        text: all deltas' texts together are the completion's text.
        reasoning: and theirs its reasoning.
        tool_calls: pieces of its tool calls.
        has_cut_call: in the last delta: a tool call was not completed, and the pieces of it that came are none.
        token_ids: tokens whose text may still be held back (half a character, the beginning of a stop string).
        logprobs: one for each of ``token_ids``, if asked for.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string, or the stop token's id, that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)
    has_cut_call: bool = False


class CompletionOutput(PlainStruct, frozen=True, kw_only=True):
    """One completion of a prompt.

    Attributes:
        text: the decode of ``token_ids`` alone, by default without special tokens, and without the stop string or stop
            token that ended it; empty with ``detokenize=False``. Of an answer to a chat, what is neither reasoning nor
            a tool call.
        reasoning: what came before the answer, where the model's format of it is known; None: nothing did.
        tool_calls: the complete ones.
        has_cut_call: there was another one, which was cut by the end, or begun and malformed.
        token_ids: all sampled tokens, EOS or stop token included.
        cumulative_logprob: sum over the sampled tokens, if log-probabilities were asked for.
        parsed: the value that the text stands for, if an ``output_type`` was asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    parsed: Any = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)
    has_cut_call: bool = False


class RequestOutput(PlainStruct, Generic[T], frozen=True, kw_only=True):
    """A request and what it has brought. For type checkers it has the ``output_type`` as its parameter.

    Attributes:
        prompt: the text as it was tokenized (the rendered template for chats); None for token ids.
        outputs: one for each choice, by index.
        finished: whether all of them have ended.
        num_cached_tokens: prompt tokens that the prefix cache had.
        prompt_logprobs: one for each prompt token, if asked for, as `CompletionOutput.logprobs`; None for the first,
            which follows nothing, and for those that have not been computed yet.
        metrics: where the time went.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None

    def __repr__(self) -> str:
        shown = [
            f"{choice.text[:MAX_SHOWN_CHARS]!r}{'…' * (len(choice.text) > MAX_SHOWN_CHARS)}, "
            f"{len(choice.token_ids)} tokens, {choice.finish_reason}"
            for choice in self.outputs[:MAX_SHOWN_CHOICES]
        ]
        shown += ["…"] * (len(self.outputs) > MAX_SHOWN_CHOICES)
        return f"<RequestOutput {self.request_id!r}: {'; '.join(shown)}>"

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

    @property
    def parsed(self) -> T:
        """The first completion's value, if an ``output_type`` was asked for; else None."""
        parsed: T = self.outputs[0].parsed
        return parsed

    @property
    def reasoning(self) -> str | None:
        """The first completion's."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The first completion's."""
        return self.outputs[0].tool_calls
