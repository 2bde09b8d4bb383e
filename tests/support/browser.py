"""A real browser for tests of pages: Debian's chromium-headless-shell, spoken to by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.waiting import until

PROGRAM = shutil.which("chromium-headless-shell")
LIMIT_S = 60.0

needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="apt-get install --no-install-recommends chromium-headless-shell"
)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol, and its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(LIMIT_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message["error"]
                    return message["result"]

    async def value(self, expression: str) -> Any:
        """Of an expression in the page, a promise awaited."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Return when an expression in the page is true."""
        look = f"const look = () => ({condition}) ? done(true) : setTimeout(look, 50)"
        await self.value(f"new Promise((done) => {{ {look}; look(); }})")

    async def press(self, key: str, code: int, text: str = "") -> None:
        """One key."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        made = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))


@contextlib.asynccontextmanager
async def browsing(url: str, folder: Path, *, width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
    """The page at a URL, in a browser of its own; folder: for what it keeps."""
    assert PROGRAM is not None
    kept = folder / "browser"
    process = subprocess.Popen(
        [
            PROGRAM, "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={kept}",
            f"--window-size={width},{height}", "about:blank",
        ],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        told = kept / "DevToolsActivePort"

        async def listens() -> bool:
            assert process.poll() is None, "the browser has ended"
            return told.is_file() and "\n" in told.read_text()

        await until("a browser that listens", listens)
        port = told.read_text().split("\n", 1)[0]
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                target = await answer.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                page = Page(socket)
                await page.call("Page.enable")
                await page.call("Page.navigate", url=url)
                await page.until("document.readyState === 'complete' && document.body !== null")
                yield page
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its helpers as well
        process.wait()
