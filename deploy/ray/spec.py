"""What a cluster on Ray consists of, as its keeper keeps it and its hosts are given it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pdserve.service.config import Config, TimeoutsConfig
from pdserve.service.lifecycle import longest_drain_s
from pdserve.service.settings import ConfigError, shown

NAMESPACE = "pdserve"
KEEPER = "keeper"
ROLES = ("router", "prefill", "decode")
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
_SAME_HOST = ("memfd",)


@dataclass(frozen=True, slots=True)
class PairPlace:
    """A process as half of a pair on one host. index: 0 = it prefills, 1 = it decodes."""

    number: int
    index: int
    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """One cluster.

    counts      role → how many processes
    settings    the whole effective configuration, "table.key" → value; those of FILE_SETTINGS are empty
    files       setting → content of the file it names
    resources   role → what Ray is to set aside for one process: CPU, GPU and custom ones
    is_ending   it is being taken down, and isn't to be kept
    """

    name: str
    counts: dict[str, int]
    settings: dict[str, Any]
    resources: dict[str, dict[str, float]]
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    is_ending: bool = False

    def processes(self) -> list[str]:
        """Ids of all, in the order in which they are started: "router-0", …, "prefill-0", …, "decode-0", …"""
        if self.is_ending:
            return []
        return [f"{role}-{index}" for role in ROLES for index in range(self.counts.get(role, 0))]

    @property
    def drain_s(self) -> float:
        """How long the drain of a process may take."""
        named = {key: value for name, value in self.settings.items() for table, _, key in [name.partition(".")]
                 if table == "timeouts"}  # fmt: skip
        return longest_drain_s(TimeoutsConfig(**named)) + _CLOSING_S

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

    def scaled(self, counts: Mapping[str, int]) -> RayCluster:
        """With other numbers of these roles. Raises ConfigError for what couldn't serve."""
        merged = {**self.counts, **counts}
        check_counts(merged, local_prefill=self.settings["router.allow_local_prefill"])
        return replace(self, counts=merged)

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


def encode(cluster: RayCluster) -> bytes:
    """As it is kept."""
    return msgspec.json.encode(cluster)


def decode(raw: bytes) -> RayCluster:
    """What `encode` made."""
    return msgspec.json.decode(raw, type=RayCluster)


def shipped_settings(config: Config) -> dict[str, Any]:
    """The effective configuration as it goes to other machines: without the names of files of this one."""
    return {**config.effective(), **dict.fromkeys(FILE_SETTINGS, "")}


def check_counts(counts: Mapping[str, int], *, local_prefill: bool) -> None:
    """Raises ConfigError naming what these numbers of processes can't do."""
    for role, count in counts.items():
        if count < 0:
            raise ConfigError(f"--{role} must not be negative, got {count}")
    if not counts.get("router"):
        raise ConfigError("no router would take requests: give --routers at least 1")
    if not counts.get("decode"):
        raise ConfigError("no worker would decode: give --decode at least 1")
    if not counts.get("prefill") and not local_prefill:
        raise ConfigError(
            "no worker would prefill: give --prefill at least 1, or set router.allow_local_prefill = true"
        )


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
