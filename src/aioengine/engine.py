"""The public face: an engine that lives in the caller's event loop."""

from __future__ import annotations

import functools
import os
import warnings
from types import TracebackType
from typing import Any, Self, get_args

import anyio
import msgspec
import numpy as np

from aioengine.completion import Completion
from aioengine.config import EngineConfig
from aioengine.core.sequence import Sequence
from aioengine.errors import ConfigError, EngineClosed, InvalidRequest, PromptTooLong
from aioengine.executor.protocol import Executor, ExecutorInfo
from aioengine.intake import OnFull
from aioengine.outputs import CompletionDelta, RequestOutput
from aioengine.request import Request
from aioengine.runtime import Runtime
from aioengine.sampling_params import SamplingParams, make_params
from aioengine.validation import check_known_fields

ChatMessage = dict[str, Any]
Prompt = str | list[int] | list[ChatMessage]
"""Text, token ids, or the messages of a chat: ``{"role": ..., "content": ...}`` each."""

MAX_NORMALIZED_CHARS = 4
"""A normalizer makes one character of so many at most: of Unicode's compositions none takes more."""


class Engine:
    """An inference engine, whole, inside this process and this event loop.

    Made in a moment; the model is loaded by ``async with`` or by `start`. All methods belong to the loop that it was
    started on. Requests run side by side: start as many as you like with ``asyncio.gather`` or a task group.

    Args:
        model: a hub id, a folder, or None for the bundled demo model.
        executor: a device side of your own, such as `aioengine.testing.FakeExecutor`; the model then serves for its
            tokenizer and its generation config alone. It is closed with the engine, also when that cannot start.
        config: the fields of `EngineConfig`.
    Raises:
        ConfigError: a field is unknown, or its value is bad.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, executor: Executor | None = None, **config: Any
    ) -> None:
        check_known_fields(EngineConfig, config, lambda _, message: ConfigError(message))
        self.config = EngineConfig(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **config)
        self._given_executor = executor
        self._runtime: Runtime | None = None

    @classmethod
    async def start(
        cls, model: str | os.PathLike[str] | None = None, *, executor: Executor | None = None, **config: Any
    ) -> Self:
        """Make an engine and start it, for notebooks and apps where no ``async with`` fits; close it with `aclose`.

        Cancelling stops the loading and leaves nothing behind.

        Raises:
            ConfigError, ModelLoadError: it cannot be started; nothing is left behind.
        """
        engine = cls(model, executor=executor, **config)
        await engine._start()
        return engine

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # closing has a deadline of its own
            await self.aclose()

    async def aclose(self, *, drain: bool = False) -> None:
        """Stop, and free everything: tasks, threads, files, memory. Idempotent; from any task of the engine's loop.

        Cancelling stops the wait, not the closing.

        Args:
            drain: first let all accepted requests end, while those that wait for a place hear `EngineClosed`. Without
                it all hear that.
        """
        if self._runtime is not None:
            await self._runtime.aclose(drain=drain)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        on_full: OnFull = "wait",
        **sampling: Any,
    ) -> RequestOutput:
        """Complete a prompt.

        Cancelling aborts the request: it is in no later step, and its memory is free for the next one.

        Args:
            prompt: text, token ids, or chat messages.
            params: how to sample; or give its fields as keywords. The model's generation config has the defaults of
                keywords that are not given.
            request_id: your name for it; it may repeat. One is made up when absent.
            on_full: with ``max_waiting`` requests waiting already, "wait" for a place or "raise" `EngineOverloaded`.
        Raises:
            InvalidRequest: a value is bad; raised before anything is queued.
            EngineOverloaded, StepFailed, EngineDead, EngineClosed: see there.
        """
        async with self.stream(prompt, params, request_id=request_id, on_full=on_full, **sampling) as stream:
            return await stream.finish()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        on_full: OnFull = "wait",
        **sampling: Any,
    ) -> Stream:
        """Complete a prompt and read it as it comes.

        ``async with engine.stream(...) as stream: async for delta in stream: ...``. Arguments and errors are those of
        `generate`. Leaving the block, for any reason, aborts the request.
        """
        runtime = self._running()
        runtime.check_loop()
        checked = make_params(params, runtime.sampling_defaults, sampling)
        _check_params(checked, runtime)
        prompt = _as_list(prompt)
        _check_call(prompt, request_id, on_full)
        return Stream(self, runtime, _snapshot(prompt, runtime), checked, request_id or _make_id(), on_full)

    def abort(self, request_id: str) -> None:
        """End all requests of this id with what they have: ``finish_reason`` is "abort". Synchronous and idempotent."""
        if self._runtime is not None:
            self._runtime.abort(request_id)

    @property
    def info(self) -> ExecutorInfo:
        """What the device offers: KV blocks, lengths, sizes.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().executor.info

    def describe(self) -> str:
        """One line about the model, its weights and its KV cache, for a person.

        Raises:
            EngineClosed: the engine is not running.
        """
        return self._running().describe()

    async def _start(self) -> None:
        if self._runtime is not None:
            raise EngineClosed("an engine starts once; make a new one")
        self._runtime = runtime = Runtime(self.config, self._given_executor)
        await runtime.start()

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise EngineClosed(
                "the engine has not been started: use `async with Engine(...)` or `await Engine.start(...)`"
            )
        self._runtime.check_running()
        return self._runtime

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is not None and runtime.is_open:
            runtime.abandon()
            message = f"{self!r} was never closed: use `async with`, or await aclose()"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "new" if self._runtime is None else "open" if self._runtime.is_open else "closed"
        return f"<Engine {self.config.model or 'demo'!r} {state}>"


