"""What is broken when, and for whom: the only excuse that an attempt has to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class Effect:
    """One thing that is broken. workers, routers: ids; links: (one end, the other); sessions: (worker, router)."""

    what: str
    begun_s: float
    workers: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    sessions: tuple[tuple[str, str], ...] = ()
    ended_s: float | None = None

    def touches(self, prefill: str, decode: str, router: str) -> bool:
        """Whether an attempt on this pair, conducted there, may suffer from it."""
        return (
            prefill in self.workers
            or decode in self.workers
            or router in self.routers
            or any(router == its and worker in (prefill, decode) for worker, its in self.sessions)
            or any({prefill, decode} == {one, other} for one, other in self.links)
        )


class Ledger:
    """All effects of one run. aftermath_s: how long after its end an effect may still be felt."""

    def __init__(self, now_s: Callable[[], float], aftermath_s: float) -> None:
        self.effects: list[Effect] = []
        self._now_s = now_s
        self._aftermath_s = aftermath_s

    def begin(
        self,
        what: str,
        *,
        workers: Iterable[str] = (),
        routers: Iterable[str] = (),
        links: Iterable[tuple[str, str]] = (),
        sessions: Iterable[tuple[str, str]] = (),
    ) -> Effect:
        """Something breaks now."""
        effect = Effect(
            what=what,
            begun_s=self._now_s(),
            workers=tuple(workers),
            routers=tuple(routers),
            links=tuple(links),
            sessions=tuple(sessions),
        )
        self.effects.append(effect)
        return effect

    def end(self, effect: Effect) -> None:
        """It is mended now."""
        effect.ended_s = self._now_s()

    @contextmanager
    def effect(
        self,
        what: str,
        *,
        workers: Iterable[str] = (),
        routers: Iterable[str] = (),
        links: Iterable[tuple[str, str]] = (),
        sessions: Iterable[tuple[str, str]] = (),
    ) -> Iterator[None]:
        """Broken for as long as the block runs."""
        effect = self.begin(what, workers=workers, routers=routers, links=links, sessions=sessions)
        try:
            yield
        finally:
            self.end(effect)

    def explanation(self, at_s: float, *, prefill: str, decode: str, router: str) -> Effect | None:
        """An effect that an attempt may have failed by at that moment."""
        return next(
            (
                effect
                for effect in self.effects
                if effect.touches(prefill, decode, router) and self._is_felt(effect, at_s, at_s)
            ),
            None,
        )

    def is_healthy(self, begin_s: float, end_s: float, *, prefill: str, decode: str, router: str) -> bool:
        """Whether nothing touched the pair in all that time, nor was still felt when it began."""
        return not any(
            effect.touches(prefill, decode, router) and self._is_felt(effect, begin_s, end_s)
            for effect in self.effects
        )

    def happened(self, what: str, *, router: str) -> bool:
        """Whether this befell the router at any time."""
        return any(effect.what == what and router in effect.routers for effect in self.effects)

    def _is_felt(self, effect: Effect, begin_s: float, end_s: float) -> bool:
        over_s = None if effect.ended_s is None else effect.ended_s + self._aftermath_s
        return effect.begun_s <= end_s and (over_s is None or begin_s <= over_s)
