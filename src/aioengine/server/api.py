"""The API, written once for all frameworks: routes, admission of requests, their handlers, and their records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import anyio
import msgspec
from anyio import CapacityLimiter

import aioengine
from aioengine.engine import Engine, check_asyncio
from aioengine.errors import AioEngineError, EngineClosed, EngineDead, InvalidRequest
from aioengine.processes.turns import turns_here
from aioengine.server.access_log import log_request, logger, request_id_of
from aioengine.server.answers import encode_ids
from aioengine.server.anthropic_messages import MessageRequest, error_response
from aioengine.server.config import ServerConfig
from aioengine.server.decoding import BodyReader, read_messages, read_text, read_tokens, read_tools
from aioengine.server.errors import (
    JSON_HEADERS,
    ApiError,
    api_error_of,
    invalid_value,
    missing,
    overloaded,
    unavailable,
    unsupported,
)
from aioengine.server.exchange import (
    PIECE_BYTES,
    ClientCut,
    ClientGone,
    Exchange,
    PerLoop,
    Response,
    WriteMonitor,
    run_while_connected,
)
from aioengine.server.generation import GenerationCall, check_request
from aioengine.server.group.channel import SiblingServers
from aioengine.server.metrics import (
    HttpMetrics,
    ServerNumbers,
    content_type_for,
    encode,
    read_families,
    read_process,
)
from aioengine.server.pages import COMPACT_PATH, PAGE, instead_of, make_document, make_page
from aioengine.server.record import MESSAGES, OPEN_PATHS, UNCOUNTED_HANDLERS, RequestRecord, Tracing
from aioengine.server.responses import ResponseRequest
from aioengine.server.schema import (
    AbortRequest,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
    is_given,
    template_kwargs,
)
from aioengine.server.security import ApiKeys, check_host
from aioengine.server.stored_responses import OwnedId, StoredResponses, input_page
from aioengine.validation import shorten

T = TypeVar("T", bound=Body)

Handler = Callable[[Exchange, RequestRecord], Awaitable[Response | None]]

START_TIMEOUT_S = 30.0
"""Longest wait of a request for an engine that is being started; proxies wait a minute."""
MAX_ABORTED = 1024
MAX_TOKEN_STRS = 8192
MAX_DETOKENIZED = 2**16
BUNDLED = "demo"
"""The bundled model's own name, by which the page recognises it whatever name it is served under."""
MODEL_PREFIX = "/v1/models/"
MODEL_PATH = "/v1/models/{id}"
"""An id may hold slashes."""
RESPONSE_PREFIX = "/v1/responses/"
RESPONSE_PATH = "/v1/responses/{id}"
COUNT_PATH = "/v1/responses/input_tokens"
GENERATING: dict[str, type[Generation]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    MESSAGES: MessageRequest,
}
COUNTING: dict[str, type[MessageRequest | ResponseRequest]] = {
    COUNT_PATH: ResponseRequest,
    f"{MESSAGES}/count_tokens": MessageRequest,
}
"""Paths that return the number of a prompt's tokens."""


