"""Listeners that strangers could reach: what must be set before they are opened."""

from __future__ import annotations

import pytest

from pdserve.service.address import is_loopback
from pdserve.service.config import load
from pdserve.service.exposure import check_router, check_worker, workers_listen
from pdserve.service.settings import ConfigError


@pytest.mark.parametrize(
    ("host", "want"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
        ("[::]", False), ("10.0.0.7", False), ("[::ffff:127.0.0.1]", False), ("router.example", False),
    ],
)  # fmt: skip
def test_which_addresses_strangers_can_reach(host: str, want: bool) -> None:
    assert is_loopback(f"{host}:1") is want


@pytest.mark.parametrize(
    ("listen", "set_to", "want"),
    [
        ("127.0.0.1:50051", "", "127.0.0.1:50052"),
        ("127.0.0.1:0", "", "127.0.0.1:0"),
        ("0.0.0.0:7000", "", "127.0.0.1:7001"),
        ("0.0.0.0:7000", "10.0.0.1:9", "10.0.0.1:9"),
    ],
)
def test_the_workers_address_is_loopback_unless_it_is_set(listen: str, set_to: str, want: str) -> None:
    flags = {"router.listen": listen, "router.workers_listen": set_to}
    assert workers_listen(load(flags=flags).router) == want


def test_there_is_no_port_after_the_last() -> None:
    with pytest.raises(ConfigError, match=r"set router\.workers_listen as well"):
        workers_listen(load(flags={"router.listen": "127.0.0.1:65535"}).router)


@pytest.mark.parametrize(
    ("flags", "has_secret", "refused"),
    [
        ({}, False, ""),
        ({"router.listen": "0.0.0.0:1"}, True, "router.listen"),
        ({"router.listen": "0.0.0.0:1", "router.keys_file": "k"}, True, "router.listen"),
        ({"router.listen": "0.0.0.0:1", "tls.cert_file": "c"}, True, "router.listen"),
        ({"router.listen": "0.0.0.0:1", "tls.cert_file": "c", "router.keys_file": "k"}, False, ""),
        ({"router.workers_listen": "10.0.0.7:1"}, False, "router.workers_listen"),
        ({"router.workers_listen": "10.0.0.7:1"}, True, ""),
    ],
)
def test_a_router_that_strangers_could_use_does_not_start(
    flags: dict[str, object], has_secret: bool, refused: str
) -> None:
    if not refused:
        assert check_router(load(flags=flags), has_secret=has_secret) == []
        return
    with pytest.raises(ConfigError, match=rf"{refused} .*strangers could reach it.*--insecure"):
        check_router(load(flags=flags), has_secret=has_secret)
    insecure = load(flags={**flags, "cluster.insecure": True})
    assert check_router(insecure, has_secret=has_secret) == [refused]


def test_a_worker_that_strangers_could_send_kv_to_does_not_start() -> None:
    config = load(flags={"worker.kv_listen": "10.0.0.7:0"})
    with pytest.raises(
        ConfigError, match=r"worker\.kv_listen 10\.0\.0\.7:0.*set cluster\.secret_file or transport\.link_tls"
    ):
        check_worker(config, has_secret=False)
    assert check_worker(config, has_secret=True) == []
    encrypted = load(flags={"worker.kv_listen": "10.0.0.7:0", "transport.link_tls": True})
    assert check_worker(encrypted, has_secret=False) == [], "only holders of a certificate get in"