class Stream:
    """A request being read. Made by `Engine.stream`; the request begins where the ``async with`` block does.

    One task reads it. What it has not read yet is merged into the next delta, so that a slow reader holds nobody up.

    Attributes:
        request_id: the request's.
    """

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        on_full: OnFull,
    ) -> None:
        self.request_id = request_id
        self._engine = engine  # an engine in use is not garbage
        self._runtime = runtime
        self._prompt = prompt
        self._params = params
        self._on_full = on_full
        self._prompt_text: str | None = None
        self._completion: Completion | None = None
        self._is_entered = False
        self._is_aborted = False
        self._is_exhausted = False

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("a stream is entered once; call engine.stream again")
        self._runtime.check_loop()
        self._is_entered = True
        self._runtime.register(self)
        try:
            await self._begin()
        except BaseException:
            self._runtime.forget(self)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
        self._runtime.forget(self)

    async def _begin(self) -> None:
        """Take a place, prepare the prompt, hand it to the core. Nothing is awaited once the core has it."""
        runtime = self._runtime
        await runtime.intake.enter(self, self._on_full)
        try:
            runtime.core.check_accepting()
            prepare = functools.partial(_prepare, runtime, self._prompt, self._params, self.request_id)
            num_chars = _num_chars(self._prompt)
            self._prompt_text, sequence = await runtime.worker_for(num_chars).run(prepare, num_chars)
            self._completion = runtime.add(sequence)
        finally:
            runtime.intake.leave()
        if self._is_aborted:
            self.abort()

    def abort(self) -> None:
        """End the request with what it has. Synchronous and idempotent."""
        self._is_aborted = True
        if self._completion is not None:
            self._runtime.core.finish(self._completion.sequence, "abort")
        else:
            self._runtime.intake.let_in(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompletionDelta:
        """The next delta, which is whatever has arrived; after the last one, StopAsyncIteration.

        Raises:
            StepFailed, EngineDead, EngineClosed: after all that had arrived was read.
        """
        completion = self._entered()
        if self._is_exhausted:
            raise StopAsyncIteration
        await completion.wait(for_end=False)
        if completion.error is not None and not completion.has_unread:
            self._is_exhausted = True
            raise completion.error
        self._is_exhausted = completion.is_ended and completion.error is None
        return completion.take()

    async def finish(self) -> RequestOutput:
        """Wait for the end, reading nothing; returns the whole output."""
        completion = self._entered()
        await completion.wait(for_end=True)
        if completion.error is not None:
            raise completion.error
        return self.result

    @property
    def result(self) -> RequestOutput:
        """The output so far."""
        completion = self._entered()
        sequence = completion.sequence
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=sequence.prompt.tolist(),
            outputs=[completion.output()],
            finished=completion.is_ended,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _entered(self) -> Completion:
        if self._completion is None:
            raise RuntimeError("enter the stream first: `async with engine.stream(...) as stream:`")
        return self._completion


def _prepare(runtime: Runtime, prompt: Prompt, params: SamplingParams, request_id: str) -> tuple[str | None, Sequence]:
    """Turn a prompt into a sequence; pure and thread-safe, so that long prompts are prepared off the loop."""
    text, ids = _tokenize(runtime, prompt)
    limit = runtime.executor.info.max_model_len - 1  # room for one output token
    if len(ids) > limit:
        raise PromptTooLong(len(ids), limit)
    token_ids = np.array(ids, dtype=np.int32)
    token_ids.flags.writeable = False
    room = limit + 1 - len(ids)
    request = Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        params=params,
        seed=int.from_bytes(os.urandom(7)) if params.seed is None else params.seed,
        max_total_tokens=len(ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
    )
    return text, runtime.core.make_sequence(request)


def _tokenize(runtime: Runtime, prompt: Prompt) -> tuple[str | None, list[int]]:
    limit = runtime.executor.info.max_model_len - 1
    if isinstance(prompt, list) and not isinstance(prompt[0], dict):
        return None, prompt  # checked at the call
    tokenizer = runtime.require_tokenizer()
    text = prompt if isinstance(prompt, str) else tokenizer.render_chat(prompt)
    if runtime.longest_token_chars is not None:
        at_least = len(text) // (MAX_NORMALIZED_CHARS * runtime.longest_token_chars)
        if at_least > limit:  # megabytes that cannot fit are refused before they are tokenized
            raise PromptTooLong(at_least, limit, is_lower_bound=True)
    # A chat template writes the special tokens itself; the tokenizer would add a second BOS.
    ids = tokenizer.encode(text, add_special_tokens=isinstance(prompt, str))
    if not ids:
        raise InvalidRequest("the prompt has no tokens; give at least one character or id", param="prompt")
    return text, _check_ids(ids, limit, runtime.executor.info.vocab_size)


def _check_ids(prompt: list[Any], limit: int, vocab_size: int) -> list[int]:
    if len(prompt) > limit:
        raise PromptTooLong(len(prompt), limit)
    try:
        plain = [token_id.item() if isinstance(token_id, np.integer) else token_id for token_id in prompt]
        ids = msgspec.convert(plain, list[int], strict=True)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(
            f"prompt: a list holds token ids (int) or messages (dict): {exc}", param="prompt"
        ) from None
    worst = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= worst < vocab_size:
        raise InvalidRequest(f"prompt holds token id {worst}; the model has 0 to {vocab_size - 1}", param="prompt")
    return ids


def _as_list(prompt: Any) -> Any:
    """Token ids as the list that they are: tuples, arrays and tensors of one dimension."""
    if isinstance(prompt, tuple):
        return list(prompt)
    return prompt.tolist() if getattr(prompt, "ndim", None) == 1 and hasattr(prompt, "tolist") else prompt


def _check_call(prompt: Any, request_id: str | None, on_full: str) -> None:
    if not isinstance(prompt, str | list):
        raise InvalidRequest(
            f"prompt is a {type(prompt).__name__}; give a str, a list of token ids, or a list of chat messages",
            param="prompt",
        )
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one character, token id or message", param="prompt")
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise InvalidRequest(f"request_id={request_id!r}: a non-empty str is needed", param="request_id")
    if on_full not in get_args(OnFull):
        raise InvalidRequest(f"on_full={on_full!r}: 'wait' or 'raise' is needed", param="on_full")


def _snapshot(prompt: Prompt, runtime: Runtime) -> Prompt:
    """The prompt as it is now: while the request waits, the caller may go on with the list.

    Raises:
        InvalidRequest, PromptTooLong: this model cannot take it, whatever is in it.
    """
    if isinstance(prompt, str):
        runtime.require_tokenizer()
        return prompt
    if isinstance(prompt[0], dict):
        runtime.require_tokenizer()
        return [dict(message) if isinstance(message, dict) else message for message in prompt]
    return list(_check_ids(prompt, runtime.executor.info.max_model_len - 1, runtime.executor.info.vocab_size))


def _check_params(params: SamplingParams, runtime: Runtime) -> None:
    limit, vocab_size = runtime.config.max_logprobs, runtime.executor.info.vocab_size
    if params.logprobs is not None and params.logprobs > limit:
        raise InvalidRequest(
            f"logprobs={params.logprobs} is more than this engine allows ({limit}, max_logprobs)", param="logprobs"
        )
    if params.stop_token_ids and max(params.stop_token_ids) >= vocab_size:
        raise InvalidRequest(
            f"stop_token_ids holds {max(params.stop_token_ids)}; the model has 0 to {vocab_size - 1}",
            param="stop_token_ids",
        )
    if params.stop and runtime.tokenizer is None:
        raise InvalidRequest("stop strings need a tokenizer, and this model has none", param="stop")


def _num_chars(prompt: Prompt) -> int | None:
    """How much there is to prepare; None for chats, whose templates are programs that may take long over little."""
    return None if isinstance(prompt, list) and isinstance(prompt[0], dict) else len(prompt)


def _make_id() -> str:
    return f"req-{os.urandom(8).hex()}"
