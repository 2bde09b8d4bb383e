"""`pdserve ray`: a cluster on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.settings import WORKER, add_settings, read_settings
from pdserve.errors import WorkerLost
from pdserve.fields import plain_id
from pdserve.service.config import Config
from pdserve.service.exposure import check_router, check_worker
from pdserve.service.settings import ConfigError

if TYPE_CHECKING:
    from deploy.ray.client import RayDriver
    from deploy.ray.keeper import KeptState
    from deploy.ray.spec import RayCluster

DESCRIPTION = """\
Starts a cluster on the nodes of a Ray cluster, keeps it there whatever ends, scales it and takes it down. Every process
is what `pdserve up` would start, below a detached actor that Ray places; the command may end, the cluster stays. The
configuration goes along whole, with the files that it names (secret, keys, certificates), but for the model: an alias
or a path that must be good on every node. Needs `pip install 'pdserve[ray]'`, here and on the nodes.
"""
_SHORTS = {
    name: WORKER[name]
    for name in ("model", "dtype", "deterministic", "tensor-parallel", "threads", "engine", "insecure")
} | {
    "http-listen": "http.listen",
    "ttft-target": "scaling.ttft_target_s",
    "itl-target": "scaling.itl_target_s",
}
_ROLES = ("router", "prefill", "decode", "both")
# A node's address, and a free port, unless the configuration says which.
_DEFAULTS = {"router.listen": "127.0.0.1:0"}
_WAIT_S = 300.0

_Ranges = dict[str, tuple[int, int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, with which cluster, on which Ray."""
    actions = parser.add_subparsers(dest="action", metavar="up|scale|status|down", required=True)
    up = actions.add_parser(
        "up",
        help="start it, or make the one that runs what is asked for; waits until it serves",
        allow_abbrev=False,
    )
    scale = actions.add_parser(
        "scale", help="other numbers of processes; what is too many drains", allow_abbrev=False
    )
    status = actions.add_parser("status", help="its addresses and processes")
    down = actions.add_parser("down", help="drain it and end it")
    for action in (up, scale, status, down):
        action.add_argument(
            "--address", default="auto", metavar="A",
            help="auto = the Ray of this machine; HOST:PORT of the head; for `up` also local = a Ray of its own, "
            "for as long as the command runs (default auto)",
        )  # fmt: skip
        action.add_argument("--name", default="pdserve", metavar="C", help="the cluster's (default pdserve)")
    for action in (up, scale):
        for flag, metavar, what, usual in (
            ("prefill", "X", "prefill workers, or X..X2: as many as the load needs", "1; 0 beside --both"),
            ("decode", "Y", "decode workers, or Y..Y2", "1; 0 beside --both"),
            ("both", "Z", "workers that do both", "0"),
            ("routers", "N", "routers", "1"),
        ):
            default = usual if action is up else "as it is"
            action.add_argument(f"--{flag}", metavar=metavar, help=f"{what} (default: {default})")
        action.add_argument(
            "--wait-s", type=float, default=_WAIT_S, metavar="S",
            help=f"how long to wait until it serves (default {_WAIT_S:g})",
        )  # fmt: skip
    for role in _ROLES:
        up.add_argument(
            f"--{role}-resources", metavar="NAME=N[,…]",
            help="what Ray sets aside for each, as CPU=4,GPU=1 (default CPU=1, of workers CPU=engine.threads, and a "
            "custom resource with the role's name if a node offers it)",
        )  # fmt: skip
    add_settings(up, _SHORTS)
    status.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Do it. Raises PdserveError."""
    from deploy.ray.loopback import is_on_loopback

    if plain_id(arguments.name) or not arguments.name:
        raise ConfigError(f"--name must be {plain_id(arguments.name) or 'given'}, got {arguments.name!r}")
    is_local = arguments.address == "local"
    if is_local and arguments.action != "up":
        raise ConfigError(
            "--address local is a Ray of `up` itself: give the address that it has printed, or auto"
        )
    config = read_settings(arguments, _SHORTS, defaults=_DEFAULTS) if arguments.action == "up" else None
    ranges = _ranges(arguments, config) if arguments.action in ("up", "scale") else {}
    if config is not None and config.engine.kind == "torch" and not config.worker.model:
        raise ConfigError("no model: give --model an alias (pdserve fetch) or a path, good on every node")
    resources = {} if config is None else _given_resources(arguments)
    # Ray reads these when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_on_loopback(arguments.address):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        from deploy.ray.client import RayDriver, joined
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("`pdserve ray` needs Ray: pip install 'pdserve[ray]'") from None
    from pdserve.clock import SystemClock

    with joined(arguments.address):
        driver = RayDriver(arguments.name, SystemClock(), _tell)
        match arguments.action:
            case "up":
                assert config is not None
                return _up(driver, arguments, _cluster(arguments, config, ranges, resources))
            case "scale":
                return _scale(driver, arguments, ranges)
            case "down":
                driver.down()
                print(f"{arguments.name} is down")
            case _:
                _show(driver.state(), as_json=arguments.json)
    return 0


def _up(driver: RayDriver, arguments: argparse.Namespace, cluster: RayCluster) -> int:
    from deploy.ray.client import head_address

    is_local = arguments.address == "local"
    is_new = driver.up(cluster)
    try:
        state = driver.wait_served(arguments.wait_s)
    except ConfigError:
        if is_new:
            driver.down()
        raise
    except WorkerLost:
        if is_local:
            driver.down()
        raise
    except KeyboardInterrupt:
        if is_local:
            driver.down()
        else:
            _tell(f"{arguments.name} goes on starting; `pdserve ray down` ends it")
        raise
    _say_ready(state)
    if is_local:
        _stay(driver, head_address())
    return 0


def _stay(driver: RayDriver, address: str) -> None:
    """Until a signal; then all of it ends, since its Ray does."""
    import signal
    import threading

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    _tell(f"this Ray is at {address} (for other `pdserve ray` commands); Ctrl-C drains and ends all")
    stop.wait()
    _tell("draining")
    driver.down()


def _scale(driver: RayDriver, arguments: argparse.Namespace, ranges: _Ranges) -> int:
    driver.scale(ranges)
    _say_ready(driver.wait_served(arguments.wait_s))
    return 0


def _ranges(arguments: argparse.Namespace, config: Config | None) -> _Ranges:
    """Role → numbers: of those that were given, and with a configuration of all. Raises ConfigError."""
    from deploy.ray.spec import FLAGS, check_ranges, read_range

    if not arguments.wait_s > 0:
        raise ConfigError(f"--wait-s: want a number above 0, got {arguments.wait_s:g}")
    texts = {role: getattr(arguments, flag.removeprefix("--")) for role, flag in FLAGS.items()}
    given = {role: read_range(text, FLAGS[role]) for role, text in texts.items() if text is not None}
    if config is None:
        if not given:
            raise ConfigError(f"scale to what? give one of {', '.join(FLAGS.values())}")
        return given
    pair = (0, 0) if "both" in given else (1, 1)
    ranges = {"router": (1, 1), "prefill": pair, "decode": pair, "both": (0, 0), **given}
    check_ranges(ranges, local_prefill=config.router.allow_local_prefill)
    return ranges


def _given_resources(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Role → what Ray is to set aside, of those that were given. Raises ConfigError."""
    from deploy.ray.spec import read_resources

    texts = {role: getattr(arguments, f"{role}_resources") for role in _ROLES}
    return {
        role: read_resources(text, f"--{role}-resources") for role, text in texts.items() if text is not None
    }


