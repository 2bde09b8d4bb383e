"""`pdserve top`: a running cluster, live."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pdserve.cli.cluster_tables import BLOCK_STATES, headline, scaling_lines
from pdserve.cli.target import add_target, open_client
from pdserve.errors import InvalidRequest, PdserveError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from pdserve.figures import RouterFigures, Spread
    from pdserve.status import ClusterStatus, WorkerStatus

DESCRIPTION = """\
Shows a router's cluster and shows it again each interval: requests, tokens and KV transfers a second, percentiles of
the time to the first token, of the gaps between tokens and of waiting in the queue (of the last --window seconds, from
histograms: as fine as their buckets), each worker's load and blocks, each pair's transport. The first one has
nothing to compare with yet. Ctrl-C ends it. If standard output isn't a terminal, or with --json, it prints one line per
interval instead.
"""
_SHOWN = (50, 90, 99)
_TIMES = (("first token", "ttft"), ("gap", "gap"), ("queue", "queued"))
_WORKER = ("WORKER", "ROLE", "STATE", "RUN", "WAIT", "TOK", "FREE", "GRANT", "OWN", "CACHE", "QUAR", "HITS")
_LEAST_INTERVAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target and times."""
    add_target(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="ask so often (default 1)")
    parser.add_argument(
        "--window",
        type=float,
        default=10.0,
        metavar="S",
        help="rates and percentiles are of the last S s (default 10)",
    )
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after N answers")
    parser.add_argument("--json", action="store_true", help="one JSON object an interval")


def run(arguments: argparse.Namespace) -> int:
    """Until Ctrl-C, or --count. A router that doesn't answer later on is asked again; at first it is an error."""
    if not _LEAST_INTERVAL_S <= arguments.interval < math.inf:
        raise InvalidRequest(f"--interval must be at least {_LEAST_INTERVAL_S}", value=arguments.interval)
    if not arguments.interval <= arguments.window < math.inf:
        raise InvalidRequest("--window must be at least --interval", value=arguments.window)
    if arguments.count < 0:
        raise InvalidRequest("--count must not be negative", value=arguments.count)
    with open_client(arguments) as client:
        pause = threading.Event()  # nobody sets it: Ctrl-C ends a wait
        seen = polled(
            client.status, lambda: pause.wait(arguments.interval), arguments.window, arguments.count
        )
        try:
            if sys.stdout.isatty() and not arguments.json:
                _show(seen)
            else:
                _print(seen, json_line if arguments.json else text_line)
        except KeyboardInterrupt:
            return 130 if arguments.count else 0
    return 0


