"""What clients, faults and checks of one run share."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.cluster import SimCluster
from tests.simulation.coverage import Coverage
from tests.simulation.ledger import Ledger
from tests.simulation.phases import Sight
from tests.simulation.scenario import Scenario
from tests.simulation.tape import Tape


@dataclass(frozen=True, slots=True)
class Stage:
    """One run."""

    scenario: Scenario
    cluster: SimCluster
    tape: Tape
    ledger: Ledger
    coverage: Coverage
    sight: Sight

    def violate(self, what: str, about: str = "") -> None:
        """An invariant is broken. about: the request, if it is one's."""
        self.cluster.observer.violate(what, about)
