"""Blocking objects over a fake device, closed at the end whatever became of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from aioengine import LLM, LLMEngine
from aioengine.scheduler.plan import RowSampling
from aioengine.testing import sample_hash
from aioengine.text.tokenizer import Tokenizer
from doubles.fake_executor import FakeExecutor

F = TypeVar("F", LLM, LLMEngine)

VOCAB_SIZE = 2048
ENDLESS = 100_000

_load_once = functools.cache(Tokenizer.load)


@pytest.fixture(autouse=True)
def each_tokenizer_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the demo's is most of a start's time."""
    monkeypatch.setattr(Tokenizer, "load", lambda folder: copy.copy(_load_once(folder)))


def press_ctrl_c() -> None:
    """As the terminal does: to the process, whose main thread the kernel prefers; from any thread."""
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def on_ctrl_c(handler: Callable[..., Any]) -> Iterator[None]:
    """Ctrl-C calls ``handler(number, frame)`` in the block."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Device(FakeExecutor):
    """A fake device of the demo model's vocabulary, that calls back before it samples, and never ends an output."""

    def __init__(self, **options: Any) -> None:
        self.num_sampled = 0
        self.on_sample: Callable[[], None] = lambda: None
        super().__init__(vocab_size=VOCAB_SIZE, sampler=self._sample_next, **options)

    def _sample_next(self, token_ids: list[int], sampling: RowSampling) -> int:
        self.num_sampled += 1
        self.on_sample()
        return 3 + sample_hash(token_ids, sampling, vocab_size=VOCAB_SIZE - 3)  # above the special tokens

    def interrupt_at(self, num_sampled: int) -> None:
        """Ctrl-C is pressed when so many tokens are sampled."""
        self.on_sample = lambda: press_ctrl_c() if self.num_sampled == num_sampled else None

    def seeds(self) -> list[int]:
        """Of all requests that came to the device, in that order."""
        return [added.sampling.seed for plan in self.plans for added in plan.added]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def patient_device() -> Device:
    """For requests of `ENDLESS` tokens, which take seconds: the engine computes whether or not a call waits for it."""
    return Device(max_model_len=ENDLESS + 100, num_blocks=ENDLESS // 16 * 4)


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    yield from _opening(LLM)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., LLMEngine]]:
    yield from _opening(LLMEngine)


def _opening(kind: type[F]) -> Iterator[Callable[..., F]]:
    opened: list[F] = []

    def open_one(executor: FakeExecutor | None = None, **config: Any) -> F:
        opened.append(kind(executor=executor or Device(), **config))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def device_type() -> type[Device]:
    return Device