class Recent:
    """What happened in the last seconds: the newest figures of a router less those of a window before."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: deque[RouterFigures] = deque()

    def add(self, figures: RouterFigures) -> None:
        """The newest. A router that has begun again, or another one, begins a new window."""
        last = self._kept[-1] if self._kept else None
        if last is not None and (
            figures.at_s < last.at_s or figures.num_requests_ended < last.num_requests_ended
        ):
            self._kept.clear()
        self._kept.append(figures)
        while len(self._kept) > 2 and self._kept[1].at_s <= figures.at_s - self._window_s:
            self._kept.popleft()

    def rate(self, name: str) -> float:
        """A count of RouterFigures, by the second."""
        first, last = self._kept[0], self._kept[-1]
        took_s = last.at_s - first.at_s
        return (getattr(last, name) - getattr(first, name)) / took_s if took_s > 0 else 0.0

    def spread(self, name: str) -> Spread:
        """A histogram of RouterFigures."""
        last: Spread = getattr(self._kept[-1], name)
        return last.since(getattr(self._kept[0], name))

    @property
    def link_bytes_s(self) -> float:
        """KV bytes by the second in which KV arrived; 0: none did."""
        busy_s = self.rate("kv_transfer_s")
        return self.rate("num_kv_bytes") / busy_s if busy_s > 0 else 0.0


Poll = tuple["ClusterStatus", Recent, str]


def polled(
    ask: Callable[[], ClusterStatus], wait: Callable[[], object], window_s: float, count: int = 0
) -> Iterator[Poll]:
    """The newest answer, and in words why there is no newer one; count answers, 0 = for ever.

    Raises what the first question raises.
    """
    recent = Recent(window_s)
    status = ask()
    num_answers = 0
    problem = ""
    while True:
        if not problem:
            recent.add(status.figures)
            num_answers += 1
        yield status, recent, problem
        if num_answers == count:
            return
        wait()
        try:
            status, problem = ask(), ""
        except PdserveError as error:
            problem = f"no answer: {' '.join(str(error).split())}"


def _print(seen: Iterator[Poll], line: Callable[[ClusterStatus, Recent], str]) -> None:
    for status, recent, problem in seen:
        if problem:
            print(problem, file=sys.stderr, flush=True)
        else:
            print(line(status, recent), flush=True)


def to_json(status: ClusterStatus, recent: Recent) -> dict[str, Any]:
    """The object that --json prints; times in ms, null where nothing was measured."""
    return {
        "router": status.router_id,
        "workers": {worker.id: worker.state for worker in status.workers},
        "pairs_up": sum(pair.up for pair in status.pairs),
        "running": status.queue.num_running,
        "waiting": status.queue.num_waiting,
        "requests_s": round(recent.rate("num_requests_ended"), 3),
        "refused_s": round(recent.rate("num_requests_refused"), 3),
        "failed_s": round(recent.rate("num_requests_failed"), 3),
        "tokens_s": round(recent.rate("num_completion_tokens"), 3),
        "prompt_tokens_s": round(recent.rate("num_prompt_tokens"), 3),
        "kv_bytes_s": round(recent.rate("num_kv_bytes"), 3),
        **{
            f"{name}_ms": {f"p{percent}": _ms(recent.spread(name).percentile(percent)) for percent in _SHOWN}
            for _, name in _TIMES
        },
    }


def json_line(status: ClusterStatus, recent: Recent) -> str:
    """One JSON object."""
    return json.dumps(to_json(status, recent), ensure_ascii=False)


def _ms(seconds: float | None) -> float | None:
    """None too for what is above all buckets: JSON has no infinity."""
    return None if seconds is None or math.isinf(seconds) else round(seconds * 1e3, 3)


def text_line(status: ClusterStatus, recent: Recent) -> str:
    """What changes, for people."""
    return (
        f"{_up(status)}, {status.queue.num_running} running, {status.queue.num_waiting} waiting, "
        f"{_rates(recent)}, TTFT {_percentiles(recent.spread('ttft'))}, gaps {_percentiles(recent.spread('gap'))}"
    )


def _up(status: ClusterStatus) -> str:
    num_up = sum(worker.state == "up" for worker in status.workers)
    return f"{num_up} of {len(status.workers)} workers up"


def _rates(recent: Recent) -> str:
    return ", ".join(
        f"{recent.rate(name):,.1f} {unit}"
        for name, unit in (
            ("num_requests_ended", "requests/s"),
            ("num_requests_refused", "refused/s"),
            ("num_requests_failed", "failed/s"),
            ("num_prompt_tokens", "prompt tok/s"),
            ("num_completion_tokens", "tok/s"),
        )
    )


def _percentiles(spread: Spread) -> str:
    return " ".join(f"p{percent} {_time(spread.percentile(percent), spread)}" for percent in _SHOWN)


def _time(seconds: float | None, spread: Spread) -> str:
    if seconds is None:
        return "–"
    if math.isinf(seconds):
        return f"> {spread.bounds_s[-1]:g} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _show(seen: Iterator[Poll]) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        for status, recent, problem in seen:
            live.update(screen(status, recent, problem), refresh=True)


def screen(status: ClusterStatus, recent: Recent, problem: str = "") -> RenderableType:
    """All of it, for a terminal of 80 columns or more."""
    from rich.console import Group
    from rich.text import Text

    hand_offs = f", {recent.link_bytes_s / 1e6:,.0f} MB/s while hand-offs run" if recent.link_bytes_s else ""
    parts: list[RenderableType] = [
        Text(each) for each in (headline(status), *scaling_lines(status), _rates(recent))
    ]
    parts.append(Text(f"KV shipped {recent.rate('num_kv_bytes') / 1e6:,.1f} MB/s{hand_offs}"))
    if problem:
        parts.append(Text(problem, style="bold red"))
    spreads = [(title, recent.spread(name)) for title, name in _TIMES]
    rows = [
        (title, *(_time(each.percentile(percent), each) for percent in _SHOWN)) for title, each in spreads
    ]
    parts += [Text(), _columns(("TIME", *(f"P{percent}" for percent in _SHOWN)), 1, rows)]
    parts += [Text(), _columns(_WORKER, 3, [_worker_row(worker) for worker in status.workers])]
    pairs = [
        (pair.prefill_worker, pair.decode_worker, pair.transport if pair.up else f"down: {pair.reason}")
        for pair in status.pairs
    ]
    parts += [Text(), _columns(("PREFILL", "DECODE", "TRANSPORT"), 3, pairs)]
    return Group(*parts)


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    blocks = [getattr(worker.blocks, state) for state in BLOCK_STATES]
    load = (worker.num_running, worker.num_waiting, worker.num_queued_tokens)
    asked = worker.num_cache_query_tokens
    hits = f"{worker.num_cache_hit_tokens / asked:.0%}" if asked else "–"
    return (worker.id, worker.role, worker.state, *map(str, (*load, *blocks)), hits)


def _columns(headings: tuple[str, ...], num_left: int, rows: Sequence[tuple[str, ...]]) -> Table:
    """A table without lines; the first columns are flush left."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < num_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
