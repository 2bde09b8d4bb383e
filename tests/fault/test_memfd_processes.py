"""memfd links between real processes: either end is killed, stopped or cut off in the middle of a copy."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from kv_transfer import messages
from pdserve.errors import RequestCancelled, WorkerLost
from pdserve.service.config import TimeoutsConfig
from tests.support.link_process import LAYOUT, LIMIT_S, LinkEnd, ref, start_decode, start_prefill

SHORT = TimeoutsConfig(keepalive_s=0.1, link_s=0.6, lease_s=0.8, handoff_s=1.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pdf") as name:
        yield Path(name)


@pytest.fixture
def started() -> Iterator[list[BaseProcess]]:
    """Processes to be gone afterwards, stopped or not."""
    processes: list[BaseProcess] = []
    yield processes
    for process in processes:
        process.kill()
        process.join()


def _hear(pipe: Connection) -> object:
    assert pipe.poll(LIMIT_S), "nothing came"
    return pipe.recv()


def _prefill(
    folder: Path,
    started: list[BaseProcess],
    number: int,
    decode: LinkEnd,
    timeouts: TimeoutsConfig | None = None,
) -> tuple[BaseProcess, Connection]:
    """A prefill process, linked over memfd."""
    process, pipe = start_prefill(folder, number, decode, timeouts)
    started.append(process)
    decode.until(pipe.poll)
    assert pipe.recv() == "memfd"
    return process, pipe


def _read_some(decode: LinkEnd, pipe: Connection, number: int, lease_id: int) -> None:
    """D is in the middle of reading a lease of this prefill process."""
    decode.expect_all(lease_id, ref("p", number))
    pipe.send(lease_id)
    decode.until(lambda: bool(decode.said(messages.PullProgress)))
    assert decode.said(messages.PullProgress)[-1].num_received < LAYOUT.num_blocks


def _ends(decode: LinkEnd, lease_id: int) -> list[object]:
    ends = (messages.HandedOff, messages.Retired)
    return [said for said in decode.seen if isinstance(said, ends) and said.lease_id == lease_id]


def _hands_off(decode: LinkEnd, pipe: Connection, number: int, lease_id: int) -> None:
    """A whole lease, right to the last byte."""
    decode.expect_all(lease_id, ref("p", number))
    pipe.send(lease_id)
    decode.until(lambda: bool(_ends(decode, lease_id)))
    [end] = _ends(decode, lease_id)
    assert isinstance(end, messages.HandedOff), end
    assert decode.holds_all_of(number)
    decode.until(pipe.poll)
    assert pipe.recv() == ""


def _num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


def test_a_prefill_worker_killed_in_mid_copy(folder: Path, started: list[BaseProcess]) -> None:
    decode = LinkEnd(ref("d", 1), folder)
    before = _num_mapped()
    process, pipe = _prefill(folder, started, 1, decode)
    _read_some(decode, pipe, 1, lease_id=1)
    process.kill()
    process.join()
    decode.until(lambda: bool(_ends(decode, 1)))
    [end] = _ends(decode, 1)
    assert isinstance(end, messages.Retired) and isinstance(end.error, WorkerLost) and not end.quarantine
    assert _num_mapped() == before
    _process, pipe = _prefill(folder, started, 2, decode)
    _hands_off(decode, pipe, 2, lease_id=2)
    decode.owner.close()


def test_a_prefill_worker_stopped_in_mid_copy_and_continued(folder: Path, started: list[BaseProcess]) -> None:
    """All is read without its doing anything; only its CONFIRM is missing, and comes when it goes on."""
    decode = LinkEnd(ref("d", 1), folder)
    process, pipe = _prefill(folder, started, 1, decode)
    _read_some(decode, pipe, 1, lease_id=1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    decode.until(lambda: decode.said(messages.PullProgress)[-1].num_received == LAYOUT.num_blocks)
    assert not _ends(decode, 1), "nothing runs on what isn't confirmed"
    os.kill(process.pid, signal.SIGCONT)
    decode.until(lambda: bool(_ends(decode, 1)))
    assert isinstance(_ends(decode, 1)[0], messages.HandedOff) and decode.holds_all_of(1)
    decode.owner.close()


def test_a_prefill_worker_stopped_for_too_long(folder: Path, started: list[BaseProcess]) -> None:
    decode = LinkEnd(ref("d", 1), folder, SHORT)
    process, pipe = _prefill(folder, started, 1, decode, SHORT)
    _read_some(decode, pipe, 1, lease_id=1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    decode.until(lambda: bool(_ends(decode, 1)))
    [end] = _ends(decode, 1)
    assert isinstance(end, messages.Retired) and isinstance(end.error, WorkerLost)
    os.kill(process.pid, signal.SIGCONT)
    decode.until(pipe.poll)
    pipe.recv()  # it may confirm what was read, or not: it held its blocks; the decode worker has had its say
    decode.until(lambda: decode.owner.metrics.links_up == 1)
    _hands_off(decode, pipe, 1, lease_id=2)
    decode.owner.close()


def test_the_link_is_cut_in_mid_copy(folder: Path, started: list[BaseProcess]) -> None:
    decode = LinkEnd(ref("d", 1), folder)
    _process, pipe = _prefill(folder, started, 1, decode)
    _read_some(decode, pipe, 1, lease_id=1)
    [link] = decode.owner._links
    link._channel._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    decode.until(lambda: bool(_ends(decode, 1)))
    assert isinstance(_ends(decode, 1)[0], messages.Retired)
    decode.until(pipe.poll)
    assert pipe.recv() != ""
    decode.until(lambda: decode.owner.metrics.links_up == 1)
    _hands_off(decode, pipe, 1, lease_id=2)
    decode.owner.close()


def _decode_in_mid_copy(
    folder: Path, started: list[BaseProcess], prefill: LinkEnd, number: int, lease_id: int
) -> tuple[BaseProcess, Connection]:
    """A decode process that has read some of a lease, and stands still."""
    process, pipe = start_decode(folder, number, stops_at=LAYOUT.num_blocks // 4)
    started.append(process)
    addresses = _hear(pipe)
    assert isinstance(addresses, tuple)
    prefill.owner.handle(messages.OrderLink(1, ref("d", number), addresses))
    prefill.until(lambda: prefill.owner.metrics.links_up >= 1 and prefill.said(messages.LinkState)[-1].up)
    assert prefill.said(messages.LinkState)[-1].transport == "memfd"
    pipe.send((lease_id, prefill.me))
    prefill.offer_all(lease_id, ref("d", number))
    prefill.until(pipe.poll)
    assert pipe.recv() == "reading"
    return process, pipe


def test_a_decode_worker_killed_in_mid_copy(folder: Path, started: list[BaseProcess]) -> None:
    prefill = LinkEnd(ref("p", 1), folder)
    prefill.fill(1)
    process, _pipe = _decode_in_mid_copy(folder, started, prefill, 1, lease_id=1)
    process.kill()
    process.join()
    prefill.until(lambda: bool(prefill.said(messages.LeaseClosed)))
    [closed] = prefill.said(messages.LeaseClosed)
    assert isinstance(closed.error, WorkerLost) and closed.link_lost
    prefill.owner.handle(messages.CancelLink(1, ref("d", 1)))
    process, pipe = _decode_in_mid_copy(folder, started, prefill, 2, lease_id=2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    prefill.until(pipe.poll)
    assert pipe.recv() is True, "the same blocks, read by another"
    prefill.owner.close()


def test_a_decode_worker_stopped_in_mid_copy_while_its_blocks_are_reused(
    folder: Path, started: list[BaseProcess]
) -> None:
    """P doesn't wait for it: what it reads late is never confirmed."""
    prefill = LinkEnd(ref("p", 1), folder)
    prefill.fill(1)
    process, pipe = _decode_in_mid_copy(folder, started, prefill, 1, lease_id=1)
    prefill.owner.handle(messages.WithdrawLease(1, RequestCancelled("gone")))
    assert [closed.lease_id for closed in prefill.said(messages.LeaseClosed)] == [1]
    prefill.fill(9)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    prefill.until(pipe.poll)
    assert pipe.recv() == "RequestCancelled"
    assert prefill.owner.metrics.confirmed_leases == 0
    prefill.owner.close()
