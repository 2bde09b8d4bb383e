"""Where hosts go: pairs that share memory on one node, all others apart; and how many machines Ray is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ray.autoscaler.sdk import request_resources

from deploy.ray.spec import RayCluster


class Places:
    """Of one cluster. Every method blocks."""

    def __init__(self, cluster: str) -> None:
        self._name = cluster

    def strategy(self, process: str, cluster: RayCluster) -> Any:
        """Ray's scheduling strategy for a host."""
        return "SPREAD"

    def reserve(self, cluster: RayCluster | None, kept: Callable[[], Sequence[RayCluster]]) -> None:
        """See `Hosts.reserve`. Ray remembers only the last request, so it has what all clusters need."""
        request_resources(bundles=[bundle for each in kept() for bundle in each.bundles() if bundle])
