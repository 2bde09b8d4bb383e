"""Unix sockets: private folder, leftovers, the probe of a shared path, fall-back to TCP, the wait."""

from __future__ import annotations

import gc
import os
import random
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kv_transfer.frames import Ping
from kv_transfer.framing import encode
from kv_transfer.transports.stream import StreamNetwork
from kv_transfer.transports.stream_channel import MAX_QUEUED_BYTES, StreamChannel
from kv_transfer.transports.stream_dial import greeting, nonce_of
from kv_transfer.transports.unix_listener import UnixListener
from pdserve.errors import InvalidRequest
from pdserve.kv_memory import HostMemory
from tests.support.virtual_clock import VirtualClock


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="pdu") as name:
        yield Path(name)


def _network(
    folder: Path | None, *, strict: bool = False, seed: int = 1, clock: VirtualClock | None = None
) -> StreamNetwork:
    return StreamNetwork(
        memory=HostMemory(4096),
        kv_listen="127.0.0.1:0",
        unix_dir=None if folder is None else str(folder),
        prefer_unix=folder is not None,
        strict=strict,
        clock=clock or VirtualClock(),
        random=random.Random(seed),
    )


class _Sink:
    """Nothing arrives here."""

    def place(self, _data: object, _generation: int, _num_bytes: int) -> None:
        return

    def on_frame(self, _frame: object, _generation: int) -> None:
        return

    def on_unknown(self, _what: str) -> None:
        raise AssertionError

    def on_done(self, _tag: int) -> None:
        return


def _open(dialler: StreamNetwork, channel: StreamChannel, *others: StreamNetwork) -> None:
    """Turns until the channel has a transport, or has failed."""
    for _ in range(10_000):
        for network in (dialler, *others):
            network.poll()
        channel.receive(_Sink())
        if channel.transport or channel.closed_reason is not None:
            return
    raise AssertionError("neither opened nor failed")


def test_the_socket_file_is_private_and_goes_with_its_owner(folder: Path) -> None:
    network = _network(folder)
    unix, tcp = network.addresses
    path = Path(unix.removeprefix("unix://"))
    assert path.parent == folder and path.is_socket() and tcp.startswith("tcp://127.0.0.1:")
    network.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o777])
def test_a_folder_that_others_may_enter_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(InvalidRequest, match="private"):
        UnixListener.open(str(folder), random.Random(1))


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    with pytest.raises(InvalidRequest, match="private"):
        UnixListener.open(str(folder / "link"), random.Random(1))


def test_a_path_too_long_is_done_without(folder: Path) -> None:
    assert UnixListener.open(str(folder / ("x" * 100)), random.Random(1)) is None


def test_what_a_killed_worker_left_is_removed_and_what_lives_stays(folder: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(folder / "kv.0000000000000000.sock"))
    dead.close()
    (folder / "other.txt").write_text("not ours")
    living = _network(folder, seed=1)
    newer = _network(folder, seed=2)
    names = sorted(path.name for path in folder.iterdir())
    assert "kv.0000000000000000.sock" not in names and "other.txt" in names and len(names) == 3
    living.close()
    newer.close()


def test_the_shared_path_is_preferred(folder: Path) -> None:
    near, far = _network(folder, seed=1), _network(folder, seed=2)
    channel = near.dial(tuple(reversed(far.addresses)))
    _open(near, channel, far)
    assert channel.transport == "stream-unix"
    near.close()
    far.close()


def test_a_path_that_is_not_here_means_another_host(folder: Path) -> None:
    near, far = _network(folder, seed=1, strict=True), _network(None, seed=2)
    channel = near.dial(("unix:///nowhere/kv.00.sock", *far.addresses))
    _open(near, channel, far)
    assert channel.transport == "stream-tcp", "nothing was tried and failed, so strict doesn't mind"
    near.close()
    far.close()


def _impostor(folder: Path) -> tuple[str, socket.socket]:
    """A path that exists here, but leads to somebody else."""
    path = folder / "pod.00000000000000aa.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return f"unix://{path}", listener


