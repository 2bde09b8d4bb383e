"""Asking an API server as a test does: any verb, any path."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import kopf

Object = dict[str, Any]
MERGE = "application/merge-patch+json"


class Refused(Exception):
    """The answer was an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class KubeClient:
    """`async with KubeClient(connection) as client: …`"""

    def __init__(self, connection: kopf.ConnectionInfo) -> None:
        self._connection = connection
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._connection.as_ssl_context())
        headers = self._connection.as_http_headers()
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """The JSON of an answer. Raises Refused."""
        assert self._session is not None
        headers = {"Content-Type": kind} if body is not None else None
        url = self._connection.server + path
        async with self._session.request(method, url, json=body, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise Refused(answer.status, text)
            return json.loads(text) if text.startswith("{") else text

    async def get(self, path: str) -> Any:
        """One object or list; None: there is none."""
        try:
            return await self.ask("GET", path)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    async def items(self, path: str, selector: str = "") -> list[Object]:
        """Of a list."""
        found = await self.ask("GET", path + (f"?labelSelector={selector}" if selector else ""))
        return list(found["items"])

    async def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """A merge patch."""
        return await self.ask("PATCH", path, body, MERGE)

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Object]]:
        """(event, object) of all that is there and of all that happens then, until the server ends the watch."""
        assert self._session is not None
        listed = await self.ask("GET", path)
        for each in listed["items"]:
            yield "ADDED", each
        version = listed["metadata"]["resourceVersion"]
        url = f"{self._connection.server}{path}?watch=1&resourceVersion={version}"
        async with self._session.get(url) as answer:
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]

    async def watch_error(self, path: str, version: int) -> int:
        """The code with which a watch from that version on is answered. Raises AssertionError if it is an event."""
        assert self._session is not None
        url = f"{self._connection.server}{path}?watch=1&resourceVersion={version}"
        async with self._session.get(url) as answer:
            event = json.loads(await answer.content.readline())
        assert event["type"] == "ERROR", event
        return int(event["object"]["code"])
