"""An engine as a deployment of Ray Serve (https://docs.ray.io/en/latest/serve): its HTTP API, a handle, autoscaling.

    app = build_app("Qwen/Qwen3-0.6B", num_gpus=1, autoscaling={"min_replicas": 1, "max_replicas": 4})
    serve.run(app)

or ``serve run aioengine.integrations.ray_serve:builder model=Qwen/Qwen3-0.6B num_gpus=1``. Each replica of Serve's has
an engine of its own in the loop that Serve runs the replica's code on, in a thread beside the one for Serve's own work.
A client that leaves, or a call that is cancelled, aborts its request, since Serve cancels the task of either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from aioengine.config import EngineConfig
from aioengine.engine import Engine, Prompt
from aioengine.errors import ConfigError, EngineDead
from aioengine.outputs import CompletionDelta, RequestOutput
from aioengine.processes.own_process import limit_spinning
from aioengine.server.asgi import create_app
from aioengine.server.config import ServerConfig

try:
    from ray import serve
except ImportError as error:
    raise ConfigError("Ray Serve is not installed: pip install 'aioengine[ray_serve]'") from error

if TYPE_CHECKING:
    from starlette.applications import Starlette

SHUTDOWN_TIMEOUT_S = 120.0
"""For a replica's requests to end before Serve kills it; Serve's own default of 20 s is for short ones."""


class EngineDeployment:
    """One replica: an engine, and its OpenAI-compatible API. Its methods are for handles of the deployment.

    Args:
        engine: arguments of `Engine`.
        server: of the API; absent: the defaults.
    Raises:
        ConfigError, ModelLoadError: the engine cannot be started; Serve shows it in the deployment's status.
    """

    async def __init__(self, engine: Mapping[str, Any], server: ServerConfig | None) -> None:  # type: ignore[misc]
        limit_spinning()  # Serve's replica is a process of its own
        self._server = server
        self.engine = await Engine.start(**engine)

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_app(self.engine, self._server)

    async def generate(self, prompt: Prompt, **arguments: Any) -> RequestOutput:
        """As `Engine.generate`: ``await handle.generate.remote(...)``; cancelling that aborts the request."""
        return await self.engine.generate(prompt, **arguments)

    async def stream(self, prompt: Prompt, **arguments: Any) -> AsyncIterator[CompletionDelta]:
        """As `Engine.stream`: ``async for delta in handle.options(stream=True).stream.remote(...)``.

        Serve reads it as fast as tokens come, and holds what its caller has not read.
        """
        async with self.engine.stream(prompt, **arguments) as stream:
            async for delta in stream:
                yield delta

    async def check_health(self) -> None:
        """Raise if the engine is dead or stalled: Serve starts another replica after three times in a row."""
        health = self.engine.health()
        if health.status != "ALIVE":
            raise EngineDead(f"{health.status}: {health.reason}")

    async def __del__(self) -> None:
        """Close the engine; Serve awaits this in its loop when the replica's requests are over, or have taken long."""
        if hasattr(self, "engine"):
            await self.engine.aclose()


def build_app(
    model: str | None = None,
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    autoscaling: Mapping[str, Any] | None = None,
    max_ongoing_requests: int | None = None,
    deployment: Mapping[str, Any] | None = None,
    server: ServerConfig | None = None,
    **engine: Any,
) -> serve.Application:
    """An application of Serve's, for ``serve.run``, whose HTTP API is that of ``aioengine serve``.

    Args:
        num_cpus, num_gpus: of each replica; Ray shows it these GPUs alone, and it computes with so many threads.
        autoscaling: fields of Serve's ``autoscaling_config``; absent: one replica. ``target_ongoing_requests`` is three
            quarters of ``max_num_seqs`` where it is not given: there is batching left then, and no queue.
        max_ongoing_requests: at one replica, the waiting ones included; Serve holds others back. Absent: twice
            ``max_num_seqs``.
        deployment: further options of Serve's deployment, such as ``graceful_shutdown_timeout_s``.
        server: limits, API keys and names of the HTTP API.
        engine: other arguments of `Engine`, such as ``dtype`` or ``max_model_len``.
    Raises:
        ConfigError: an argument is unknown, or its value is bad.
    """
    if "executor" in engine:
        raise ConfigError("an executor is an object of this process: name its maker in process=ProcessOptions(...)")
    Engine(model, **engine)  # what is wrong is known here, and not when a replica starts
    max_num_seqs = engine.get("max_num_seqs", EngineConfig().max_num_seqs)
    options: dict[str, Any] = {
        "name": "aioengine",
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        "max_ongoing_requests": max_ongoing_requests or 2 * max_num_seqs,
        "graceful_shutdown_timeout_s": SHUTDOWN_TIMEOUT_S,
    }
    if autoscaling is not None:
        target = max(1, 3 * max_num_seqs // 4)
        options["autoscaling_config"] = {"target_ongoing_requests": target, **autoscaling}
    made = serve.deployment(serve.ingress()(EngineDeployment)).options(**{**options, **(deployment or {})})
    return made.bind({"model": model, **engine}, server)


def builder(arguments: dict[str, Any]) -> serve.Application:
    """`build_app` for ``serve run`` and Serve's config files, whose ``args`` are its arguments.

    ``serve run`` passes its command line's values as text: numbers are read here.
    """
    return build_app(**{name: _read(value) for name, value in arguments.items()})


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value.lower(), value)
