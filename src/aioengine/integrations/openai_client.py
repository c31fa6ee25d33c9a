"""The official OpenAI clients over an engine in this process.

openai makes its requests by httpx, or by httpx2 in newer versions; the classes here are of the one that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Mapping
from typing import Any, Self

from aioengine.blocking.llm import LLM
from aioengine.engine import Engine, check_asyncio
from aioengine.errors import AioEngineError, ConfigError, EngineClosed
from aioengine.integrations.in_process import NO_RETRY, InProcessApi, InProcessExchange, answer_to
from aioengine.server.config import ServerConfig
from aioengine.server.exchange import Response

try:
    import openai
except ImportError as error:
    raise ConfigError("openai_client() needs the package openai: pip install 'aioengine[openai]'") from error

HTTP: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])
"""httpx or httpx2."""

BASE_URL = "http://aioengine/v1"
"""Names no host: nothing is looked up."""
UNAVAILABLE = 503


def async_client(engine: Engine, *, config: ServerConfig | None = None, **options: Any) -> openai.AsyncOpenAI:
    """As `Engine.openai_client`."""
    transport = AsyncTransport(InProcessApi(engine, config))
    http_client = openai.DefaultAsyncHttpxClient(transport=transport)
    return openai.AsyncOpenAI(**_checked(options), base_url=BASE_URL, http_client=http_client)


def blocking_client(llm: LLM, *, config: ServerConfig | None = None, **options: Any) -> openai.OpenAI:
    """As `LLM.openai_client`."""
    http_client = openai.DefaultHttpxClient(transport=Transport(llm, InProcessApi(llm._host.engine, config)))
    return openai.OpenAI(**_checked(options), base_url=BASE_URL, http_client=http_client)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with a key, without which the client would look for one in the environment."""
    for name in ("base_url", "http_client", "provider", "data_residency"):
        if options.get(name) is not None:
            raise ConfigError(f"{name}: this client speaks to the engine that has made it; leave {name} out")
    return {"api_key": "in-process", **options}


# For tasks on the engine's loop


class AsyncTransport(HTTP.AsyncBaseTransport):  # type: ignore[misc]
    """Sends requests to an `InProcessApi`; the caller's task waits, the engine's serves."""

    def __init__(self, api: InProcessApi) -> None:
        self._api = api

    async def handle_async_request(self, request: Any) -> Any:
        try:
            check_asyncio()
            exchange = _exchange_of(request, await request.aread())
            task = await self._api.begin(exchange)
        except (AioEngineError, RuntimeError) as error:
            return _whole(answer_to(error))
        except (TimeoutError, ConnectionError) as error:
            raise _http_error(error, request) from error
        return _response(exchange, self._api, AsyncAnswerBody(exchange, task, request))

    async def aclose(self) -> None:
        await self._api.aclose()


class AsyncAnswerBody(HTTP.AsyncByteStream):  # type: ignore[misc]
    """An answer's bytes as they come. Closing it, or dropping it, aborts what is still computed for it."""

    def __init__(self, exchange: InProcessExchange, task: asyncio.Task[None], request: Any) -> None:
        self._exchange = exchange
        self._task = task
        self._request = request

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            data = await self._exchange.take()
        except (TimeoutError, ConnectionError) as error:
            raise _http_error(error, self._request) from error
        if not data:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        """Returns once the engine has forgotten the request. Cancelling stops that wait alone."""
        self._exchange.leave()
        await asyncio.wait({self._task})

    def __del__(self) -> None:
        self._exchange.leave_soon()


# For other threads


class Transport(HTTP.BaseTransport):  # type: ignore[misc]
    """Sends requests to an `InProcessApi` on a loop in another thread, and blocks."""

    def __init__(self, llm: LLM, api: InProcessApi) -> None:
        self._llm = llm  # one that is held by nothing else would close itself
        self._host = llm._host
        self._api = api

    def handle_request(self, request: Any) -> Any:
        body = request.read()

        async def begin(_: Engine) -> tuple[InProcessExchange, asyncio.Task[None]]:
            exchange = _exchange_of(request, body)
            return exchange, await self._api.begin(exchange)

        try:
            exchange, task = self._host.run(begin)
        except (AioEngineError, RuntimeError) as error:
            return _whole(answer_to(error))
        except (TimeoutError, ConnectionError) as error:
            raise _http_error(error, request) from error
        return _response(exchange, self._api, AnswerBody(self._llm, exchange, task, request))

    def close(self) -> None:
        with contextlib.suppress(EngineClosed):
            self._host.run(lambda _: self._api.aclose())


class AnswerBody(HTTP.SyncByteStream):  # type: ignore[misc]
    """As `AsyncAnswerBody`; each piece is all that has come since the last one."""

    def __init__(self, llm: LLM, exchange: InProcessExchange, task: asyncio.Task[None], request: Any) -> None:
        self._llm = llm
        self._host = llm._host
        self._exchange = exchange
        self._task = task
        self._request = request

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        try:
            try:
                data = self._host.run(lambda _: self._exchange.take())
            except EngineClosed:  # what comes until the loop has ended, the reason among it, can still be read
                self._host.close()
                data = self._exchange.take_rest()
        except (TimeoutError, ConnectionError) as error:
            raise _http_error(error, self._request) from error
        if not data:
            raise StopIteration
        return data

    def close(self) -> None:
        """Returns once the engine has forgotten the request."""

        async def leave(_: Engine) -> None:
            self._exchange.leave()
            await asyncio.wait({self._task})

        if not self._task.done():
            with contextlib.suppress(EngineClosed):
                self._host.run(leave)

    def __del__(self) -> None:
        self._exchange.leave_soon()


# Of both


def _exchange_of(request: Any, body: bytes) -> InProcessExchange:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers.raw}
    read_timeout_s = request.extensions.get("timeout", {}).get("read")
    url = request.url
    return InProcessExchange(request.method, url.path, url.query.decode("ascii"), headers, body, read_timeout_s)


def _response(exchange: InProcessExchange, api: InProcessApi, body: Any) -> Any:
    headers = exchange.response_headers
    if exchange.status == UNAVAILABLE and api.is_over():
        headers = {**headers, **NO_RETRY}  # the client would wait for the time in Retry-After, twice
    return HTTP.Response(exchange.status, headers=headers, stream=body)


def _whole(response: Response) -> Any:
    return HTTP.Response(response.status, headers={**response.headers, **NO_RETRY}, content=response.body)


def _http_error(error: Exception, request: Any) -> Exception:
    kind = HTTP.ReadTimeout if isinstance(error, TimeoutError) else HTTP.RemoteProtocolError
    made: Exception = kind(str(error), request=request)
    return made
