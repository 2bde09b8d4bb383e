"""The live page in a real browser, by a door whose cluster the tests write."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import AsyncGenerator
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from http_door.page.serving import shows_page
from pdserve.block_messages import BlockCounts
from pdserve.errors import Unauthenticated
from pdserve.figures import RouterFigures, Spread
from pdserve.request import Event, GenerateRequest, Timings
from pdserve.service.config import load
from pdserve.status import (
    CandidateStatus,
    ClusterStatus,
    PairStatus,
    PlacementStatus,
    QueueStatus,
    WorkerStatus,
)
from tests.support.browser import browsing, needs_browser
from tests.support.http_calls import call
from tests.support.processes import LocalCluster
from tests.unit.http_door.scripted import STARTED, ScriptedBackend, finished, opened, tokens

TEXT = "document.body.innerText"


def worker(name: str, role: str) -> WorkerStatus:
    blocks = BlockCounts(free=5, granted=1, owned=2, cached=3, quarantined=0)
    return WorkerStatus(
        id=name, role=role, epoch="1.1", role_generation=0, state="up", blocks=blocks, num_running=1, num_waiting=0,
        num_queued_tokens=0, num_cache_hit_tokens=0, num_cache_query_tokens=0, metrics_address="", numerics="n",
        num_steps=1,
    )  # fmt: skip


def candidate(decode: str, reason: str, ms: float) -> CandidateStatus:
    return CandidateStatus(
        prefill_worker="p0",
        decode_worker=decode,
        chosen=reason == "chosen",
        reason=reason,
        cost=(("queue", ms),),
    )


TIMINGS = Timings(
    ttft_ms=127.5, queue_ms=2.0, reserve_ms=1.5, dispatch_ms=0.5, prefill_queue_ms=20.0, prefill_ms=100.0, relay_ms=0.5,
    rest_ms=3.0,
)  # fmt: skip
PARTS = "queue 2.0 + reserve 1.5 + dispatch 0.5 + prefill queue 20.0 + prefill 100.0 + relay 0.5 + rest 3.0 = 127.5 ms"
PLACED = PlacementStatus(
    request_id="req-1", choice=0, attempt=1, age_s=1.0, timings=TIMINGS,
    candidates=(
        candidate("d0", "chosen", 1.5),
        candidate("d1", "costs more", 9.5),
    ),
)  # fmt: skip
STATUS = ClusterStatus(
    router_id="router-7",
    draining=False,
    workers=(worker("p0", "prefill"), worker("d0", "decode"), worker("d1<b>", "decode")),
    pairs=(PairStatus(prefill_worker="p0", decode_worker="d0", up=True, transport="stream"),),
    queue=QueueStatus(num_waiting=3, num_waiting_tokens=4321, num_running=2, limit=64),
    placements=(PLACED,),
)


async def says_hello(request: GenerateRequest) -> AsyncGenerator[Event, None]:
    yield STARTED
    yield tokens("Hello <i>you</i>")
    yield finished()


@needs_browser
async def test_the_page_shows_the_cluster_and_a_worker_that_is_gone(tmp_path: Path) -> None:
    now = [STATUS]
    backend = ScriptedBackend(look=lambda: now[0])
    async with opened(backend) as door, browsing(f"http://{door.address}/", tmp_path) as page:
        await page.until(f"{TEXT}.includes('3 workers')")
        told = await page.value(TEXT)
        for wanted in ("router-7", "d1<b>", "3 of 64", "4,321", "p0 → d0: up over stream"):
            assert wanted in told
        assert "req-1: p0 → d0, first token after 127.5 ms" in told, (
            "of everyone's requests, not only the page's own"
        )
        assert "blocks: free 5, granted 1, owned 2, cached 3, quarantined 0" in told
        now[0] = replace(STATUS, workers=STATUS.workers[:2], pairs=())
        await page.until(f"/d1<b>\\s+decode\\s+gone for \\d+ s/.test({TEXT})")
        now[0] = replace(STATUS, workers=())
        await page.until(f"{TEXT}.includes('0 workers')")
        backend.look = None
        await page.until(f"{TEXT}.includes('No answer since')")
        backend.look = lambda: STATUS
        await page.until(f"{TEXT}.includes('3 workers') && !{TEXT}.includes('gone for')")


@needs_browser
async def test_the_page_shows_the_times_of_what_happened_meanwhile(tmp_path: Path) -> None:
    """Percentiles between two looks: of 100 values in one bucket the median lies in its middle."""

    def figures(num: int, at_s: float) -> RouterFigures:
        return RouterFigures(
            at_s=at_s,
            num_completion_tokens=num,
            ttft=Spread((0.1, 0.2), (0, num, 0)),
            gap=Spread((0.02, 0.04), (0, num, 0)),
            queued=Spread((0.001, 0.003), (0, num, 0)),
        )

    looks = itertools.count(1)
    backend = ScriptedBackend(
        look=lambda: replace(STATUS, figures=figures(100 * (at := next(looks)), float(at)))
    )
    async with opened(backend) as door, browsing(f"http://{door.address}/", tmp_path) as page:
        for what, median in (("first token", "150"), ("gap between tokens", "30.0"), ("queue", "2.0")):
            await page.until(f"/{what}\\s+{median}\\s/.test({TEXT})")
        await page.until(f"/tokens\\/s\\s+100\\.0/.test({TEXT})")


@needs_browser
async def test_the_page_by_keyboard_alone(tmp_path: Path) -> None:
    backend = ScriptedBackend(answer=says_hello, look=lambda: STATUS)
    async with opened(backend) as door, browsing(f"http://{door.address}/", tmp_path) as page:
        await page.until(f"{TEXT}.includes('req-1')")
        reached = []
        for _ in range(8):
            await page.press("Tab", 9)
            reached.append(await page.value("document.activeElement.id || document.activeElement.localName"))
            if reached[-1] == "summary":
                await page.press("Enter", 13, "\r")
                assert await page.value("document.querySelector('details').open")
                told = await page.value(TEXT)
                assert "costs more" in told and PARTS in told
            if reached[-1] == "text":
                break
        assert reached == ["a", "div", "summary", "said", "text"]
        await page.call("Input.insertText", text="hi")
        await page.press("Enter", 13, "\r")
        await page.until(f"{TEXT}.includes('Hello <i>you</i>') && {TEXT}.includes('first token')")
        await page.until("!document.getElementById('send').disabled")
        assert await page.value("document.getElementById('text').value") == ""
        assert await page.value("document.querySelector('details').open"), "what was open stays open"


@needs_browser
async def test_the_page_asks_for_a_key(tmp_path: Path) -> None:
    backend = ScriptedBackend(look=lambda: STATUS, refuses=Unauthenticated("an API key is needed"))
    async with opened(backend) as door, browsing(f"http://{door.address}/", tmp_path) as page:
        await page.until(
            f"{TEXT}.includes('wants an API key') && !document.getElementById('key-form').hidden"
        )
        backend.refuses = None
        await page.value("document.getElementById('key').focus()")
        await page.call("Input.insertText", text="pdk_secret")
        await page.press("Enter", 13, "\r")
        await page.until(f"{TEXT}.includes('3 workers')")
        assert ("authorization", "Bearer pdk_secret") in backend.calls[-1].metadata


@needs_browser
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)]
)
async def test_the_page_fits_wide_and_small_screens_in_both_schemes(
    tmp_path: Path, scheme: str, width: int
) -> None:
    async with (
        opened(ScriptedBackend(look=lambda: STATUS)) as door,
        browsing(f"http://{door.address}/", tmp_path) as page,
    ):
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        await page.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        await page.until(f"{TEXT}.includes('3 workers')")
        assert await page.value("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
        back = await page.value("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
        await page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000


@needs_browser
async def test_a_worker_of_a_real_cluster_dies_and_comes_back(tmp_path: Path) -> None:
    fake = ("--engine", "fake", "--engine.num-blocks", "64", "--prefill", "1", "--decode", "2")
    with LocalCluster(tmp_path, *fake) as cluster:
        async with browsing(f"{cluster.http}/", tmp_path) as page:
            await page.until(f"{TEXT}.includes('3 workers')")
            with cluster.nobody_restarted():  # else it may be back before the page looks again
                os.kill(cluster.row("decode", 1).pid, signal.SIGKILL)
                await page.until(f"/decode-1\\s+decode\\s+gone for/.test({TEXT})")
            await page.until(f"{TEXT}.includes('3 workers') && !{TEXT}.includes('gone for')")


async def test_the_files_need_nothing_from_elsewhere() -> None:
    for file in resources.files("http_door.page").iterdir():
        if file.name.endswith((".html", ".css", ".js")):
            assert not re.search(r"https?://|innerHTML|@import|url\(", file.read_text()), file.name
    async with opened(ScriptedBackend()) as door:
        page = await call(door.address, "/")
        assert page.status == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in re.findall(rb'(?:href|src)="(/[^"]+)"', page.body):
            assert (await call(door.address, path.decode())).status == 200


@pytest.mark.parametrize(
    ("address", "flags", "is_shown"),
    [
        ("127.0.0.1:0", {"cluster.insecure": True}, True),
        ("0.0.0.0:80", {"cluster.insecure": True}, False),
        ("0.0.0.0:80", {"cluster.insecure": True, "router.keys_file": "k"}, True),
        ("0.0.0.0:80", {}, True),  # which opens only where keys are asked for
    ],
)
async def test_strangers_without_a_key_get_no_page(
    address: str, flags: dict[str, object], is_shown: bool
) -> None:
    assert shows_page(load(flags=flags), address) is is_shown
    async with opened(ScriptedBackend(), shows_page=is_shown) as door:
        assert (await call(door.address, "/")).status == (200 if is_shown else 404)
