"""Long texts don't hold up the other threads of a process: a router's event loop is one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pdserve.tokenizer import Tokenizer

TICK_S = 0.001
ENOUGH = 10  # of the hundred or more that fit; with the interpreter held there would be one or two
TEXT = "The sea was calm, and the ships lay still. " * 30_000


def ticks_during(call: Callable[[], object]) -> int:
    """How often this thread gets its turn while another one is in `call`."""
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        call()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    ticks = 0
    while not done.wait(TICK_S):
        ticks += 1
    thread.join()
    return ticks


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.fake()


def test_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    assert ticks_during(lambda: tokenizer.encode(TEXT)) >= ENOUGH


def test_while_many_ids_are_decoded(tokenizer: Tokenizer) -> None:
    ids = list(TEXT.encode())
    assert ticks_during(lambda: tokenizer.decode(ids)) >= ENOUGH