class Route(NamedTuple):
    """The handler of a method at a path.

    Attributes:
        body: the type that the request's body is decoded into.
        is_work: its requests count among those served at once, and are refused when there are too many.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    is_work: bool = False


class Api:
    """One engine's HTTP API; `serve` is its one entry.

    Args:
        engine: may be started later. Requests get 503 until its start begins, and then wait for at most
            `START_TIMEOUT_S`. Or a function that returns the engine, called at each request.
        config: absent: the defaults.
    """

    def __init__(self, engine: Engine | Callable[[], Engine], config: ServerConfig | None = None) -> None:
        if isinstance(engine, type) or not (isinstance(engine, Engine) or callable(engine)):
            raise TypeError(f"engine={shorten(engine)}: an Engine is needed, or a function that finds one")
        self._find_engine: Callable[[], Engine] = (lambda: engine) if isinstance(engine, Engine) else engine
        self.config = config if config is not None else ServerConfig()
        self._created = int(time.time())
        self.is_draining = False
        generate, count = self._generate, self._count
        routes = (
            *(Route("POST", path, partial(generate, kind), kind, is_work=True) for path, kind in GENERATING.items()),
            *(Route("POST", path, partial(count, kind), kind, is_work=True) for path, kind in COUNTING.items()),
            Route("GET", RESPONSE_PATH, self._manage_response),
            Route("DELETE", RESPONSE_PATH, self._manage_response),
            Route("GET", f"{RESPONSE_PATH}/input_items", self._manage_response),
            Route("GET", "/v1/models", self._models),
            Route("GET", MODEL_PATH, self._models),
            Route("POST", "/tokenize", self._tokenize, TokenizeRequest, is_work=True),
            Route("POST", "/detokenize", self._detokenize, DetokenizeRequest, is_work=True),
            Route("GET", "/tokenizer_info", partial(self._make, self._describe_tokenizer)),
            Route("POST", "/abort", self._abort, AbortRequest),
            *(Route("GET", path, self._health) for path in OPEN_PATHS),
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/version", partial(self._make, self._describe_version)),
            Route("GET", "/load", self._load),
            Route("GET", "/openapi.json", partial(self._make, lambda: _json(self._openapi))),
            Route("GET", "/docs", partial(self._make, lambda: make_page(self._openapi))),
            Route("GET", "/", partial(self._make, lambda: PAGE)),
        )
        self._routes: dict[str, dict[str, Route]] = {}
        """Routes by path and method."""
        for route in routes:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._metrics_of_http = HttpMetrics()
        self._rendering = PerLoop(lambda: CapacityLimiter(1))
        """Limits the rendering of metrics to one thread, of its own: a host's handlers may hold all of anyio's."""
        self._tracing = Tracing()
        self._keys = ApiKeys(self.config.api_keys)
        self._bodies = BodyReader(self.config)
        self._responses = StoredResponses(self.config.max_stored_responses, self.config.max_stored_response_bytes)
        self._others: SiblingServers | None = None
        """None: this server is its port's only one."""
        self._num_open = 0
        self._has_warned = False

    def enter_group(self, others: SiblingServers) -> None:
        """Become one of several servers of a port: metrics, load and aborts are then of all. Call it before serving."""
        self._others = others
        self._responses.is_one_of_several = True

    async def own_numbers(self, *, has_engine: bool = False) -> ServerNumbers:
        """The numbers of this server; ``has_engine``: with those that all front ends of the engine have."""
        process = await anyio.to_thread.run_sync(read_process, limiter=self._rendering.get())
        # The model of a connected engine is known only once it is connected.
        families = read_families(self.engine, self._metrics_of_http, self.model_names[0])
        if not has_engine:
            families = [each for each in families if not each.is_of_engine]
        return ServerNumbers([*families, *process], self._num_open)

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests of this server by their ids; other tasks run between them."""
        for request_id in request_ids:
            await turns_here().take()
            for prefix in ("chatcmpl-", "cmpl-", "msg-"):
                self.engine.abort(request_id.removeprefix(prefix))

    @property
    def engine(self) -> Engine:
        """The engine that is served now."""
        return self._find_engine()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the engine's one model, at least one. A folder's is its last part: no path is shown."""
        if self.config.served_model_name:
            return self.config.served_model_name
        model = self.engine.config.model
        if model is None:
            return (BUNDLED,)
        return (PurePath(model).name or "model",) if PurePath(model).is_absolute() or model[0] in ".~" else (model,)

    def _choose_model(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, or the first; another model's name is a 404 (`ApiError`)."""
        names = self.model_names
        if asked and asked not in names:
            message = f"the model {asked[:100]!r} is not served here; there is {', '.join(map(repr, names))}"
            raise ApiError(404, "model_not_found", message, param="model")
        return asked or names[0]

    def _describe_model(self, name: str) -> dict[str, Any]:
        """The model's entry in ``/v1/models``, for OpenAI's clients and for Anthropic's."""
        engine = self.engine
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "created": self._created,
            "owned_by": "aioengine",
            "root": BUNDLED if engine.config.model is None else self.model_names[0],
            "parent": None,
            "max_model_len": engine.info.max_model_len,
        }

    def drain(self) -> None:
        """Begin to drain: from now on `/health` is 503 and new work is refused."""
        self.is_draining = True

    # Every request

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request. Cancelling aborts its work.

        Raises:
            RuntimeError: the server does not run on asyncio.
        """
        check_asyncio()
        if f"{exchange.path}/".startswith(f"{self.config.root_path}/"):
            exchange.path = exchange.path.removeprefix(self.config.root_path)
        exchange.path = exchange.path.removesuffix("/") or "/"  # some hosts' mounts add one
        clock = time.monotonic  # uvloop's own counts milliseconds
        record = RequestRecord(
            request_id=request_id_of(exchange.headers),
            method=exchange.method,
            path=exchange.path,
            started_at=clock(),
            client=exchange.client,
        )
        self._metrics_of_http.began()
        path = _template_of(exchange.path)
        record.route = path if path in self._routes else record.route
        span = self._tracing.begin(record, exchange.headers)
        try:
            response = await self._answer(exchange, record, self._routes.get(path))
            if response is not None:
                record.status = response.status
                headers = {**response.headers, **record.id_headers}
                await self._respond(exchange, record, Response(response.status, response.body, headers))
        except ClientCut:
            record.outcome = "cut"
        except ClientGone:
            record.outcome = "cut" if record.outcome == "cut" else "client_gone"
            if not record.status:  # the client reads no response, but a host's middleware may want to see one
                # Nginx's status for a client that did not wait.
                await exchange.respond(Response(499, b"", {}))
        except asyncio.CancelledError:
            record.outcome = "client_gone"
            raise
        except Exception as error:  # of the framework, in sending
            record.outcome, record.error = "error", error
            raise
        finally:
            record.ended_at = clock()
            self._metrics_of_http.ended(record)
            self._tracing.end(span, record)
            if self.config.log_probes or record.route not in UNCOUNTED_HANDLERS or record.outcome != "ok":
                log_request(record)
            record.error = None  # its traceback leads here

    async def _answer(
        self, exchange: Exchange, record: RequestRecord, routes: dict[str, Route] | None
    ) -> Response | None:
        """The response, also for a refusal or a failure; None if it has been written already.

        Args:
            routes: the routes of the request's path, by method.
        """
        try:
            if exchange.path not in OPEN_PATHS:
                check_host(exchange.headers, self.config.allowed_hosts)
                key = self._keys.check(exchange.headers, is_page=exchange.path in ("/", "/docs"))
                record.owner = f"{key} {exchange.headers.get((self.config.tenant_header or '').lower(), '')}"
            route = (routes or {}).get("GET" if exchange.method == "HEAD" else exchange.method)
            path = exchange.path
            if route is None and (instead := instead_of(path)) is not None:
                raise ApiError(404, "unsupported_endpoint", f"there is no {path[:100]} here: {instead}")
            if routes is None:
                near = next((near for near in (f"/v1{path}", path.removeprefix("/v1")) if near in self._routes), None)
                hint = f"; did you mean {near}? (base_url)" if near is not None else ""
                raise ApiError(404, "not_found", f"there is nothing at {path[:100]!r}{hint}")
            if route is None:
                allowed = ", ".join(routes)
                raise ApiError(405, "method_not_allowed", f"{record.route} takes {allowed}", headers={"allow": allowed})
            if not route.is_work:
                return await route.handler(exchange, record)
            return await self._work(exchange, record, route)
        except ClientGone:
            raise
        except Exception as error:
            return self._answer_error(error, exchange, record)

    def _answer_error(self, error: Exception, exchange: Exchange, record: RequestRecord) -> Response | None:
        answer = api_error_of(error)
        record.error, record.error_code, record.error_param = error, answer.code, answer.param
        if isinstance(error, EngineClosed) and not self._has_warned and not self.is_draining:
            self._has_warned = True
            logger.warning("requests are answered 503: %s", error)
        if record.status:  # an answer now would stand in the middle of another one
            record.outcome = "error"
            exchange.cut()
            return None
        record.outcome = "refused" if answer.status < 500 else "shed" if answer.code == "overloaded" else "error"
        if exchange.path.startswith(MESSAGES):
            return error_response(answer, record.request_id)
        return answer.response()

    async def _respond(self, exchange: Exchange, record: RequestRecord, response: Response) -> None:
        """Send the response; a large one in pieces, as its client reads them."""
        timeout_s, is_large = self.config.write_timeout_s, len(response.body) > PIECE_BYTES

        async def send(cut: Callable[[], None]) -> None:
            with WriteMonitor(exchange, timeout_s=timeout_s, on_stuck=cut) as monitor:
                if not is_large or exchange.method == "HEAD":  # servers send no body for HEAD
                    await monitor.write(exchange.respond(response))
                    return
                headers = {**response.headers, "content-length": str(len(response.body))}
                await monitor.write(exchange.start(response.status, headers))
                await monitor.write_pieces(response.body)
                await monitor.write(exchange.end())

        if is_large:
            await run_while_connected(exchange, send)
        else:  # this waits while the client has not read its earlier responses
            await send(lambda: setattr(record, "outcome", "cut"))

    async def _work(self, exchange: Exchange, record: RequestRecord, route: Route) -> Response | None:
        """Handle a request of work, or refuse it before its body is read: there is no room, or the server drains."""
        if self.is_draining:
            raise unavailable("this server is being stopped", connection="close")
        if self._num_open >= self.config.concurrency_limit(self.engine.config, self.engine.num_engines):
            raise overloaded("all that may be served at once is (max_concurrent_requests); try again later", 1)
        self._num_open += 1
        try:
            if self.engine.health().status == "STARTING":  # waiting requests count among those served at once
                try:
                    with anyio.fail_after(START_TIMEOUT_S):
                        await self.engine.wait_started()
                except TimeoutError:
                    raise unavailable("the engine is still starting; try again later") from None
                except EngineClosed:
                    raise
                except Exception as error:  # its message may name files; the engine's starter gets it
                    raise unavailable("the engine could not be started") from error
            await turns_here().take()
            return await route.handler(exchange, record)
        finally:
            self._num_open -= 1

    async def _read(self, exchange: Exchange, kind: type[T]) -> T:
        return await self._bodies.read(exchange, kind, self.config.body_limit(self.engine.info.max_model_len))

    # Generating

    async def _generate(self, kind: type[Generation], exchange: Exchange, record: RequestRecord) -> Response | None:
        self.engine.check_accepting()  # before the body is read
        request = await self._read(exchange, kind)
        check_request(exchange, record, request)
        record.model = self._choose_model(request.model)
        return await self._call(exchange, record).answer(request)

    async def _count(
        self, kind: type[MessageRequest | ResponseRequest], exchange: Exchange, record: RequestRecord
    ) -> Response:
        request = await self._read(exchange, kind)
        record.model = self._choose_model(request.model)
        fields = {"object": "response.input_tokens"} if kind is ResponseRequest else {}
        return _json({**fields, "input_tokens": await self._call(exchange, record).count(request)})

    def _call(self, exchange: Exchange, record: RequestRecord) -> GenerationCall:
        return GenerationCall(self.engine, self.config, self._responses, exchange, record)

    async def _manage_response(self, exchange: Exchange, record: RequestRecord) -> Response:
        """Return or delete a stored response, or list the items of its input."""
        response_id, _, rest = exchange.path.removeprefix(RESPONSE_PREFIX).partition("/")
        owned, query = OwnedId(response_id, record.owner), dict(parse_qsl(exchange.query))
        if exchange.method == "DELETE":
            self._responses.delete(owned)
            return _json({"id": owned.id, "object": "response", "deleted": True})
        stored = self._responses.find(owned)
        if rest:
            return _json(input_page(owned.id, stored, query))
        if query.get("stream") == "true":
            raise unsupported("stream", "is for responses in the background, which are not supported; leave it out")
        return Response(200, stored.body, JSON_HEADERS)

    async def _abort(self, exchange: Exchange, record: RequestRecord) -> Response:
        request = await self._read(exchange, AbortRequest)
        ids = [*(request.request_ids or ()), *([request.request_id] if request.request_id is not None else ())]
        if not ids:
            raise missing("request_id")
        if len(ids) > MAX_ABORTED:
            raise invalid_value("request_ids", f"request_ids has {len(ids):,}; at most {MAX_ABORTED:,} at once")
        if self._others is not None:
            self._others.abort(ids)
        await self.abort(ids)
        return _json({"request_ids": ids})

    # Text

    async def _tokenize(self, exchange: Exchange, record: RequestRecord) -> Response:
        request = await self._read(exchange, TokenizeRequest)
        record.model = self._choose_model(request.model)
        if is_given(request.messages) == is_given(request.prompt):
            raise invalid_value("prompt", "give either prompt or messages")
        is_chat, max_messages = is_given(request.messages), self.config.max_messages
        prompt: Any = read_messages(request.messages, max_messages) if is_chat else read_text(request.prompt, "prompt")
        add, kwargs, tools = request.add_special_tokens, template_kwargs(request), read_tools(request.tools)
        ids = await run_while_connected(
            exchange,
            lambda _: self.engine.tokenize(prompt, add_special_tokens=add, chat_template_kwargs=kwargs, tools=tools),
        )
        max_model_len = self.engine.info.max_model_len
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_model_len, "token_strs": None}
        if request.return_token_strs:
            if len(ids) > MAX_TOKEN_STRS:
                message = f"return_token_strs is for at most {MAX_TOKEN_STRS:,} tokens, and these are {len(ids):,}"
                raise invalid_value("return_token_strs", message)
            answer["token_strs"] = self.engine.get_tokenizer().convert_ids_to_tokens(ids)
        body = b'%b,"tokens":%b}' % (msgspec.json.encode(answer)[:-1], await encode_ids(ids))
        return Response(200, body, JSON_HEADERS)

    async def _detokenize(self, exchange: Exchange, record: RequestRecord) -> Response:
        request = await self._read(exchange, DetokenizeRequest)
        record.model = self._choose_model(request.model)
        ids = read_tokens(request.tokens, max(MAX_DETOKENIZED, self.engine.info.max_model_len))
        try:
            text = await run_while_connected(exchange, lambda _: self.engine.detokenize(ids, skip_special_tokens=False))
        except InvalidRequest as error:
            raise api_error_of(error, param_names={"token_ids": "tokens"}) from error
        return _json({"prompt": text})

    def _describe_tokenizer(self) -> Response:
        if not self.config.enable_tokenizer_info_endpoint:
            message = "/tokenizer_info is off: start the server with --enable-tokenizer-info-endpoint"
            raise ApiError(404, "not_found", message)
        return _json(self.engine.tokenizer_info())

    # Information

    async def _models(self, exchange: Exchange, record: RequestRecord) -> Response:
        """One model, or the list of all."""
        self._check_alive()
        if (name := exchange.path.removeprefix(MODEL_PREFIX)) != exchange.path:
            return _json(self._describe_model(self._choose_model(name)))
        names = self.model_names
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return _json({"object": "list", "data": [self._describe_model(name) for name in names], **ends})

    async def _health(self, exchange: Exchange, record: RequestRecord) -> Response:
        """200 while the engine is alive and the server does not drain; else 503, with the status."""
        try:
            health = self.engine.health()
        except AioEngineError:
            record.outcome = "error"
            return _json({"status": "DEAD", "reason": "the engine has not been started"}, 503)
        state: dict[str, Any] = {
            "status": health.status,
            "running": health.running,
            "waiting": health.waiting,
            "is_paused": health.is_paused,
            "is_sleeping": health.is_sleeping,
            "is_draining": self.is_draining,
        }
        if (others := self._others) is not None:
            state["servers"] = {"serving": others.num_serving, "wanted": others.num_servers}
        if health.status == "STALLED":
            state.update(reason=health.reason, step_age_s=round(health.step_age_s, 3))
        is_well = health.status == "ALIVE" and not self.is_draining
        record.outcome = "ok" if is_well else "error"
        return _json(state, 200 if is_well else 503)

    async def _metrics(self, exchange: Exchange, record: RequestRecord) -> Response:
        numbers = await self.own_numbers(has_engine=self._others is None)
        if self._others is not None:
            numbers = await self._others.add_up(numbers)
        content_type = content_type_for(exchange.headers.get("accept", ""))
        body = await anyio.to_thread.run_sync(encode, numbers.families, content_type, limiter=self._rendering.get())
        return Response(200, body, {"content-type": content_type})

    def _describe_version(self) -> Response:
        self._check_alive()
        return _json({"version": aioengine.__version__})

    async def _load(self, exchange: Exchange, record: RequestRecord) -> Response:
        stats, num_open = self.engine.stats(), self._num_open
        if self._others is not None:
            num_open = (await self._others.add_up(await self.own_numbers())).num_open
        load = {"running": stats.running, "waiting": stats.waiting, "kv_cache_usage": stats.kv_cache_usage}
        return _json({"server_load": num_open, **load})

    @cached_property
    def _openapi(self) -> dict[str, Any]:
        """The OpenAPI document; made at its first use, since it takes 20 ms."""
        routes = (route for routes in self._routes.values() for route in routes.values())
        return make_document(((route.method, route.path, route.body) for route in routes), self.config)

    async def _make(self, make: Callable[[], Response], exchange: Exchange, record: RequestRecord) -> Response:
        """The response that ``make`` returns, for a route that looks at nothing of its request."""
        return make()

    def _check_alive(self) -> None:
        """Raise if the engine is dead or closed, so that a request to any path reports it."""
        if self.engine.health().status == "DEAD":
            self.engine.check_accepting()  # raises EngineClosed if it was closed, which is no failure
            raise EngineDead("the engine has stopped working")


def _template_of(path: str) -> str:
    """The path of the route for a request's path; without one, the path itself."""
    if path.startswith(MODEL_PREFIX) and path != MODEL_PREFIX:
        return MODEL_PATH
    if path.startswith(RESPONSE_PREFIX) and path not in (COUNT_PATH, COMPACT_PATH):
        response_id, _, rest = path.removeprefix(RESPONSE_PREFIX).partition("/")
        if response_id and rest in ("", "input_items"):
            return f"{RESPONSE_PATH}/{rest}".removesuffix("/")
    return path


def _json(value: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(value), JSON_HEADERS)
