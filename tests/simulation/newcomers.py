"""Workers that come up in the middle of a run: a second process of an id, one of another model, one more."""

from __future__ import annotations

import asyncio

from pdserve.ids import Epoch
from pdserve.messages import Role
from pdserve.service.lifecycle import EXIT_SUPERSEDED
from tests.simulation.aim import STRANGER, Target, is_stranger
from tests.simulation.cluster import SimWorker
from tests.simulation.kinds import Fault
from tests.simulation.ledger import Effect
from tests.simulation.scenario import BLOCK_SIZE
from tests.simulation.stage import Stage

TWIN_S = 10.0  # one of two processes must be gone by then, also when no router was there at first
ONE_OF_TWO_S = 2.0  # the same where nothing else is broken
REFUSED_S = 10.0  # a worker that was told that it doesn't fit comes back so late
CAME_FIRST = "a stranger is the first worker of a router that has just started"
LOOK_S = 0.05


class Newcomers:
    """Starts them, and watches who is let in."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._num_made = 0

    async def twin(self, fault: Fault, target: Target) -> None:
        """A second process under the victim's id: the one of the later epoch stays, the other exits."""
        [victim] = target.workers
        self._stage.coverage.add(12, *self._stage.sight.on_worker(victim))
        with self._stage.ledger.effect(fault.kind.value, workers=(victim.id,)):
            twin = self._stage.cluster.add_worker(victim.id, victim.role, num_blocks=victim.num_blocks)
            victim.is_restarted = twin.is_restarted = False
            begun_s, num_exits = self._stage.tape.now_s(), len(victim.exit_codes)
            while not twin.exit_codes and len(victim.exit_codes) == num_exits:
                if self._stage.tape.now_s() > begun_s + TWIN_S:
                    self._stage.violate(f"two processes of {victim.id} live on after {TWIN_S} s")
                    victim.kill()
                    return
                await asyncio.sleep(LOOK_S)
            took_s = self._stage.tape.now_s() - begun_s
            gone, stays = (twin, victim) if twin.exit_codes else (victim, twin)
            # Another fault may have brought a third, which ended both.
            living = [each for each in self._stage.cluster.processes(victim.id) if each.alive]
            stays = max(living, key=_epoch_of, default=stays)
            stays.is_restarted = True
            stays.start()  # unless it lives: it may have gone, too, by another fault
            self._stage.cluster.workers[victim.id] = stays
            self._stage.tape.tell(f"one {victim.id} exited with {gone.exit_codes} after {took_s:.3f} s")
            was_superseded = gone.exit_codes[-1] == EXIT_SUPERSEDED
            if was_superseded and _epoch_of(gone) > _epoch_of(stays):
                self._stage.violate(
                    f"of several processes of {victim.id} the one of the latest epoch has gone"
                )
            is_late = was_superseded and took_s > ONE_OF_TWO_S + LOOK_S
            if is_late and not self._is_troubled(victim.id, begun_s):
                self._stage.violate(f"the second {victim.id} was there for {took_s:.3f} s")

    def _is_troubled(self, worker_id: str, since_s: float) -> bool:
        """Whether something besides the twin kept a worker or its routers busy."""
        return any(
            effect.ended_s is None or effect.ended_s >= since_s - ONE_OF_TWO_S
            for effect in self._stage.ledger.effects
            if effect.routers
            or effect.sessions
            or (worker_id in effect.workers and "second" not in effect.what)
        )

    async def stranger(self, fault: Fault, target: Target) -> None:
        """A worker of another model, or of another layout: refused by routers, or by its peers.

        A router that has just started takes its model from the worker that comes first, and refuses the others.
        """
        self._stage.coverage.add(21, *self._stage.sight.anywhere())
        self._num_made += 1
        of_other_model = int(fault.draw * 1000) % 2 == 0
        stranger = self._stage.cluster.add_worker(
            f"{STRANGER}{self._num_made}",
            Role.DECODE if fault.draw < 0.5 else Role.PREFILL,
            block_size=BLOCK_SIZE if of_other_model else 2 * BLOCK_SIZE,
            weights="other weights" if of_other_model else "",
        )
        until_s = self._stage.tape.now_s() + fault.lasts_s
        came_first: dict[str, Effect] = {}
        while self._stage.tape.now_s() < until_s:
            await asyncio.sleep(LOOK_S)
            self._see_stranger(stranger, came_first, of_other_model=of_other_model)
        self._stage.ledger.begin("the stranger goes", workers=(stranger.id,))
        stranger.kill()
        del self._stage.cluster.workers[stranger.id]
        for effect in came_first.values():
            asyncio.get_running_loop().call_later(REFUSED_S, self._stage.ledger.end, effect)

    def _see_stranger(
        self, stranger: SimWorker, came_first: dict[str, Effect], *, of_other_model: bool
    ) -> None:
        for router in self._stage.cluster.routers.values():
            member = None if router.app is None else router.app.fleet.get(stranger.id)
            if member is None or router.app is None:
                continue
            others = [other for other in router.app.fleet.members if other is not member]
            if of_other_model and others:
                self._stage.violate(f"{router.id} has taken in {stranger.id}, which serves another model")
            elif of_other_model and router.id not in came_first:
                came_first[router.id] = self._stage.ledger.begin(CAME_FIRST, routers=(router.id,))
            for prefill, decode in router.app.fleet.topology.usable_pairs():
                peer = decode if member is prefill else prefill if member is decode else None
                if peer is not None and not is_stranger(peer.id):
                    self._stage.violate(
                        f"{router.id} pairs {stranger.id} with {peer.id}, whose layout is another"
                    )

    async def join(self, fault: Fault, target: Target) -> None:
        """One worker more."""
        self._num_made += 1
        role = Role.DECODE if fault.draw < 0.5 else Role.PREFILL
        num_blocks = target.workers[0].num_blocks
        self._stage.cluster.add_worker(f"j{self._num_made}", role, num_blocks=num_blocks)


def _epoch_of(worker: SimWorker) -> Epoch:
    assert worker.ref is not None, "it has run"
    return worker.ref.epoch
