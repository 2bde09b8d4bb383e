"""The HTTP door: paths, who may come in, bodies, and errors; each endpoint's own form is in a file of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import structlog
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from http_door.answer import HttpAnswer, Json, Occasion
from http_door.body import ClientGone, check_announced, read_all
from http_door.chat import ChatAnswer, ChatFields
from http_door.completions import CompletionAnswer, CompletionFields
from http_door.connection import Connection, OpenConnections
from http_door.errors import HttpRefusal, reply_to
from http_door.event_stream import COMMENT_S
from http_door.fields import TextFields, read_body
from http_door.generating import give_stream, give_whole
from http_door.looking import model_card, models, version
from http_door.metrics import HttpMetrics
from http_door.page.serving import page_routes
from http_door.port import KEY_HEADER, METADATA, Backend, Call, Purpose, Visit
from http_door.responses import ResponseAnswer, ResponseFields
from http_door.styles import KnownStyles, Styles
from http_door.texts import DetokenizeFields, TokenizeFields, detokenize, tokenize
from pdserve.clock import Clock
from pdserve.errors import Code, PdserveError, primary
from pdserve.fields import plain_header, plain_id
from pdserve.ids import Random, draw_text_id
from pdserve.service.config import Config
from pdserve.service.receiving import Receiving

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

log = structlog.get_logger()

_CLOSE = {"connection": "close"}  # after a body that wasn't read
# What these call the fields that errors name as completions have them.
_NAMES = {
    "/v1/chat/completions": {"prompt": "messages", "logprobs": "top_logprobs"},
    "/v1/responses": {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What all endpoints share. receiving: where bodies come in; begun_s: since 1970;
    comment_s: how long a stream may be silent before a comment."""

    backend: Backend
    config: Config
    clock: Clock
    random: Random
    metrics: HttpMetrics
    receiving: Receiving
    begun_s: int
    styles: KnownStyles
    shows_page: bool = False  # at /: not where strangers could read it without a key
    comment_s: float = COMMENT_S
    open: OpenConnections = field(default_factory=OpenConnections)

    async def take(self, call: Exchange) -> bytes:
        """The body of a call that was let in. Raises HttpRefusal, Overloaded, ClientGone."""
        most = self.config.http.max_body_bytes
        check_announced(call.headers.get("content-length"), most)
        stall_s = self.config.timeouts.client_stall_s
        return await self.receiving.take(lambda: read_all(call.receive, most, stall_s), call.visit.asker)

    async def read(self, call: Exchange, raw: bytes, kind: type[B], make: Callable[[B], T]) -> T:
        """What is made of a body. Raises HttpRefusal, Overloaded."""
        strict = self.config.http.unknown_fields == "refuse"
        return await call.visit.read(lambda: make(read_body(raw, kind, refuses_unknown=strict)), len(raw))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call: who asks, its headers and body, where the answer goes. names: see `reply_to`; the body adds its own."""

    visit: Visit
    scope: Scope
    headers: Headers
    receive: Receive
    client: Connection
    names: dict[str, str]


_Handle = Callable[[Door, Exchange], Awaitable[None]]


class Endpoint:
    """One path, as an ASGI app: lets a call in, has it answered, and turns errors into answers."""

    def __init__(self, door: Door, path: str, purpose: Purpose, handle: _Handle) -> None:
        self._door = door
        self._path = path
        self._purpose = purpose
        self._handle = handle
        self._names: Mapping[str, str] = _NAMES.get(path, {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, names = Connection(receive, send), dict(self._names)
        status = "gone"
        try:
            with (
                self._door.open.counted(client),
                self._door.backend.visit(call_of(scope, self._purpose)) as visit,
            ):
                call = Exchange(visit, scope, Headers(scope=scope), receive, client, names)
                await self._handle(self._door, call)
            status = str(client.status)
        except ClientGone:
            self._door.metrics.disconnects.labels(endpoint=self._path).inc()
        except Exception as error:  # the outermost frame of a request
            status = await self._refuse(error, client, names)
        finally:
            self._door.metrics.requests.labels(endpoint=self._path, status=status).inc()

    async def _refuse(self, error: Exception, client: Connection, names: Mapping[str, str]) -> str:
        found: BaseException = primary(error) if isinstance(error, ExceptionGroup) else error
        if not isinstance(found, PdserveError):
            name = draw_text_id(self._door.random, "error")
            log.error("http.failed", path=self._path, error_id=name, exc_info=error)
            found = HttpRefusal(500, f"internal error, in the server's log as {name}")
        elif found.code is Code.INTERNAL and not isinstance(found, HttpRefusal):
            log.error("http.failed", path=self._path, error=type(found).__name__, details=str(found))
        if client.status:
            raise error  # in the middle of an answer: the server closes the connection
        reply = reply_to(found, names)
        await client.answer(reply.status, reply.body, {**reply.headers, **_CLOSE})
        return str(reply.status)


def call_of(scope: Scope, purpose: Purpose) -> Call:
    """What a backend is told of an HTTP request.

    A trace that can't go on is left out, since it is no reason to refuse a request; a key is for the backend to judge.
    """
    headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    metadata = tuple(
        (name, value)
        for name, value in headers
        if name in METADATA and (name == KEY_HEADER or plain_header(value))
    )
    peer = scope.get("client")
    return Call(purpose, metadata, "" if peer is None else str(peer[0]))


def _generate(
    fields: type[TextFields], answer_of: Callable[[Any, Occasion], HttpAnswer], *, takes_apart: bool
) -> _Handle:
    """takes_apart: tool calls and reasoning are told from the text."""

    async def handle(door: Door, call: Exchange) -> None:
        given = call.headers.get("x-request-id", "")
        drawn = given if given and not plain_id(given) else draw_text_id(door.random, "req")
        now_s = door.clock.wall_ns() // 1_000_000_000
        raw = await door.take(call)
        styles = await _styles(door, call, len(raw)) if takes_apart else Styles()

        def make(body: TextFields) -> tuple[HttpAnswer, str]:
            call.names.update(body.names())
            request_id = body.request_id or drawn
            occasion = Occasion(request_id=request_id, created_s=now_s, random=door.random, styles=styles)
            return answer_of(body, occasion), request_id

        answer, request_id = await door.read(call, raw, fields, make)
        del raw  # an answer may take minutes, and nothing counts it any more
        told = {"x-request-id": request_id}
        if answer.streams:
            await give_stream(
                answer,
                call.visit,
                call.client,
                told,
                door.metrics,
                comment_s=door.comment_s,
                names=call.names,
            )
        else:
            await give_whole(answer, call.visit, call.client, told)

    return handle


async def _styles(door: Door, call: Exchange, num_bytes: int) -> Styles:
    """num_bytes: of the body, which waits meanwhile: only behind it can be seen that the client leaves."""
    known = door.styles.current()
    if known is None:
        async with call.client.while_there():
            known = await door.styles.ask(call.visit, num_bytes)
    return known


def _ask(kind: type[B], ask: Callable[[B, Visit], Awaitable[Json]]) -> _Handle:
    async def handle(door: Door, call: Exchange) -> None:
        body = await door.read(call, await door.take(call), kind, lambda body: body)
        async with call.client.while_there():
            told = await ask(body, call.visit)
        await call.client.answer(200, msgspec.json.encode(told), {})

    return handle


def _look(look: Callable[[Door, Exchange], Awaitable[Json]]) -> _Handle:
    async def handle(door: Door, call: Exchange) -> None:
        await call.client.answer(200, msgspec.json.encode(await look(door, call)), {})

    return handle


async def _models(door: Door, call: Exchange) -> Json:
    return await models(call.visit, door.begun_s)


async def _status(door: Door, call: Exchange) -> Json:
    told: Json = msgspec.to_builtins(await call.visit.status(explain=True))
    return told


async def _model_card(door: Door, call: Exchange) -> Json:
    return await model_card(call.visit, call.scope["path_params"]["name"], door.begun_s)


def make_app(door: Door) -> ASGIApp:
    """All paths."""

    def route(path: str, purpose: Purpose, method: str, handle: _Handle) -> Route:
        return Route(path, Endpoint(door, path, purpose, handle), methods=[method])

    async def health(request: Request) -> Response:
        reasons = door.backend.not_ready()
        return Response("".join(f"{reason}\n" for reason in reasons) or "ok\n", 503 if reasons else 200)

    async def metrics(request: Request) -> Response:
        try:
            page = door.backend.metrics(call_of(request.scope, Purpose.LOOK))
        except PdserveError as error:
            reply = reply_to(error)
            return Response(reply.body, reply.status, reply.headers, "application/json")
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def version_page(request: Request) -> Response:
        return Response(msgspec.json.encode(version()), media_type="application/json")

    completions = _generate(CompletionFields, CompletionAnswer, takes_apart=False)
    chats = _generate(ChatFields, ChatAnswer, takes_apart=True)
    responses = _generate(ResponseFields, ResponseAnswer, takes_apart=True)
    routes = [
        route("/v1/completions", Purpose.GENERATE, "POST", completions),
        route("/v1/chat/completions", Purpose.GENERATE, "POST", chats),
        route("/v1/responses", Purpose.GENERATE, "POST", responses),
        route("/v1/models", Purpose.LOOK, "GET", _look(_models)),
        route("/v1/models/{name:path}", Purpose.LOOK, "GET", _look(_model_card)),
        route("/status", Purpose.LOOK, "GET", _look(_status)),
        route("/tokenize", Purpose.TEXT, "POST", _ask(TokenizeFields, tokenize)),
        route("/detokenize", Purpose.TEXT, "POST", _ask(DetokenizeFields, detokenize)),
        Route("/version", version_page),
        Route("/health", health),
        Route("/metrics", metrics),
        *page_routes(is_shown=door.shows_page),
    ]
    router = Router(routes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Starlette's own application puts two functions around `send`, which each token would go through."""
        scope["app"] = app  # so that the router raises what it doesn't know
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            await _unknown(str(scope["path"]), error)(scope, receive, send)

    return app


def _unknown(path: str, error: HTTPException) -> Response:
    """404 and 405, in OpenAI's form."""
    found = reply_to(HttpRefusal(error.status_code, error.detail, path=path[:200]))
    headers = {**found.headers, **(error.headers or {})}
    return Response(found.body, found.status, headers, "application/json")
