"""What an engine owner says at the end of its turns besides answers: step counter, load, cache changes, counts."""

from __future__ import annotations

from pdserve.clock import Clock
from pdserve.engine.block_pool import BlockPool
from pdserve.messages import Load
from pdserve.owner import Post
from pdserve.worker.messages import CacheChanged, CoreCounts, EngineBeat, ToAll
from pdserve.worker.metered_runner import MeteredRunner

_LOAD_EVERY_S = 0.05


class Reporter:
    """Keeps the loop informed without flooding it. Engine owner only."""

    def __init__(
        self, pool: BlockPool, meter: MeteredRunner, to_loop: Post, clock: Clock, heartbeat_s: float
    ) -> None:
        self._pool = pool
        self._meter = meter
        self._to_loop = to_loop
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._beat: EngineBeat | None = None
        self._load: Load | None = None
        self._load_at_s = 0.0
        self._load_is_old = False
        self._next_beat_s = clock.now_s() + heartbeat_s
        self._counts: CoreCounts | None = None

    def heartbeat_due(self) -> bool:
        """Whether a heartbeat has passed since this last said so."""
        now_s = self._clock.now_s()
        if now_s < self._next_beat_s:
            return False
        self._next_beat_s = now_s + self._heartbeat_s
        self._beat = None  # the next one is said even if nothing has changed: this owner lives
        return True

    def wait_s(self) -> float:
        """Until something here is due."""
        due_s = self._next_beat_s
        if self._load_is_old:
            due_s = min(due_s, self._load_at_s + _LOAD_EVERY_S)
        return max(due_s - self._clock.now_s(), 0.001)

    def count(self, counts: CoreCounts) -> None:
        """Report totals, at most once a heartbeat by the caller's choice."""
        if counts != self._counts:
            self._counts = counts
            self._to_loop(counts)

    def end_turn(self, *, has_work: bool, load: Load) -> None:
        """The turn is over: pass on what changed."""
        beat = EngineBeat(self._meter.num_steps, has_work, self._meter.step_s)
        if beat != self._beat:
            self._beat = beat
            self._to_loop(beat)
        self._load_is_old = load != self._load
        if self._load_is_old and self._clock.now_s() >= self._load_at_s + _LOAD_EVERY_S:
            self._load = load
            self._load_at_s = self._clock.now_s()
            self._load_is_old = False
            self._to_loop(ToAll(load))
        changes = self._pool.take_events()
        if changes:
            self._to_loop(CacheChanged(tuple((kind == "stored", block_hash) for kind, block_hash in changes)))
