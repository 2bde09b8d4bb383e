"""The demo's table and views."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from deploy.demo.prompts import demo_prompts
from deploy.demo.table import ROWS, first_gap_rest_ms, rest_text, size_text, table_of
from deploy.demo.view import LineView, PanelView, view_on
from pdserve.response import Finished, Timings, Usage
from pdserve.sampling import FinishReason

TIMINGS = Timings(
    ttft_ms=100.0,
    queue_ms=1.0,
    reserve_ms=2.0,
    dispatch_ms=0.5,
    prefill_queue_ms=3.0,
    prefill_ms=90.0,
    relay_ms=1.5,
    rest_ms=2.0,
    first_gap_ms=40.0,
    transfer_exposed_ms=5.0,
    commit_ms=1.0,
    decode_queue_ms=2.0,
    decode_step_ms=30.0,
    itl_p50_ms=25.0,
    itl_p99_ms=45.0,
    total_ms=900.0,
)


def finished(timings: Timings = TIMINGS) -> Finished:
    return Finished(
        choice=0,
        reason=FinishReason.LENGTH,
        usage=Usage(num_prompt_tokens=1204, num_cached_tokens=16, num_completion_tokens=60),
        timings=timings,
        num_attempts=1,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        kv_bytes=27_000_000,
        transport="stream",
    )


def test_the_parts_shown_add_up_to_the_time_to_first_token() -> None:
    names = list(ROWS)
    parts = []
    for name in names[names.index("time to first token") + 1 :]:
        if not name.startswith(" "):
            break
        parts.append(float(ROWS[name](finished()).split()[0]))
    assert sum(parts) == pytest.approx(100.0)


def test_a_rest_is_marked_only_if_it_is_neither_small_nor_tiny() -> None:
    def text(ttft_ms: float, rest_ms: float) -> str:
        return rest_text(finished(Timings(ttft_ms=ttft_ms, rest_ms=rest_ms)))

    assert text(100.0, 4.0) == "4.0 ms (4.0%)"
    assert text(10.0, 1.5) == "1.5 ms (15.0%)"
    assert text(100.0, 6.0).endswith("!")
    assert text(0.0, 0.0) == "0.0 ms (0.0%)"


def test_the_rest_of_the_first_gap() -> None:
    assert first_gap_rest_ms(TIMINGS) == pytest.approx(2.0)


def test_sizes() -> None:
    assert size_text(0) == "0 KiB"
    assert size_text(368_640) == "360 KiB"
    assert size_text(27_000_000) == "25.7 MiB"


def test_lines_are_labelled_whole_and_complete() -> None:
    stream = io.StringIO()
    prompts = demo_prompts()
    with view_on(Console(file=stream, width=200), prompts) as view:
        for word in (
            "The sky is blue because of the way in which air scatters the light of the sun, ".split(" ") * 4
        ):
            view.add("chat", word + " ")
        view.add("long", "one\ntwo")
        view.end("chat", "60 tokens")
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"(chat      |completion|long      ) \| ", line) for line in lines)
    words = " ".join(
        line.split(" | ", 1)[1] for line in lines if line.startswith("chat") and "> " not in line
    )
    assert words.count("scatters") == 4
    assert "(60 tokens)" in words
    assert [line.split(" | ")[1] for line in lines if line.startswith("long")][1:] == ["one", "two"]


def test_panels_on_a_terminal_with_room_and_lines_elsewhere() -> None:
    prompts = demo_prompts()

    def view(*, tty: bool, width: int, height: int) -> object:
        console = Console(file=io.StringIO(), force_terminal=tty, width=width, height=height)
        with view_on(console, prompts) as found:
            return found

    assert isinstance(view(tty=True, width=100, height=40), PanelView)
    assert isinstance(view(tty=True, width=100, height=8), LineView)
    assert isinstance(view(tty=False, width=100, height=40), LineView)


def test_a_panel_shows_the_end_of_a_long_text_and_takes_it_literally() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    view = PanelView(console, demo_prompts())
    for count in range(300):
        view.add("chat", f"[bold]word{count} ")
    view.end("chat", "done")
    console.print(view.draw())
    assert "[bold]word299" in stream.getvalue()
    assert "word0 " not in stream.getvalue()


def test_the_table_has_a_column_a_stream() -> None:
    stream = io.StringIO()
    Console(file=stream, width=120).print(table_of({"chat": finished(), "long": finished()}))
    text = stream.getvalue()
    assert re.search(r"prompt tokens +1,204 +1,204", text)
    assert re.search(r"  over +stream +stream", text)


def test_one_prompt_is_long() -> None:
    long = demo_prompts()[2].input
    assert not isinstance(long, str | tuple)
    assert len(long.messages[0].content.split()) > 900
