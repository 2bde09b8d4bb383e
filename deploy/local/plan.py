"""Which processes a local cluster consists of, with their command lines, addresses and cores. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.command import PROGRAM, arguments_of, environ_of
from pdserve.service.address import join_address, split_address
from pdserve.service.config import Config
from pdserve.service.exposure import workers_listen
from pdserve.service.settings import ConfigError

HTTP_PORT = 8000
_LOOPBACK = "127.0.0.1"
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many workers of each role."""

    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0

    def __str__(self) -> str:
        named = ((self.num_prefill, "prefill"), (self.num_decode, "decode"), (self.num_both, "both"))
        return " + ".join(f"{count} {role}" for count, role in named if count)

    def roles(self) -> list[str]:
        """The role of each worker: prefill first, then decode, then both."""
        return ["prefill"] * self.num_prefill + ["decode"] * self.num_decode + ["both"] * self.num_both


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child: who it is and how it is started.

    metrics  host:port of its HTTP server, where its readiness is asked for
    has_weights  whether it has to load any before it is ready
    cores    CPU numbers it is kept on; empty = wherever the system likes
    environ  all of its environment
    """

    role: str
    id: str
    command: tuple[str, ...]
    metrics: str
    environ: Mapping[str, str]
    cores: tuple[int, ...] = ()
    has_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The whole cluster.

    target       what clients dial; operators: what operators and workers dial
    http         URL of the router's HTTP door; "" = it has none
    secret_file  which all processes have in common
    """

    target: str
    operators: str
    secret_file: str
    router: ProcessSpec
    http: str = ""
    workers: tuple[ProcessSpec, ...]

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All children, the router first."""
        return (self.router, *self.workers)


class Layout:
    """Lays out the processes of a cluster: those that it begins with, and workers that are added later.

    plan     what it begins with
    config   effective configuration; flags: "table.key" → value, what each child is given beside the file
    cores    CPU numbers that this process may use, divided by `num_seats`: workers that there may be at most, at once
    environ  of this process
    reserve  (host, port) → port: keeps an address for a child, a free port for 0; raises ConfigError if it is taken
    has_http  whether HTTP can be served: it is an extra
    draw_secret  port of the workers' listener → a file with a secret for this cluster; called if none is configured
    Raises ConfigError when the shape can't serve a request.
    """

    def __init__(
        self,
        shape: Shape,
        config: Config,
        *,
        config_file: Path | None,
        flags: Mapping[str, object],
        cores: Sequence[int],
        environ: Mapping[str, str],
        reserve: Callable[[str, int], int],
        draw_secret: Callable[[int], Path],
        num_seats: int = 0,
        has_http: bool = True,
    ) -> None:
        _check(shape, config)
        self._has_http = has_http
        self._config, self._config_file, self._environ = config, config_file, environ
        self._reserve = reserve
        roles = shape.roles()
        self._shares = divide_cores(cores, max(num_seats, len(roles)), config.engine.threads)
        self._metrics: dict[int, str] = {}
        host, port = split_address(config.router.listen)
        listen = join_address(host, reserve(host, port))
        workers_host, workers_port = split_address(workers_listen(config.router))
        workers_port = reserve(workers_host, workers_port)
        for_workers = join_address(workers_host, workers_port)
        self._operators = dialled(for_workers)
        secret_file = config.cluster.secret_file or str(draw_secret(workers_port))
        self._flags = {**flags, "cluster.secret_file": secret_file}
        router_id = config.router.id or "router"
        http = self._http_address(port)
        router = {
            **({"http.listen": http} if http else {}),
            "router.listen": listen,
            "router.workers_listen": for_workers,
            "router.id": router_id,
            "router.model": _router_model(config),
        }
        self.plan = ClusterPlan(
            target=dialled(listen),
            operators=self._operators,
            secret_file=secret_file,
            router=self._spec("router", router_id, 0, router),
            http=f"{'https' if config.tls.cert_file else 'http'}://{dialled(http)}" if http else "",
            workers=tuple(
                self.worker(role, f"{role}-{roles[:index].count(role)}", index)
                for index, role in enumerate(roles)
            ),
        )

    def _http_address(self, clients_port: int) -> str:
        """Of the HTTP door: as set; else on loopback at the port that everybody knows, if that is free."""
        if self._config.http.listen:
            host, port = split_address(self._config.http.listen)
            return join_address(host, self._reserve(host, port))
        if not self._has_http:
            return ""
        try:
            port = self._reserve(_LOOPBACK, HTTP_PORT if clients_port else 0)
        except ConfigError:
            port = self._reserve(_LOOPBACK, 0)
        return join_address(_LOOPBACK, port)

    def worker(self, role: str, name: str, seat: int) -> ProcessSpec:
        """A worker on one of the seats, which has its cores and its address for metrics; raises ConfigError for that.

        Seats beyond those that were counted on share the cores of the first.
        """
        share = self._shares[seat % len(self._shares)]
        own: dict[str, object] = {
            "worker.id": name,
            "worker.routers": self._operators,
            "engine.threads": share.num_threads,
        }
        return self._spec(role, name, seat + 1, own, share.cores)

    def _spec(
        self, role: str, name: str, index: int, own: Mapping[str, object], cores: tuple[int, ...] = ()
    ) -> ProcessSpec:
        if index not in self._metrics:
            host, port = split_address(self._config.metrics.listen)
            self._metrics[index] = join_address(host, self._reserve(host, port + index if port else 0))
        address, engine = self._metrics[index], self._config.engine
        values = {**self._flags, **own, "metrics.listen": address}
        return ProcessSpec(
            role=role,
            id=name,
            command=(*PROGRAM, *arguments_of(role, values, self._config_file)),
            metrics=dialled(address),
            cores=cores,
            has_weights=role != "router" and engine.kind == "torch",
            environ=environ_of(role, engine, self._environ),
        )


def dialled(address: str) -> str:
    """Where to reach, from this machine, what listens on `address`."""
    host, port = split_address(address)
    return join_address(_ANY_HOST.get(host, host), port)


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One worker's part of the machine."""

    num_threads: int
    cores: tuple[int, ...]


def divide_cores(cores: Sequence[int], num_workers: int, num_threads: int) -> list[CoreShare]:
    """Give each worker the same number of compute threads, and cores of its own where there are plenty.

    num_threads  per worker; 0 = the cores divided by the workers, at least 1
    Equal threads on all workers are what `deterministic` needs. A worker is kept on its own neighbouring cores only
    if there are at least two for each: with fewer, its transfer and event loop threads would stand in the engine's
    way while another worker's core idles.
    """
    each = len(cores) // num_workers if num_workers else 0
    threads = num_threads or max(1, each)
    pinned = each >= 2 and threads <= each
    ordered = sorted(cores)
    return [
        CoreShare(threads, tuple(ordered[index * each : (index + 1) * each]) if pinned else ())
        for index in range(num_workers)
    ]


def _router_model(config: Config) -> str:
    """It reads the tokenizer while the workers load, and before it listens."""
    if config.router.model or config.engine.kind == "fake":
        return config.router.model
    return config.worker.model


def _check(shape: Shape, config: Config) -> None:
    for count in (shape.num_prefill, shape.num_decode, shape.num_both):
        if count < 0:
            raise ConfigError(f"numbers of workers must not be negative, got {count}")
    if shape.num_both:
        return
    if not shape.num_decode:
        raise ConfigError("no worker would decode: give --decode or --both at least 1")
    if not shape.num_prefill and not config.router.allow_local_prefill:
        raise ConfigError(
            "no worker would prefill: give --prefill or --both at least 1, or set router.allow_local_prefill = true"
        )