@pytest.mark.parametrize("says", [greeting("00000000000000ab"), b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_path_that_leads_to_somebody_else_is_found_out(folder: Path, says: bytes, strict: bool) -> None:
    address, listener = _impostor(folder)
    near, far = _network(folder, seed=1, strict=strict), _network(None, seed=2)
    channel = near.dial((address, *far.addresses))
    channel.receive(_Sink())
    accepted, _ = listener.accept()
    accepted.sendall(says)
    accepted.close()
    _open(near, channel, far)
    if strict:
        assert channel.closed_reason is not None and "isn't shared" in channel.closed_reason
    else:
        assert channel.transport == "stream-tcp"
    listener.close()
    near.close()
    far.close()


def test_a_path_where_nobody_greets_is_given_up_after_a_while(folder: Path) -> None:
    clock = VirtualClock()
    address, listener = _impostor(folder)
    near, far = _network(folder, seed=1, clock=clock), _network(None, seed=2)
    channel = near.dial((address, *far.addresses))
    channel.receive(_Sink())
    due_s = near.next_due_s()
    assert due_s is not None
    clock.advance_to(due_s)
    _open(near, channel, far)
    assert channel.transport == "stream-tcp"
    listener.close()
    near.close()
    far.close()


def test_a_refused_connection_says_so() -> None:
    near = _network(None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        channel = near.dial((f"tcp://127.0.0.1:{unused.getsockname()[1]}",))
        _open(near, channel)
    assert channel.closed_reason is not None and "refused" in channel.closed_reason
    near.close()


@pytest.mark.parametrize("kv_listen", ["203.0.113.7:0", "0.0.0.0:0", "nonsense"])
def test_an_address_to_listen_on_is_checked(kv_listen: str) -> None:
    with pytest.raises(InvalidRequest):
        StreamNetwork(
            memory=HostMemory(4096),
            kv_listen=kv_listen,
            unix_dir=None,
            prefer_unix=False,
            strict=False,
            clock=VirtualClock(),
            random=random.Random(1),
        )


def test_the_nonce_is_in_the_name() -> None:
    assert nonce_of("/run/x/kv.0123456789abcdef.sock") == "0123456789abcdef"


def test_a_wake_between_the_look_at_the_queue_and_the_wait_ends_the_wait() -> None:
    network = _network(None)
    waiter = network.waiter()
    waiter.wake()
    network.poll()
    waiter.wait(None)  # would hang if poll had taken the wake away
    waiter.wake()
    waiter.wake()
    waiter.wait(None)
    network.close()
    waiter.wake()


def test_a_peer_that_never_reads_costs_bounded_memory() -> None:
    near, far = _network(None, seed=1), _network(None, seed=2)
    channel = near.dial(far.addresses)
    _open(near, channel, far)
    wire = encode(Ping(), 1) * 1000
    for _ in range(2 * MAX_QUEUED_BYTES // len(wire) + 1000):
        channel.send(wire)
        channel.flush()
    assert channel.closed_reason == "the peer doesn't read"
    near.close()
    far.close()


def test_the_end_of_a_connection_is_seen_at_once() -> None:
    near, far = _network(None, seed=1), _network(None, seed=2)
    channel = near.dial(far.addresses)
    _open(near, channel, far)
    for _ in range(10_000):
        far.poll()
        accepted = far.accept()
        if accepted:
            break
    accepted[0].close("gone")
    while channel.closed_reason is None:
        near.poll()
        channel.receive(_Sink())
    assert channel.closed_reason == "the peer closed"
    near.close()
    far.close()


def test_no_descriptor_is_left_open(folder: Path) -> None:
    gc.collect()  # or what another test has left is closed in the middle of this one
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(20):
        near, far = _network(folder, seed=2 * seed), _network(folder, seed=2 * seed + 1)
        channel = near.dial(far.addresses)
        _open(near, channel, far)
        for accepted in far.accept():
            accepted.close("done")
        channel.close("done")
        near.close()
        far.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_without_descriptors_a_listener_pauses(folder: Path, way: str) -> None:
    """What can't be accepted stays in the backlog: it must not keep the owner awake, nor fill the log."""
    clock = VirtualClock()
    network = _network(folder if way == "unix" else None, clock=clock)
    listener = network._tcp if network._unix is None else network._unix.sock
    with socket.socket(listener.family) as caller:
        caller.connect(listener.getsockname() if way == "tcp" else str(next(folder.iterdir())))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with capture_logs() as logs:
                for _ in range(100):
                    network.poll()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [each["event"] for each in logs] == ["link.accept_failed"]
        due_s = network.next_due_s()
        assert due_s is not None and due_s > clock.now_s(), "and it is looked at again"
        assert not network._selector.select(0), "nothing wakes the owner meanwhile"
        clock.advance(due_s - clock.now_s())
        network.poll()
        assert len(network.accept()) == 1 and network.next_due_s() is None
    network.close()
