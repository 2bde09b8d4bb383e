"""Where the page is served, and to whom: it holds nothing itself, and asks with the key that its reader gives it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from http_door.errors import HttpRefusal, reply_to
from pdserve.service.address import is_loopback
from pdserve.service.config import Config

_FILES = {"/": "page.html", "/page/page.css": "page.css", "/page/page.js": "page.js"}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def shows_page(config: Config, address: str) -> bool:
    """Whether a door at this address has the page: not where strangers could read it without a key."""
    return is_loopback(address) or bool(config.router.keys_file) or not config.cluster.insecure


def page_routes(*, is_shown: bool) -> list[Route]:
    """All of its files, read once, here."""
    folder = resources.files("http_door.page")
    return [
        Route(
            path,
            _serve((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]]) if is_shown else _refuse,
        )
        for path, name in _FILES.items()
    ]


def _serve(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return Response(content, 200, _HEADERS, kind)

    return serve


async def _refuse(request: Request) -> Response:
    reply = reply_to(
        HttpRefusal(404, "the page isn't shown at an address that strangers reach without a key")
    )
    return Response(reply.body, reply.status, reply.headers, "application/json")
