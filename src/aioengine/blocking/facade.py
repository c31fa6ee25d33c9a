"""The methods that `LLM` and `LLMEngine` share: blocking calls that concern the whole engine."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import anyio

from aioengine.blocking.loop_thread import LoopThread
from aioengine.config import EngineConfig
from aioengine.core.control import PauseMode, SleepLevel
from aioengine.core.health import Health
from aioengine.engine import Engine, EngineKeywords
from aioengine.errors import EngineDead
from aioengine.frontend.call_options import lists_keywords
from aioengine.frontend.stream import NotCopied
from aioengine.outputs.metrics import EngineStats
from aioengine.text.tokenizer import Tokenizer
from aioengine.vllm_names import NotYet

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_TRACE = "aioengine-trace.json"


def _blocking(method: Callable[Concatenate[Engine, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Facade, P], T]:
    """A blocking version of a method of `Engine`."""

    @functools.wraps(method)
    def call(facade: Facade, /, *args: P.args, **kwargs: P.kwargs) -> T:
        outcome: T = facade._host.run(lambda engine: getattr(engine, method.__name__)(*args, **kwargs))
        return outcome

    return call


class Facade(NotCopied, NotYet):
    """A started engine on a loop in a thread of its own, for calls from any thread; see `LoopThread`.

    Every method raises RuntimeError inside a running event loop and in a fork of the process that made this object.
    Once the object is closed, every method raises `EngineClosed`. Closing is optional: an object that is dropped, or
    open when the script ends, closes itself.

    Args:
        model, options: as in `Engine`.
    Raises:
        ConfigError, ModelLoadError: the engine cannot be started; nothing is left behind.
    """

    @lists_keywords(EngineKeywords)
    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineKeywords]) -> None:
        self._open(lambda: Engine.start(model, **options))

    @classmethod
    def connect(cls, address: str, **options: Any) -> Self:
        """Use an engine that serves in another process; as `Engine.connect`."""
        facade = cls.__new__(cls)
        facade._open(lambda: Engine.connect(address, **options))
        return facade

    def _open(self, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        self._host = LoopThread(type(self).__name__, start)
        weakref.finalize(self, self._host.drop).atexit = False
        self._may_sleep = False
        self.engine_config: EngineConfig = self._host.engine.config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and free everything. Calls that wait in other threads raise `EngineClosed`. Idempotent."""
        self._host.close()

    def shutdown(self) -> None:
        """The same as `close`."""
        self.close()

    # State

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with the names and defaults of transformers'."""
        return self._host.engine.get_tokenizer()

    def stats(self) -> EngineStats:
        """The engine's numbers now, and since its start."""
        return self._host.ask(lambda engine: engine.stats())

    def get_metrics(self) -> list[Any]:
        """The metrics behind `stats`, as `EngineMetrics.collect` gives them."""
        return self._host.ask(lambda engine: list(engine.metrics.collect()))

    def check_health(self) -> Health:
        """Whether the engine is alive or stalled.

        Raises:
            EngineDead: it is dead.
        """
        health = self._host.ask(lambda engine: engine.health())
        if health.status == "DEAD":
            raise EngineDead(health.reason or "the engine is dead")
        return health

    # The whole engine

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; with ``reset_running``, running requests compute their KV again, too.

        Returns:
            True: it always succeeds.
        """
        self._host.run(lambda engine: engine.reset_prefix_cache(reset_running=reset_running))
        return True

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """Free the device's memory until `wake_up`; as `Engine.sleep`."""
        self._may_sleep = True
        self._host.run(lambda engine: engine.sleep(level, mode=mode))

    def start_profile(self, max_steps: int = 100) -> None:
        """Record the device's next steps, ``max_steps`` at most, until `stop_profile`."""
        self._host.run(lambda engine: engine.start_profile(max_steps=max_steps))

    def stop_profile(self, path: str | os.PathLike[str] = DEFAULT_TRACE) -> Path:
        """Write the trace recorded since `start_profile`; as `Engine.profile`.

        Returns:
            the file's path.
        """
        self._host.run(lambda engine: engine.stop_profile(path))
        return Path(path)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function that was registered by name (`aioengine.worker_function`) on each rank of the device.

        Args:
            timeout: seconds to wait; absent: for ever.
        Returns:
            the function's results, by rank.
        Raises:
            TimeoutError: the call took longer than ``timeout``.
        """

        async def call(engine: Engine) -> list[Any]:
            with anyio.fail_after(timeout):
                return await engine.collective_rpc(method, args, kwargs)

        return self._host.run(call)

    apply_model = _blocking(Engine.apply_model)
    get_supported_tasks = _blocking(Engine.supported_tasks)
    wake_up = _blocking(Engine.wake_up)
    is_sleeping = _blocking(Engine.is_sleeping)
    update_weights = _blocking(Engine.update_weights)
    save_sharded_state = _blocking(Engine.save_sharded_state)

    # For calls that wait for tokens

    async def _check_awake(self, engine: Engine) -> None:
        """Raise RuntimeError if the engine sleeps: the caller would wait, and may be the only thread to wake it up."""
        if self._may_sleep:
            self._may_sleep = await engine.is_sleeping()
        if self._may_sleep:
            raise RuntimeError("the engine sleeps, and computes nothing until it is woken: call wake_up() first")

    def __repr__(self) -> str:
        state = "open" if self._host.is_open else "closed"
        return f"<{type(self).__name__} {self.engine_config.model or 'demo'!r} {state}>"