def _cluster(
    arguments: argparse.Namespace,
    config: Config,
    ranges: _Ranges,
    given: dict[str, dict[str, float]],
) -> RayCluster:
    """What is asked for; checked as far as it can be from here. Ray is joined."""
    from deploy.ray import client
    from deploy.ray.spec import FILE_SETTINGS, RayCluster, shipped_settings

    for node in client.node_addresses():
        _check_exposure(config, node)
    is_local = arguments.address == client.LOCAL
    resources: dict[str, dict[str, float]] = {}
    for role in _ROLES:
        if role in given:
            resources[role] = given[role]
        elif is_local:
            resources[role] = {}
        else:
            cpus = 1.0 if role == "router" else float(config.engine.threads or 1)
            resources[role] = {"CPU": cpus, **({role: 1.0} if client.offers(role) else {})}
    settings = shipped_settings(config)
    if is_local and not config.engine.threads:
        settings["engine.threads"] = _local_threads(
            sum(most for role, (_, most) in ranges.items() if role != "router")
        )
    named = {name: path for name in FILE_SETTINGS if (path := config.effective()[name])}
    return RayCluster(
        name=arguments.name,
        members={role: list(range(least)) for role, (least, _) in ranges.items()},
        ranges=ranges,
        settings=settings,
        resources=resources,
        files={name: _read(name, Path(path)) for name, path in named.items()},
    )


def _local_threads(num_workers: int) -> int:
    from deploy.local.plan import divide_cores
    from deploy.local.up import usable_cores

    return divide_cores(usable_cores(), num_workers, 0)[0].num_threads


def _check_exposure(config: Config, node: str) -> None:
    from pdserve.service.address import join_address

    address = join_address(node, 0)
    reached = replace(
        config,
        router=replace(config.router, listen=address, workers_listen=address),
        http=replace(config.http, listen=address if config.http.listen else ""),
        worker=replace(config.worker, kv_listen=address),
    )
    check_router(reached, has_secret=True)  # its own, if no other is set
    check_worker(reached, has_secret=True)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path}: can't be read: {error.strerror}") from error


def _say_ready(state: KeptState) -> None:
    counts = " + ".join(f"{count} {role}" for role in _ROLES if (count := state.counts.get(role, 0)))
    http = f"; HTTP at {','.join(state.http)}" if state.http else ""
    print(f"{state.name} is ready at {','.join(state.targets)}: {counts}{http}", flush=True)


def _show(state: KeptState, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(state)))
        return
    ending = ", is being taken down" if state.is_ending else ""
    if state.scaling:
        print(f"scaling: {state.scaling}")
    http = f"; HTTP: {','.join(state.http)}" if state.http else ""
    print(f"{state.name}{ending}; clients: {','.join(state.targets) or 'nowhere yet'}{http}")
    width: Callable[[str], int] = lambda key: max(len(str(getattr(each, key))) for each in state.processes)  # noqa: E731
    for each in state.processes:
        why = f"  {each.why}" if each.why else ""
        restarts = f"  restarts {each.num_restarts}" if each.num_restarts else ""
        print(
            f"{each.id:<{width('id')}}  {each.state:<{width('state')}}  {each.node:<{width('node')}}  "
            f"pid {each.pid or '–'}  metrics {each.metrics or '–'}{restarts}{why}"
        )


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
