"""The layout of a local cluster: command lines, addresses, cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.plan import ClusterPlan, Layout, ProcessSpec, Shape, dialled, divide_cores
from pdserve.service.config import Config, load
from pdserve.service.settings import ConfigError


class CountingPorts:
    """Hands out 40001, 40002, … for 0, and notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def reserve(self, host: str, port: int) -> int:
        self.asked.append((host, port))
        return port or 40_000 + len(self.asked)


def plan_of(
    shape: Shape, config: Config | None = None, flags: dict[str, object] | None = None, num_cores: int = 2
) -> ClusterPlan:
    return Layout(
        shape,
        config or Config(),
        config_file=None,
        flags=flags or {},
        cores=range(num_cores),
        environ={},
        reserve=CountingPorts().reserve,
        draw_secret=lambda port: Path(f"/private/secret.{port}"),
    ).plan


def flags_of(spec: ProcessSpec) -> dict[str, str]:
    return dict(part[2:].split("=", 1) for part in spec.command if part.startswith("--") and "=" in part)


def command_of(spec: ProcessSpec) -> str:
    return spec.command[spec.command.index("pdserve.cli") + 1]


def test_one_router_and_a_process_for_each_worker_in_the_order_of_roles() -> None:
    plan = plan_of(Shape(num_prefill=1, num_decode=2, num_both=1))
    assert [spec.id for spec in plan.processes] == ["router", "prefill-0", "decode-0", "decode-1", "both-0"]
    assert [command_of(spec) for spec in plan.processes] == [
        "router",
        "prefill",
        "decode",
        "decode",
        "worker",
    ]
    assert flags_of(plan.workers[3])["worker.role"] == "both"


def test_workers_dial_the_router_where_it_listens_and_metrics_addresses_differ() -> None:
    plan = plan_of(Shape(num_prefill=1, num_decode=1), load(flags={"router.listen": "0.0.0.0:7000"}))
    assert plan.target == "127.0.0.1:7000"
    assert flags_of(plan.router)["router.listen"] == "0.0.0.0:7000"
    assert flags_of(plan.router)["router.workers-listen"] == "127.0.0.1:7001"
    assert {flags_of(spec)["worker.routers"] for spec in plan.workers} == {"127.0.0.1:7001"}
    assert plan.operators == "127.0.0.1:7001"
    assert len({spec.metrics for spec in plan.processes}) == 3


def test_workers_dial_where_they_are_listened_for() -> None:
    config = load(flags={"router.workers_listen": "0.0.0.0:7005"})
    plan = plan_of(Shape(num_both=1), config)
    assert flags_of(plan.router)["router.workers-listen"] == "0.0.0.0:7005"
    assert flags_of(plan.workers[0])["worker.routers"] == plan.operators == "127.0.0.1:7005"


def test_all_processes_have_one_secret_drawn_unless_one_is_set() -> None:
    plan = plan_of(Shape(num_prefill=1, num_decode=1))
    assert {flags_of(spec)["cluster.secret-file"] for spec in plan.processes} == {"/private/secret.50052"}
    assert plan.secret_file == "/private/secret.50052"
    own = plan_of(Shape(num_both=1), load(flags={"cluster.secret_file": "/etc/s"}))
    assert {flags_of(spec)["cluster.secret-file"] for spec in own.processes} == {"/etc/s"}


def test_workers_that_read_weights_get_huge_pages_for_them() -> None:
    shape = Shape(num_prefill=1, num_decode=1)
    plan = plan_of(shape)
    assert [spec.environ.get("GLIBC_TUNABLES") for spec in plan.processes] == [
        None,
        *["glibc.malloc.hugetlb=1"] * 2,
    ]
    fake = plan_of(shape, load(flags={"engine.kind": "fake"}))
    assert not any("GLIBC_TUNABLES" in spec.environ for spec in fake.processes)


