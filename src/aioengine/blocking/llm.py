"""`LLM`: prompts in, outputs out, under the names of vLLM's class."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Self, Unpack

import anyio

from aioengine.blocking.facade import Facade
from aioengine.blocking.loop_thread import LoopThread
from aioengine.engine import Engine
from aioengine.errors import OutputNotParsed
from aioengine.frontend.call_options import CallKeywords, lists_keywords
from aioengine.frontend.clients import CLIENT_MAKERS
from aioengine.frontend.stream import Stream
from aioengine.outputs import CompletionDelta, RequestOutput, T, TypeForm
from aioengine.sampling_params import SamplingKeywords, SamplingParams, make_params
from aioengine.text.chat_input import open_messages
from aioengine.validation import invalid

if TYPE_CHECKING:
    from openai import OpenAI

REFRESH_INTERVAL_S = 0.2
"""Time between two updates of the progress bar; an eye follows no faster ones."""

FOR_ALL_PROMPTS = CallKeywords.__annotations__.keys() - SamplingKeywords.__annotations__.keys() | {"output_type"}
"""Options of `Engine.generate` that calls of `LLM` take, too."""

Params = SamplingParams | Sequence[SamplingParams | None] | None


class LLM(Facade):
    """A model for scripts: ``LLM().generate(["Once upon a time", "Then"], max_tokens=64)``.

    All prompts of a call run concurrently, as many as the engine takes.
    """

    def _open(self, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        super()._open(start)
        self._request_numbers = itertools.count()

    @lists_keywords(CallKeywords)
    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        show_progress: bool | None = None,
        priority: int | Sequence[int] | None = None,
        output_type: TypeForm[T] | UnionType | None = None,
        **options: Unpack[CallKeywords],
    ) -> list[RequestOutput[T]]:
        """Complete prompts, and wait for all of them.

        When a prompt fails, the others are aborted; only an `OutputNotParsed` waits until all have ended. Ctrl-C aborts
        all prompts. The object stays usable.

        Args:
            prompts: one or a list. Each is a text, token ids, chat messages, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``.
            sampling_params: one for all prompts, or a list with one for each; or give the fields as keywords. Keywords
                that are not given default to the model's generation config.
            use_tqdm: False shows no progress.
            show_progress: True shows a bar even if stderr is no terminal; absent: ``use_tqdm`` decides, and a bar needs
                a terminal and the main thread.
            priority: one for all prompts, or a list with one for each; smaller goes first.
            output_type: as in `Engine.generate`, for all prompts.
            options: the other options of `Engine.generate`, for all prompts, and the fields of ``sampling_params``.
        Returns:
            an output for each prompt, in their order.
        Raises:
            InvalidRequest: a value is bad. All are checked before the first prompt runs, except for the lengths of
                texts in tokens. The error's notes give the number of the prompt.
            OutputNotParsed: an answer is no value of ``output_type``; the error's ``outputs`` are those of all prompts.
            StepFailed, EngineDead: see there.
            RuntimeError: the engine sleeps.
        """
        call, is_shown = {**options, "output_type": output_type}, _is_shown(use_tqdm, show_progress)
        return self._complete(_list_prompts(prompts), sampling_params, priority, call, is_shown=is_shown)

    @lists_keywords(CallKeywords)
    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        show_progress: bool | None = None,
        priority: int | Sequence[int] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str | None = None,
        output_type: TypeForm[T] | UnionType | None = None,
        **options: Unpack[CallKeywords],
    ) -> list[RequestOutput[T]]:
        """Answer conversations, by the model's chat template; as `generate`.

        Args:
            messages: a conversation, a list of ``{"role": ..., "content": ...}``; or a list of conversations.
            add_generation_prompt, continue_final_message: shorthands for these two ``chat_template_kwargs``.
            output_type, options: as in `generate`; ``tools``, ``reasoning_effort`` and so on are described there.
        """
        named = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        named = {name: value for name, value in named.items() if value is not None}
        if named and isinstance(variables := options.get("chat_template_kwargs"), Mapping | None):
            options["chat_template_kwargs"] = {**named, **(variables or {})}
        call, is_shown = {**options, "output_type": output_type}, _is_shown(use_tqdm, show_progress)
        return self._complete(_list_chats(messages), sampling_params, priority, call, is_shown=is_shown)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Any) -> BlockingStream:
        """Complete a prompt, and read it as it comes: ``for delta in llm.stream("Once"): print(delta.text, end="")``.

        The request begins when the first delta is read. Leaving the loop, or a ``with`` block over it, aborts the
        request. Tokens that come between two reads are merged into the next delta.

        Args:
            prompt: as in `Engine.generate`; chat messages, too.
            options: the other arguments of `Engine.stream`, and fields of ``sampling_params``.
        Raises:
            InvalidRequest: a value is bad; raised at the call.
            StepFailed, EngineDead, EngineClosed: while it is read.
        """
        stream = self._host.ask(lambda engine: engine.stream(prompt, sampling_params, **options))
        return BlockingStream(self._host, stream, self._check_awake)

    def openai_client(self, **options: Any) -> OpenAI:
        """OpenAI's own blocking client of this model, in this process, for any thread; as `Engine.openai_client`."""
        client: OpenAI = CLIENT_MAKERS["blocking openai"](self, **options)
        return client

    def _complete(
        self,
        prompts: list[Any],
        sampling_params: Params,
        priority: int | Sequence[int] | None,
        call: Mapping[str, Any],
        *,
        is_shown: bool,
    ) -> list[RequestOutput]:
        # Engine.generate has arguments that are not for these methods.
        make_params(None, {}, {name: value for name, value in call.items() if name not in FOR_ALL_PROMPTS})
        num_prompts = len(prompts)
        all_params = _for_each("sampling_params", sampling_params, num_prompts)
        priorities = _for_each("priority", 0 if priority is None else priority, num_prompts)
        calls = [
            {"prompt": prompt, "params": params, "priority": rank, **call}
            for prompt, params, rank in zip(prompts, all_params, priorities, strict=True)
        ]
        outputs: dict[int, RequestOutput] = {}

        async def run(engine: Engine) -> None:
            await self._check_awake(engine)
            await _run_all(engine, calls, outputs, self._request_numbers)

        if not (is_shown and prompts):
            self._host.run(run)
        else:
            first = self.stats().generation_tokens
            with _progress_bar(num_prompts) as show:

                def refresh() -> None:
                    show(len(outputs), self.stats().generation_tokens - first)

                self._host.run(run, every_s=REFRESH_INTERVAL_S, meanwhile=refresh)
                show(num_prompts, sum(len(choice.token_ids) for one in outputs.values() for choice in one.outputs))
        return [outputs[number] for number in range(num_prompts)]


