"""What a cluster on Ray consists of, as its keeper keeps it and its hosts are given it. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from deploy.scaling.targets import Range
from pdserve.service.config import Config, TimeoutsConfig
from pdserve.service.lifecycle import longest_drain_s
from pdserve.service.settings import ConfigError, shown

NAMESPACE = "pdserve"
KEEPER = "keeper"
FLAGS = {"router": "--routers", "prefill": "--prefill", "decode": "--decode", "both": "--both"}
ROLES = tuple(FLAGS)
# Settings that name a file of the driver's machine, whose content goes along.
FILE_SETTINGS = (
    "cluster.secret_file",
    "router.keys_file",
    "tls.cert_file",
    "tls.key_file",
    "tls.ca_file",
    "tls.client_ca_file",
)
SECRET = "cluster.secret_file"
# What a drained process may need to close its sockets.
_CLOSING_S = 5.0
# Transports by which KV moves only between processes of one host.
_SAME_HOST = ("cuda_ipc", "memfd")


@dataclass(frozen=True, slots=True)
class PairPlace:
    """A process as half of a pair on one host. index: 0 = it prefills, 1 = it decodes."""

    number: int
    index: int
    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """One cluster.

    members     role → the numbers of its processes
    ranges      role → the fewest and the most that scaling may make of it; where they are equal it is left alone
    settings    the whole effective configuration, "table.key" → value; those of FILE_SETTINGS are empty
    files       setting → content of the file it names
    resources   role → what Ray is to set aside for one process: CPU, GPU and custom ones
    is_ending   it is being taken down, and isn't to be kept
    """

    name: str
    members: dict[str, list[int]]
    ranges: dict[str, tuple[int, int]]
    settings: dict[str, Any]
    resources: dict[str, dict[str, float]]
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    is_ending: bool = False

    def processes(self) -> list[str]:
        """Ids of all, in the order in which they are started: "router-0", …, "prefill-0", …"""
        if self.is_ending:
            return []
        return [f"{role}-{number}" for role in ROLES for number in self.members.get(role, ())]

    @property
    def counts(self) -> dict[str, int]:
        """Role → how many processes."""
        return {role: len(numbers) for role, numbers in self.members.items()}

    @property
    def is_scaled(self) -> bool:
        """Whether a number of workers follows the load."""
        return not self.is_ending and any(least < most for least, most in self.ranges.values())

    @property
    def drain_s(self) -> float:
        """How long the drain of a process may take."""
        named = {key: value for name, value in self.settings.items() for table, _, key in [name.partition(".")]
                 if table == "timeouts"}  # fmt: skip
        return longest_drain_s(TimeoutsConfig(**named)) + _CLOSING_S

    @property
    def serves_alone(self) -> bool:
        """Whether a worker serves without a second one."""
        return bool(self.members.get("both") or self.settings["router.allow_local_prefill"])

    @property
    def is_strict(self) -> bool:
        """Whether the first transport must be the one."""
        return bool(self.settings["transport.strict"])

    def pair_of(self, process: str) -> PairPlace | None:
        """The pair that it forms with a worker of the other role; None if it may lie anywhere.

        Prefill worker n and decode worker n are one if the first transport moves KV between processes of one host
        only, and Ray has anything to set aside for them.
        """
        role, _, number = process.rpartition("-")
        other = {"prefill": "decode", "decode": "prefill"}.get(role)
        if other is None or self.settings["transport.kinds"][0] not in _SAME_HOST:
            return None
        partner = f"{other}-{number}"
        takes_none = not (any(self.resources[role].values()) and any(self.resources[other].values()))
        if takes_none or partner not in self.processes():
            return None
        return PairPlace(int(number), ("prefill", "decode").index(role), partner)

    def needs(self, processes: Sequence[str]) -> dict[str, dict[str, float]]:
        """What each of these takes on one node; a pair that must lie on one is an entry of its own."""
        found: dict[str, dict[str, float]] = {}
        for process in processes:
            pair = self.pair_of(process) if self.is_strict else None
            if pair is None:
                found[process] = self.resources[role_of(process)]
                continue
            own, others = self.resources[role_of(process)], self.resources[role_of(pair.other)]
            both = {name: own.get(name, 0.0) + others.get(name, 0.0) for name in {**own, **others}}
            found[" with ".join(sorted((process, pair.other), reverse=True))] = both
        return found

    def bundles(self) -> list[dict[str, float]]:
        """What its processes take, one entry each."""
        return [dict(self.resources[role_of(name)]) for name in self.processes()]

    def asked(self, ranges: Mapping[str, tuple[int, int]]) -> RayCluster:
        """With other numbers of these roles, within the ranges. Raises ConfigError for what couldn't serve."""
        merged = {**self.ranges, **ranges}
        check_ranges(merged, local_prefill=self.settings["router.allow_local_prefill"])
        counts = {
            role: min(max(self.counts.get(role, 0), least), most) for role, (least, most) in merged.items()
        }
        return replace(self.scaled(counts, {}), ranges=merged)

    def scaled(self, counts: Mapping[str, int], victims: Mapping[str, Sequence[str]]) -> RayCluster:
        """With so many. Of a role that shrinks its `victims` go first, then those with the highest numbers; one that
        grows takes the lowest free numbers.
        """
        members = dict(self.members)
        for role, count in counts.items():
            numbers = sorted(members.get(role, ()))
            first = [number for each in victims.get(role, ()) if (number := number_of(each)) in numbers]
            order = [*first, *(number for number in reversed(numbers) if number not in first)]
            kept = set(order[max(0, len(numbers) - count) :])
            free = (number for number in itertools.count() if number not in kept)
            members[role] = sorted({*kept, *itertools.islice(free, max(0, count - len(kept)))})
        return replace(self, members=members)

    def differences(self, wanted: RayCluster) -> list[str]:
        """What else than the numbers is asked for otherwise, in words, without the content of files."""
        lines = [
            f"{name} is {_as_toml(value)}, asked for {_as_toml(wanted.settings.get(name))}"
            for name, value in self.settings.items()
            if value != wanted.settings.get(name)
        ]
        given = {name for name in FILE_SETTINGS if name in wanted.files or name in self.files}
        # A secret that was drawn for it stays.
        given -= {SECRET} - set(wanted.files)
        lines += [
            f"{name} has another content"
            for name in sorted(given)
            if self.files.get(name) != wanted.files.get(name)
        ]
        lines += [
            f"{role} takes {resources_text(self.resources[role])}, asked for {resources_text(needed)}"
            for role, needed in wanted.resources.items()
            if self.resources[role] != needed
        ]
        return lines

    def toml(self) -> str:
        """Its settings as a configuration file."""
        tables: dict[str, list[str]] = {}
        for name, value in self.settings.items():
            table, _, key = name.partition(".")
            tables.setdefault(table, []).append(f"{key} = {_as_toml(value)}")
        return "\n".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())