def test_the_router_reads_the_tokenizer_itself_while_the_workers_load() -> None:
    shape = Shape(num_prefill=1, num_decode=1)

    def router_model(**flags: object) -> str:
        config = load(flags={name.replace("__", "."): value for name, value in flags.items()})
        return flags_of(plan_of(shape, config).router)["router.model"]

    assert router_model(worker__model="m") == "m"
    assert router_model(worker__model="m", router__model="other") == "other"
    assert router_model(engine__kind="fake") == ""


def test_a_free_port_is_reserved_for_port_zero() -> None:
    plan = plan_of(Shape(num_both=1), load(flags={"router.listen": "127.0.0.1:0"}))
    assert plan.target == "127.0.0.1:40001"
    assert plan.operators == "127.0.0.1:40002"
    assert plan.http == "http://127.0.0.1:40003"
    assert plan.router.metrics == "127.0.0.1:40004"


def test_a_given_metrics_port_is_the_first_of_a_row() -> None:
    plan = plan_of(Shape(num_prefill=1, num_decode=1), load(flags={"metrics.listen": "0.0.0.0:9100"}))
    assert [spec.metrics for spec in plan.processes] == ["127.0.0.1:9100", "127.0.0.1:9101", "127.0.0.1:9102"]
    assert flags_of(plan.workers[1])["metrics.listen"] == "0.0.0.0:9102"


def test_settings_go_on_to_every_child_and_the_supervisors_own_win() -> None:
    flags: dict[str, object] = {"engine.kind": "fake", "engine.deterministic": True, "worker.id": "mine"}
    plan = Layout(
        Shape(num_both=2),
        Config(),
        config_file=Path("/etc/pdserve.toml"),
        flags=flags,
        cores=range(2),
        environ={},
        reserve=CountingPorts().reserve,
        draw_secret=lambda port: Path(f"/private/secret.{port}"),
    ).plan
    for spec in plan.processes:
        assert spec.command[spec.command.index("--config") + 1] == "/etc/pdserve.toml"
        assert flags_of(spec)["engine.kind"] == "fake"
        assert flags_of(spec)["engine.deterministic"] == "true"
    assert [flags_of(spec)["worker.id"] for spec in plan.workers] == ["both-0", "both-1"]


def test_the_childrens_flags_are_read_back_by_the_configuration() -> None:
    plan = plan_of(Shape(num_prefill=1, num_decode=1), flags={"worker.routers": ("a:1", "b:2")})
    for spec in plan.processes:
        assert load(flags=dict(flags_of(spec))).worker.routers


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (Shape(), "decode"),
        (Shape(num_prefill=2), "decode"),
        (Shape(num_decode=1), "prefill"),
        (Shape(num_prefill=-1, num_decode=1), "negative"),
    ],
)
def test_a_shape_that_could_not_serve_is_refused(shape: Shape, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        plan_of(shape)


def test_decode_alone_serves_if_it_may_prefill() -> None:
    plan = plan_of(Shape(num_decode=1), load(flags={"router.allow_local_prefill": "true"}))
    assert len(plan.workers) == 1


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "asked", "threads", "pinned"),
    [
        (2, 2, 0, 1, False),
        (2, 1, 0, 2, True),
        (1, 3, 0, 1, False),
        (16, 4, 0, 4, True),
        (16, 4, 2, 2, True),
        (16, 4, 8, 8, False),
        (7, 3, 0, 2, True),
        (4, 0, 0, 0, False),
    ],
)
def test_cores_are_divided_evenly(
    num_cores: int, num_workers: int, asked: int, threads: int, pinned: bool
) -> None:
    shares = divide_cores(range(num_cores), num_workers, asked)
    assert len(shares) == num_workers
    assert all(share.num_threads == threads for share in shares)
    assert all(bool(share.cores) == pinned for share in shares)
    given = [core for share in shares for core in share.cores]
    assert len(given) == len(set(given)) <= num_cores


def test_listening_on_all_addresses_is_dialled_on_loopback() -> None:
    assert dialled("0.0.0.0:1") == "127.0.0.1:1"
    assert dialled("[::]:1") == "[::1]:1"
    assert dialled("10.0.0.1:1") == "10.0.0.1:1"