class BlockingStream(Iterator[CompletionDelta]):
    """The deltas of an answer, to be read in a loop. `close`, or the end of a ``with`` block, aborts the request, from
    any thread; a loop that reads in another thread then ends."""

    def __init__(self, host: LoopThread, stream: Stream, check: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        self._host = host
        self._stream = stream
        self._check = check
        self._is_begun = self._is_ended = self._is_closed = False

    def __next__(self) -> CompletionDelta:
        try:
            delta = self._host.run(self._read)
        except BaseException:
            self.close()
            raise
        if delta is None:
            raise StopIteration
        return delta

    async def _read(self, engine: Engine) -> CompletionDelta | None:
        if not (self._is_begun or self._is_closed):
            await self._check(engine)
            await self._stream.__aenter__()
            self._is_begun = True
        delta = None if self._is_closed else await anext(self._stream, None)
        if delta is None or self._is_closed:
            await self._leave()
            return None
        return delta

    async def _leave(self) -> None:
        if self._is_begun and not self._is_ended:
            self._is_ended = True
            await self._stream.__aexit__(None, None, None)

    def close(self) -> None:
        """Abort the request. Idempotent; does not wait, since the garbage collector may call it in any thread."""
        if not self._is_closed:
            self._is_closed = True
            self._host.start_soon(self._leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


async def _run_all(
    engine: Engine, calls: list[dict[str, Any]], outputs: dict[int, RequestOutput], request_numbers: Iterator[int]
) -> None:
    """Run `Engine.generate` with each call's keywords, at most as many at a time as the engine holds. The first error
    cancels the rest; an `OutputNotParsed` is raised only when all have ended.

    Args:
        outputs: receives the outputs, by the numbers of the calls.
    """
    for number, call in enumerate(calls):  # a call that can never run must not cost the others' work
        with _naming(number, len(calls)):
            engine.stream(**{name: value for name, value in call.items() if name != "output_type"})
    failed: list[Exception] = []  # at most one; its traceback has these frames, which must not have the error
    # Sorted by priority here, too: the engine sorts only the requests that it has.
    queue = iter(sorted(range(len(calls)), key=lambda number: calls[number]["priority"]))

    async def work() -> None:
        for number in queue:
            try:
                with _naming(number, len(calls)):
                    outputs[number] = await engine.generate(request_id=str(next(request_numbers)), **calls[number])
            except OutputNotParsed as exc:
                outputs[number] = exc.output
                failed[:] = failed or [exc]
            except Exception as exc:
                if not failed or isinstance(failed[0], OutputNotParsed):
                    failed[:] = [exc]
                tasks.cancel_scope.cancel()
                return

    async with anyio.create_task_group() as tasks:
        for _ in range(min(len(calls), engine.config.max_num_seqs + engine.config.max_waiting)):
            tasks.start_soon(work)
    if failed and isinstance(failed[0], OutputNotParsed):
        failed[0].outputs = [outputs[number] for number in range(len(calls))]
    if failed:
        raise failed.pop()


@contextlib.contextmanager
def _naming(number: int, num_prompts: int) -> Iterator[None]:
    """Add a prompt's number to an error's notes, if there are several prompts."""
    try:
        yield
    except Exception as error:
        if num_prompts > 1:
            error.add_note(f"prompt {number} of {num_prompts}, counted from 0")
        raise


def _is_shown(use_tqdm: bool, show_progress: bool | None) -> bool:
    """Whether to show a progress bar; by default only in the main thread, so that no thread of a server writes one."""
    if show_progress is not None:
        return show_progress
    return use_tqdm and sys.stderr.isatty() and threading.current_thread() is threading.main_thread()


def _for_each(name: str, given: Any, num_prompts: int) -> list[Any]:
    """A value for each prompt, from one value for all or a list."""
    if not isinstance(given, list | tuple):
        return [given] * num_prompts
    if len(given) != num_prompts:
        message = f"{name} has {len(given)} items for {num_prompts} prompts; give one for each, or one for all"
        raise invalid(name, message)
    return list(given)


def _list_prompts(prompts: Any) -> list[Any]:
    """The prompts as a list. A text, token ids, an array of ids, a dict and a chat are one prompt each."""
    if not isinstance(prompts, list | tuple):
        return [prompts]
    if not prompts:
        return []
    first = prompts[0]
    is_message = isinstance(first, dict) and "role" in first
    is_one = is_message or not (isinstance(first, str | list | tuple | dict) or hasattr(first, "__len__"))
    return [prompts] if is_one else list(prompts)


def _list_chats(messages: Any) -> list[Any]:
    """The conversations as a list, from one or a list.

    Raises:
        InvalidRequest: ``messages`` is neither.
    """
    messages = open_messages(messages)
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], dict):
        messages = [messages]
    elif isinstance(messages, list | tuple):
        messages = [open_messages(chat) for chat in messages]
    is_known = isinstance(messages, list | tuple) and all(
        isinstance(chat, list | tuple) and chat and isinstance(chat[0], dict) for chat in messages
    )
    if not is_known:
        problem = "give a conversation, a list of {'role': ..., 'content': ...}, or a list of conversations"
        raise invalid("messages", f"messages: {problem}")
    return list(messages)


@contextlib.contextmanager
def _progress_bar(num_requests: int) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that draws a bar of requests done and tokens a second on stderr. Its last state stays there."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]:,.0f} tokens/s")
    columns = (name, BarColumn(), MofNCompleteColumn(), rate, TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    task = progress.add_task("generating", total=num_requests, rate=0.0)
    began_at = time.monotonic()

    def show(num_done: int, num_tokens: int) -> None:
        progress.start()
        progress.update(task, completed=num_done, rate=num_tokens / max(time.monotonic() - began_at, 1e-9))
        progress.refresh()

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()