def role_of(process: str) -> str:
    """The role of "prefill-3"."""
    return process.rpartition("-")[0]


def number_of(process: str) -> int:
    """The number of "prefill-3"; -1 for what isn't named so."""
    number = process.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def encode(cluster: RayCluster) -> bytes:
    """As it is kept."""
    return msgspec.json.encode(cluster)


def decode(raw: bytes) -> RayCluster:
    """What `encode` made."""
    return msgspec.json.decode(raw, type=RayCluster)


def shipped_settings(config: Config) -> dict[str, Any]:
    """The effective configuration as it goes to other machines: without the names of files of this one."""
    return {**config.effective(), **dict.fromkeys(FILE_SETTINGS, "")}


def check_ranges(ranges: Mapping[str, tuple[int, int]], *, local_prefill: bool) -> None:
    """Raises ConfigError naming what these numbers of processes can't do."""
    for role, (least, most) in ranges.items():
        if least < 0:
            raise ConfigError(f"{FLAGS[role]} must not be negative, got {least}")
        if least < most and role not in ("prefill", "decode"):
            raise ConfigError(f"{FLAGS[role]}: want a number: only prefill and decode workers are scaled")
    least_of = {role: ranges.get(role, (0, 0))[0] for role in ROLES}
    is_scaled = any(least < most for least, most in ranges.values())
    if not least_of["router"]:
        raise ConfigError("no router would take requests: give --routers at least 1")
    if is_scaled and least_of["both"]:
        raise ConfigError("--both can't stand beside a range: workers that do both aren't scaled")
    if least_of["both"]:
        return
    if not least_of["decode"]:
        raise ConfigError("no worker would decode: give --decode or --both at least 1")
    if not least_of["prefill"] and not local_prefill:
        raise ConfigError(
            "no worker would prefill: give --prefill or --both at least 1, or set router.allow_local_prefill = true"
        )
    if not least_of["prefill"] and is_scaled:
        raise ConfigError("scaling needs both roles: give --prefill at least 1")


def read_range(text: str, flag: str) -> tuple[int, int]:
    """What "3" or "1..3" says. Raises ConfigError naming `flag`."""
    try:
        found = Range.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    return found.least, found.most


def read_resources(text: str, flag: str) -> dict[str, float]:
    """What "CPU=4,GPU=1,prefill=1" says. Raises ConfigError naming `flag`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = -1.0
        if not name or not 0 <= amount < float("inf"):
            raise ConfigError(f"{flag}: want NAME=NUMBER[,…], as in CPU=4,GPU=1; got {part.strip()!r}")
        found[name] = amount
    return found


def resources_text(resources: Mapping[str, float]) -> str:
    """ "CPU 4, GPU 1"."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items() if amount) or "nothing"


def shortages(
    bundles: Mapping[str, Mapping[str, float]], nodes: Mapping[str, Mapping[str, float]]
) -> Iterator[str]:
    """Why processes find no place: a line for each of `bundles` (process → what it takes) that fits on no node.

    nodes  node → what is free there, or all that it has
    """
    for process, needed in bundles.items():
        if not any(fits(needed, has) for has in nodes.values()):
            most = {name: max((has.get(name, 0.0) for has in nodes.values()), default=0.0) for name in needed}
            short = ", ".join(f"{name} {most[name]:g}" for name, amount in needed.items() if amount)
            yield f"{process} takes {resources_text(needed)}, and no node has it (the most on one: {short})"


def fits(needed: Mapping[str, float], has: Mapping[str, float]) -> bool:
    """Whether a node that has so much can take it."""
    return all(has.get(name, 0.0) >= amount for name, amount in needed.items())


def _as_toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_as_toml(part) for part in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else shown(value)
