"""Links over TLS: who isn't believed is refused with one line where it may be known, counted, and never waited for."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kv_transfer.transports.stream_tls import LinkTls
from pdserve.service.settings import ConfigError
from pdserve.service.tls_config import TlsConfig
from tests.contract.links.world import World, assert_handed_off, link_states
from tests.support.certificates import (
    WORKER_NAME,
    Authority,
    Signed,
    link_certificates,
    link_tls,
    needs_openssl,
)

pytestmark = needs_openssl
PROOF_ASKED_BY = "tls.ca_file"


@pytest.fixture
def world() -> Iterator[World]:
    world = World("stream-tls")
    yield world
    world.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "cluster-2")


def _wrong(what: str, cluster: Authority, folder: Path) -> Signed:
    match what:
        case "foreign":
            return Authority(folder, "foreign").sign(WORKER_NAME, "stranger")
        case "expired":
            return cluster.sign(WORKER_NAME, "old", days=-1)
        case _:
            return cluster.sign("other.test")


@pytest.mark.parametrize(
    ("what", "known_to_decode", "heard_by_prefill"),
    [
        ("foreign", "unable to get local issuer certificate", "refuses the TLS handshake: unknown ca"),
        ("expired", "certificate has expired", "refuses the TLS handshake: certificate expired"),
        ("name", f"its certificate is for other.test, not for {WORKER_NAME}", "the link broke"),
    ],
)
def test_a_prefill_worker_that_is_not_believed(
    world: World, cluster: Authority, tmp_path: Path, what: str, known_to_decode: str, heard_by_prefill: str
) -> None:
    decode = world.node("d", tls=link_tls(cluster, cluster.sign(WORKER_NAME)))
    prefill = world.node("p", tls=link_tls(cluster, _wrong(what, cluster, tmp_path)))
    with capture_logs() as logs:
        world.order(prefill, decode)
        world.run(lambda: bool(link_states(prefill, decode)))
        world.run(lambda: bool(decode.owner.metrics.unproven))
    assert heard_by_prefill in link_states(prefill, decode)[-1].reason
    refusal = next(line for line in logs if line["event"] == "link.tls_refused")
    assert refusal["log_level"] == "warning" and known_to_decode in refusal["reason"]
    assert list(decode.owner.metrics.unproven) == [PROOF_ASKED_BY]
    assert not any(line["event"] == "link.up" for line in logs)


@pytest.mark.parametrize(
    ("what", "known_to_prefill"),
    [
        ("foreign", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
        ("name", f"certificate is not valid for '{WORKER_NAME}'"),
    ],
)
def test_a_decode_worker_that_is_not_believed(
    world: World, cluster: Authority, tmp_path: Path, what: str, known_to_prefill: str
) -> None:
    """The prefill worker tells its router why, and tries again: the other may get a better certificate."""
    decode = world.node("d", tls=link_tls(cluster, _wrong(what, cluster, tmp_path)))
    prefill = world.node("p", tls=link_tls(cluster, cluster.sign(WORKER_NAME)))
    with capture_logs() as logs:
        world.order(prefill, decode)
        world.run(lambda: prefill.owner.metrics.unproven.get(PROOF_ASKED_BY, 0) >= 2)
    [state] = link_states(prefill, decode)
    assert not state.up and known_to_prefill in state.reason
    down = next(line for line in logs if line["event"] == "link.down" and line["side"] == "prefill")
    assert down["log_level"] == "info" and known_to_prefill in down["reason"]
    assert not any(line["event"] == "link.up" for line in logs)


@pytest.mark.parametrize(
    ("prefill_has", "reason"),
    [
        (False, "transport.link_tls is not set here and set there"),
        (True, "transport.link_tls is set here and not set there"),
    ],
)
def test_one_that_encrypts_and_one_that_does_not_never_speak(prefill_has: bool, reason: str) -> None:
    """Each says so by its address, so nothing is sent in plain and nobody waits."""
    world = World("stream-tcp")
    certificates = link_certificates()
    prefill = world.node("p", tls=certificates if prefill_has else None)
    decode = world.node("d", tls=None if prefill_has else certificates)
    world.order(prefill, decode)
    world.run(lambda: bool(link_states(prefill, decode)), for_s=1.0)
    assert reason in link_states(prefill, decode)[-1].reason
    assert decode.owner.metrics.links_opened == 0 and not decode.owner._links
    world.close()


def _dial(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tls://").rpartition(":")
    stranger = socket.create_connection((host, int(port)))
    stranger.settimeout(20.0)
    return stranger


def test_a_stranger_in_plain_hears_nothing_but_the_end(world: World) -> None:
    decode = world.node("d")
    with _dial(decode.owner.addresses[0]) as stranger, capture_logs() as logs:
        stranger.sendall(b"PDKV" + bytes(60))
        world.run(lambda: bool(decode.owner.metrics.unproven))
        try:
            said = stranger.recv(4096)
        except ConnectionResetError:  # the rest of what it sent was never read
            said = b""
    assert len(said) <= 7  # an alert of TLS at most
    assert [line["event"] for line in logs] == ["link.tls_refused", "link.down"]
    assert not decode.owner._links


def test_a_stranger_without_a_certificate_is_refused(world: World) -> None:
    decode = world.node("d")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with _dial(decode.owner.addresses[0]) as plain, capture_logs() as logs:
        plain.setblocking(False)
        stranger = context.wrap_socket(plain, do_handshake_on_connect=False)
        while not decode.owner.metrics.unproven:
            with contextlib.suppress(ssl.SSLWantReadError):
                stranger.do_handshake()
            world.settle()
        stranger.close()
    assert "peer did not return a certificate" in logs[0]["reason"]


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00"])
def test_a_stranger_who_stops_in_the_handshake_is_sent_away_after_link_s(world: World, said: bytes) -> None:
    decode = world.node("d")
    with _dial(decode.owner.addresses[0]) as stranger:
        stranger.sendall(said)
        world.run(lambda: bool(decode.owner._links))
        began_s = world.clock.now_s()
        world.run(lambda: not decode.owner._links, for_s=6.0)
        assert world.clock.now_s() - began_s <= 4.5


def test_strangers_in_the_handshake_are_bounded(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    strangers = []
    for _ in range(80):
        strangers.append(_dial(decode.owner.addresses[0]))
        world.sleep(0.001)
    assert (len(decode.owner._links), decode.owner.metrics.pushed_out) == (64, 16)
    world.pair(prefill, decode)
    for stranger in strangers:
        stranger.close()


def test_sockets_of_one_host_stay_without() -> None:
    world = World("memfd")
    certificates = link_certificates()
    prefill, decode = world.node("p", tls=certificates), world.node("d", tls=certificates)
    world.pair(prefill, decode)
    assert link_states(prefill, decode)[-1].transport == "memfd"
    world.close()


def test_a_changed_certificate_counts_for_the_next_link(
    world: World, cluster: Authority, tmp_path: Path
) -> None:
    """And what can't be used changes nothing."""
    used = _wrong("expired", cluster, tmp_path)
    decode = world.node("d", tls=link_tls(cluster, used))
    prefill = world.node("p", tls=link_tls(cluster, cluster.sign(WORKER_NAME)))
    world.order(prefill, decode)
    world.run(lambda: bool(link_states(prefill, decode)))
    with capture_logs() as logs:
        used.cert.write_text("broken")
        world.run(lambda: "certificates.unusable" in [line["event"] for line in logs])
        newer = cluster.sign(WORKER_NAME, "newer")
        newer.key.replace(used.key)
        newer.cert.replace(used.cert)
        world.run(lambda: link_states(prefill, decode)[-1].up)
    assert "certificates.changed" in [line["event"] for line in logs]
    sent = world.hand_off(prefill, decode, 1, num_blocks=3)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)


