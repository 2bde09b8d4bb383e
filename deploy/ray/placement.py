"""Where hosts go: pairs that share memory on one node, all others apart; and how many machines Ray is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray.spec import RayCluster, fits

_SPREAD = "SPREAD"


class Places:
    """Of one cluster. Every method blocks.

    lives  whether a process has a host
    """

    def __init__(self, cluster: str, lives: Callable[[str], bool]) -> None:
        self._prefix = f"{cluster}/pair-"
        self._lives = lives

    def strategy(self, process: str, cluster: RayCluster) -> Any:
        """Ray's scheduling strategy for a host.

        Two processes of a pair share a placement group, unless one of them has a place already, or no node could hold
        both and none must.
        """
        pair = cluster.pair_of(process)
        if pair is None:
            return _SPREAD
        bundles = [dict(cluster.resources[role]) for role in ("prefill", "decode")]
        group = self._group(pair.number)
        if (
            group is not None
            and not cluster.is_strict
            and not _could_hold(bundles)
            and not self._lives(pair.other)
        ):
            ray.util.remove_placement_group(group)
            return _SPREAD
        if group is None:
            if self._lives(pair.other) or not (cluster.is_strict or _could_hold(bundles)):
                return _SPREAD
            group = ray.util.placement_group(
                bundles, strategy="STRICT_PACK", name=f"{self._prefix}{pair.number}", lifetime="detached"
            )
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=pair.index)

    def reserve(
        self, cluster: RayCluster | None, used: Collection[str], kept: Callable[[], Sequence[RayCluster]]
    ) -> None:
        """See `Hosts.reserve`. Ray remembers only the last request, so it has what all clusters need."""
        request_resources(bundles=[bundle for each in kept() for bundle in each.bundles() if bundle])
        for entry in ray.util.placement_group_table().values():
            number = entry["name"].removeprefix(self._prefix)
            is_ours = entry["name"].startswith(self._prefix) and entry["state"] != "REMOVED"
            if is_ours and not {f"prefill-{number}", f"decode-{number}"} & set(used):
                group = self._group(int(number))
                if group is not None:
                    ray.util.remove_placement_group(group)

    def _group(self, number: int) -> Any | None:
        try:
            return ray.util.get_placement_group(f"{self._prefix}{number}")
        except ValueError:
            return None


def _could_hold(bundles: Sequence[dict[str, float]]) -> bool:
    """Whether any node that lives has as much as all of these take."""
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return any(fits(total, node["Resources"]) for node in ray.nodes() if node["Alive"])
