"""Where the time of one choice went: the parts that TTFT sums up from, and the gaps between tokens.

All moments are the router's clock, in seconds, but for what workers report as durations of their own clocks.
inference.proto, message Timings, says from when to when each part runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.messages import DecodeStarted, FirstToken, SequenceFinished
from pdserve.percentile import percentile
from pdserve.request import Timings


@dataclass(slots=True, kw_only=True)
class AttemptTimes:
    """Moments of one attempt; None = it didn't come to that.

    local          the decode worker prefills
    prefilling_s   the prefill worker's first word of a chunk was read
    first_token_s  its FirstToken was read; started_s: D's verdict was
    """

    credit_held_s: float
    local: bool = False
    decode_written_s: float | None = None
    granted_s: float | None = None
    prefill_written_s: float | None = None
    prefilling_s: float | None = None
    first_token: FirstToken | None = None
    first_token_s: float | None = None
    started: DecodeStarted | None = None
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def first_seen_s(self) -> float | None:
        """The first token was read, from whom it came first."""
        seen = [moment for moment in (self.first_token_s, self.started_s) if moment is not None]
        return min(seen, default=None)

    @property
    def trip_s(self) -> float | None:
        """Both ways between here and the prefill worker."""
        if self.first_token is None or self.first_token_s is None or self.prefill_written_s is None:
            return None
        on_its_way_s = self.first_token_s - self.prefill_written_s
        return max(0.0, on_its_way_s - self.first_token.queue_s - self.first_token.prefill_s)

    def prefill_parts(self, read_s: float) -> tuple[float, float]:
        """Queue and prefill until the first token that was read at read_s."""
        if self.local:
            return (self.started.queue_s, self.started.prefill_s) if self.started is not None else (0.0, 0.0)
        if self.first_token is not None:
            return self.first_token.queue_s, self.first_token.prefill_s
        # D's verdict brought the token and P's own word never came (it is late, or P is gone): by this clock.
        written_s = self.prefill_written_s if self.prefill_written_s is not None else read_s
        begun_s = self.prefilling_s if self.prefilling_s is not None else written_s
        handed_s = 0.0
        if self.started is not None:
            handed_s = self.started.transfer_exposed_s + self.started.commit_s
        return begun_s - written_s, max(0.0, read_s - begun_s - handed_s)


class ChoiceTimes:
    """Collects the times of one choice over all its attempts. Event-loop thread only."""

    def __init__(self, received_s: float) -> None:
        self.received_s = received_s
        self.first_attempt: AttemptTimes | None = None  # the one whose token was shown first
        self.first_read_s: float | None = None  # that token was read from a worker's session
        self.first_written_s: float | None = None  # and taken out to the client
        self.started: DecodeStarted | None = None
        self.finished: SequenceFinished | None = None
        self._last_read_s: float | None = None
        self._gaps_s = array("d")

    def on_tokens(self, count: int, read_s: float, attempt: AttemptTimes) -> Sequence[float]:
        """So many tokens were read now.

        returns  the gaps that this adds
        """
        first_gap = len(self._gaps_s)
        for _ in range(count):
            if self._last_read_s is None:
                self.first_attempt, self.first_read_s = attempt, read_s
            else:
                self._gaps_s.append(read_s - self._last_read_s)
            self._last_read_s = read_s
        return self._gaps_s[first_gap:]

    def on_first_written(self, now_s: float) -> None:
        """The first token is on its way to the client."""
        if self.first_written_s is None:
            self.first_written_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Received to first token written."""
        return None if self.first_written_s is None else self.first_written_s - self.received_s

    @property
    def queue_s(self) -> float | None:
        """Received to credit held, of the attempt that gave the first token."""
        return None if self.first_attempt is None else self.first_attempt.credit_held_s - self.received_s

    @property
    def mean_gap_s(self) -> float | None:
        """Between two tokens; None = there were no two."""
        return sum(self._gaps_s) / len(self._gaps_s) if self._gaps_s else None

    def of_first_token(self, attempt: AttemptTimes) -> Timings | None:
        """What its time went into, if this attempt gave it and it is on its way to the client. Takes no time itself."""
        if self.first_attempt is not attempt or self.first_written_s is None:
            return None
        return Timings(**{f"{name}_ms": value * 1e3 for name, value in self._ttft_parts().items()})

    def timings(self, now_s: float) -> Timings:
        """All of them, in milliseconds."""
        ms = self._ttft_parts()
        started, finished = self.started, self.finished
        gaps = sorted(self._gaps_s)
        return Timings(
            **{f"{name}_ms": value * 1e3 for name, value in ms.items()},
            first_gap_ms=self._gaps_s[0] * 1e3 if gaps else 0.0,
            transfer_exposed_ms=started.transfer_exposed_s * 1e3 if started is not None else 0.0,
            commit_ms=started.commit_s * 1e3 if started is not None else 0.0,
            decode_queue_ms=finished.decode_queue_s * 1e3 if finished is not None else 0.0,
            decode_step_ms=finished.decode_step_s * 1e3 if finished is not None else 0.0,
            itl_p50_ms=percentile(gaps, 50) * 1e3,
            itl_p99_ms=percentile(gaps, 99) * 1e3,
            total_ms=(now_s - self.received_s) * 1e3,
        )

    def _ttft_parts(self) -> dict[str, float]:
        attempt, read_s, written_s = self.first_attempt, self.first_read_s, self.first_written_s
        if attempt is None or read_s is None or written_s is None:
            return {}
        prefill_queue_s, prefill_s = attempt.prefill_parts(read_s)
        # A worker that prefills itself counts its wait for blocks as part of its queue.
        reserve_s = 0.0 if attempt.local else _between(attempt.decode_written_s, attempt.granted_s)
        parts = {
            "queue": attempt.credit_held_s - self.received_s,
            "reserve": reserve_s,
            "dispatch": _between(attempt.granted_s, attempt.prefill_written_s),
            "prefill_queue": prefill_queue_s,
            "prefill": prefill_s,
            "relay": written_s - read_s,
        }
        ttft_s = written_s - self.received_s
        return {"ttft": ttft_s, **parts, "rest": ttft_s - sum(parts.values())}


def _between(begin_s: float | None, end_s: float | None) -> float:
    return 0.0 if begin_s is None or end_s is None else end_s - begin_s