def test_a_running_link_goes_on_when_its_certificate_is_replaced(
    world: World, cluster: Authority, tmp_path: Path
) -> None:
    used = cluster.sign(WORKER_NAME)
    decode, prefill = (world.node(name, tls=link_tls(cluster, used)) for name in "dp")
    world.pair(prefill, decode)
    _wrong("expired", cluster, tmp_path).cert.replace(used.cert)
    sent = world.hand_off(prefill, decode, 1, num_blocks=3)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)
    assert len([state for state in link_states(prefill, decode) if state.up]) == 1


def test_an_address_is_checked_where_no_name_is_set(world: World, cluster: Authority) -> None:
    """As with routers; these certificates are for a name, so 127.0.0.1 isn't believed."""
    prefill, decode = (
        world.node(name, tls=link_tls(cluster, cluster.sign(WORKER_NAME), "")) for name in "pd"
    )
    world.order(prefill, decode)
    world.run(lambda: bool(link_states(prefill, decode)))
    assert "certificate is not valid for '127.0.0.1'" in link_states(prefill, decode)[-1].reason


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "ca_file"])
def test_what_must_be_set(missing: str) -> None:
    files = {name: "x" for name in ("cert_file", "key_file", "ca_file") if name != missing}
    with pytest.raises(ConfigError, match=r"transport\.link_tls needs"):
        LinkTls(TlsConfig(**files))


def test_files_that_cannot_be_used_are_told_at_the_start(cluster: Authority, tmp_path: Path) -> None:
    one, other = cluster.sign("one.test"), cluster.sign("other.test")
    with pytest.raises(ConfigError, match=r"can't be used"):
        LinkTls(link_tls(cluster, Signed(one.cert, other.key)))
    with pytest.raises(ConfigError, match=r"can't be used"):
        LinkTls(link_tls(cluster, Signed(tmp_path / "none", one.key)))
