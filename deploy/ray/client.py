"""The driver's side: joins a Ray cluster, asks the keeper, waits for what was asked. Everything here blocks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from deploy.ray.actors import find_actor, living, start_keeper
from deploy.ray.keeper import KeptState
from deploy.ray.spec import KEEPER, NAMESPACE, RayCluster, shortages
from pdserve.clock import Clock
from pdserve.errors import WorkerLost
from pdserve.service.address import split_address
from pdserve.service.settings import ConfigError

LOCAL = "local"
AUTO = "auto"
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0
_ANSWER_S = 60.0
_POLL_S = 0.3
_SLOW_S = 15.0
_LOCAL_STORE_BYTES = 80 << 20  # nothing of ours goes through it


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """This process as a driver of the Ray cluster at an address, for the block.

    address  "local": a Ray of this process, which ends with the block; "auto": the one of this machine; HOST:PORT
    Raises WorkerLost if nothing is there, ConfigError for what can't be an address.
    """
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
    }
    if address == LOCAL:
        options |= {
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": _LOCAL_STORE_BYTES,
            "_node_ip_address": _LOOPBACK,
        }
    elif address != AUTO:
        _check_reachable(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, RayError, ValueError) as error:
        raise WorkerLost("no Ray cluster can be joined", address=address, error=_one_line(error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    if "://" in address:
        raise ConfigError(
            f"--address {address}: want auto, local, or HOST:PORT of the head (6379 by default)"
        )
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise WorkerLost("no Ray cluster can be joined", address=address, error=_one_line(error)) from error


def head_address() -> str:
    """HOST:PORT at which other commands join the same Ray cluster."""
    return str(ray.get_runtime_context().gcs_address)


def node_addresses() -> set[str]:
    """Of all nodes that live."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def offers(resource: str) -> bool:
    """Whether any node that lives has this custom resource."""
    return any(node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"])


class RayDriver:
    """Asks for one cluster on the joined Ray.

    tell  takes a line for people
    """

    def __init__(self, name: str, clock: Clock, tell: Callable[[str], None]) -> None:
        self._name = name
        self._clock = clock
        self._tell = tell
        self._pause = threading.Event()  # never set: its wait is what Ctrl-C ends

    def up(self, cluster: RayCluster) -> bool:
        """Have it kept; whether it is new. Raises ConfigError if there is one that differs in more than its numbers."""
        is_new = find_actor(self._name, KEEPER) is None
        differences = self._ask(start_keeper(self._name).up.remote(cluster))
        if differences:
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            raise ConfigError(
                f"{self._name} is there already and differs: {differences[0]}{more}; "
                f"take it down first, or give another --name"
            )
        return is_new

    def scale(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Other numbers. Raises ConfigError for what can't be, WorkerLost if there is no such cluster."""
        self._ask(self._keeper().scale.remote(dict(ranges)))

    def state(self) -> KeptState:
        """How it is. Raises WorkerLost if there is no such cluster."""
        found: KeptState | None = self._ask(self._keeper().state.remote())
        if found is None:
            raise WorkerLost("there is no such cluster on this Ray", name=self._name)
        return found

    def wait_served(self, wait_s: float) -> KeptState:
        """Return once each of its processes is ready and a request would be served.

        Raises ConfigError for one that can't be started, WorkerLost after wait_s with what it waits for.
        """
        ready: set[str] = set()
        started_s = told_s = self._clock.now_s()
        while True:
            state = self.state()
            for process in state.processes:
                if process.state == "failed":
                    raise ConfigError(f"{process.id} {process.why}")
                if process.state == "ready" and process.id not in ready:
                    ready.add(process.id)
                    self._tell(f"{process.id} is ready on {process.node}")
            waits = [f"{each.id} ({each.state}{f': {each.why}' if each.why else ''})"
                     for each in state.processes if each.state != "ready"]  # fmt: skip
            if not waits and state.is_served and len(state.processes) == sum(state.counts.values()):
                return state
            now_s = self._clock.now_s()
            if now_s - started_s >= wait_s:
                lacks = "; ".join((", ".join(waits) or "a link between the workers", *self._shortages()))
                raise WorkerLost(f"{self._name} is not ready in {wait_s:g} s; it waits for {lacks}")
            if now_s - told_s >= _SLOW_S:
                told_s = now_s
                self._tell(f"still waiting for {', '.join(waits) or 'a link between the workers'}")
                for line in self._shortages():
                    self._tell(line)
            self._pause.wait(_POLL_S)

    def _shortages(self) -> list[str]:
        """Which resources the processes lack that Ray finds no place for."""
        nodes = ray._private.state.available_resources_per_node()
        return list(shortages(self._ask(self._keeper().unplaced.remote()), nodes))

    def down(self) -> None:
        """Drain and end it; returns when no actor of it is left. Raises WorkerLost if there is no such cluster."""
        keeper = self._keeper()
        with contextlib.suppress(RayActorError):  # its end is the aim
            if self._ask(keeper.state.remote()) is None:  # a keeper that was never told what to keep
                ray.kill(keeper)
            else:
                self._ask(keeper.down.remote())
        told_s = self._clock.now_s()
        while left := living(self._name):
            if self._clock.now_s() - told_s >= _SLOW_S:
                told_s = self._clock.now_s()
                self._tell(f"still draining: {', '.join(sorted(left - {KEEPER}) or [KEEPER])}")
            self._pause.wait(_POLL_S)

    def _keeper(self) -> Any:
        keeper = find_actor(self._name, KEEPER)
        if keeper is None:
            raise WorkerLost("there is no such cluster on this Ray", name=self._name)
        return keeper

    def _ask(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=_ANSWER_S)
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from error
            raise
        except GetTimeoutError as error:
            raise WorkerLost(f"the keeper of {self._name} has not answered in {_ANSWER_S:g} s") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
