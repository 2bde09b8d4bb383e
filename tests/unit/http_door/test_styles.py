"""How a model's text is taken apart: by settings, by its template, and what asking for that costs whom."""

from __future__ import annotations

import asyncio

import pytest

from http_door.reasoning.think import REASONING
from http_door.styles import KNOWN_FOR_S, KnownStyles, Styles, needs_model, styles_of
from http_door.tools.formats import FORMATS
from pdserve.errors import Overloaded
from pdserve.service.address import split_address
from pdserve.service.http_config import REASONING_PARSERS, TOOL_PARSERS, HttpConfig
from pdserve.status import ModelInfo
from tests.support.http_calls import request_bytes
from tests.support.virtual_clock import VirtualClock
from tests.unit.http_door.scripted import ScriptedBackend, ScriptedVisit, opened

MODEL = ModelInfo(
    model="m", window_tokens=1, vocab_size=1, eos_token_ids=(), has_chat_template=True, weights_fingerprint="",
    tokenizer_fingerprint="", tool_parser="hermes", reasoning_parser="think",
)  # fmt: skip


def test_settings_go_before_the_template() -> None:
    assert styles_of(HttpConfig(), MODEL) == Styles("hermes", "think")
    assert styles_of(HttpConfig(tool_parser="none", reasoning_parser="none"), None) == Styles()
    assert styles_of(HttpConfig(tool_parser="mistral"), MODEL) == Styles("mistral", "think")
    assert needs_model(HttpConfig(tool_parser="mistral"))
    assert not needs_model(HttpConfig(tool_parser="mistral", reasoning_parser="none"))


class AskedVisit(ScriptedVisit):
    """Tells of the model when the test lets it."""

    def __init__(self) -> None:
        super().__init__(ScriptedBackend())
        self.num_asked = 0
        self.may_tell = asyncio.Event()
        self.may_tell.set()

    async def model(self) -> ModelInfo:
        self.num_asked += 1
        await self.may_tell.wait()
        return MODEL


@pytest.mark.parametrize("parsers", ["auto", "none"])
async def test_the_model_is_asked_for_now_and_then(parsers: str) -> None:
    clock, visit = VirtualClock(), AskedVisit()
    styles = KnownStyles(HttpConfig(tool_parser=parsers, reasoning_parser=parsers), clock, 100)
    if parsers == "none":
        assert styles.current() == Styles()
        return
    assert styles.current() is None
    want = Styles("hermes", "think")
    assert await styles.ask(visit, 60) == want
    clock.advance(KNOWN_FOR_S / 2)
    assert (styles.current(), visit.num_asked) == (want, 1)
    clock.advance(KNOWN_FOR_S)
    assert styles.current() is None


async def test_one_caller_asks_again_while_the_others_go_on_with_what_is_known() -> None:
    clock, visit = VirtualClock(), AskedVisit()
    styles = KnownStyles(HttpConfig(), clock, 100)
    await styles.ask(visit, 60)
    clock.advance(KNOWN_FOR_S)
    visit.may_tell.clear()
    asking = asyncio.create_task(styles.ask(visit, 60))
    await asyncio.sleep(0)
    assert styles.current() == Styles("hermes", "think")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert styles.current() is None, "it has left: the next one asks"


async def test_bodies_that_wait_for_the_first_answer_are_bounded() -> None:
    visit = AskedVisit()
    styles = KnownStyles(HttpConfig(), VirtualClock(), 100)
    visit.may_tell.clear()
    first = asyncio.create_task(styles.ask(visit, 1000))  # one may wait, however large it is
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="wait for a worker"):
        await styles.ask(visit, 1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    both = [asyncio.create_task(styles.ask(visit, 50)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await styles.ask(visit, 1)
    visit.may_tell.set()
    assert await asyncio.gather(*both) == [Styles("hermes", "think")] * 2


async def test_a_client_that_leaves_while_the_model_is_asked_for_is_noticed() -> None:
    asked = asyncio.Event()

    class Silent(ScriptedBackend):
        async def model(self) -> ModelInfo:
            asked.set()
            await asyncio.Event().wait()
            return MODEL

    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    async with asyncio.timeout(30), opened(Silent()) as door:
        host, port = split_address(door.address)
        _, writer = await asyncio.open_connection(host, port)
        writer.write(request_bytes("POST", "/v1/chat/completions", body))
        await asked.wait()
        writer.close()
        await door.counts("pdserve_http_disconnects_total", 1, endpoint="/v1/chat/completions")


def test_the_settings_know_all_parsers() -> None:
    assert (set(TOOL_PARSERS), set(REASONING_PARSERS)) == (set(FORMATS), set(REASONING))
