"""Links over memfd: chosen where both prefer it and share a host, given up with the reason where it can't be."""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kv_transfer import messages
from kv_transfer.metrics import TransferMetrics
from pdserve.errors import WorkerLost
from pdserve.kv_memory import HostMemory
from tests.contract.links.world import LAYOUT, Node, World, assert_handed_off, facts, link_states

BOTH = ("memfd", "stream")


@pytest.fixture
def world() -> Iterator[World]:
    world = World("memfd")
    yield world
    world.close()


def _hand_off(world: World, prefill: Node, decode: Node, transport: str) -> None:
    """A whole hand-off over this transport."""
    world.pair(prefill, decode)
    assert link_states(prefill, decode)[-1].transport == transport
    sent = world.hand_off(prefill, decode, 1, num_blocks=5)
    world.wait_ends(1, prefill, decode)
    assert_handed_off(prefill, decode, 1, sent)
    [handed_off] = decode.events(messages.HandedOff)
    assert handed_off.transport == transport


def test_the_decode_worker_reads_and_the_prefill_worker_sends_nothing(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    _hand_off(world, prefill, decode, "memfd")
    assert prefill.owner.metrics.sent_bytes == 0
    assert decode.owner.metrics.received_bytes == 5 * LAYOUT.block_bytes


@pytest.mark.parametrize(
    ("prefill_kinds", "decode_kinds", "want"),
    [
        (BOTH, ("stream", "memfd"), "memfd"),
        (("stream", "memfd"), BOTH, "stream-unix"),
        (BOTH, ("stream",), "stream-unix"),
        (("stream",), BOTH, "stream-unix"),
        (BOTH, None, "stream-unix"),
        (None, BOTH, "stream-unix"),
        (("memfd",), ("memfd",), "memfd"),
    ],
)
def test_the_prefill_workers_first_that_both_offer_is_used(
    world: World, prefill_kinds: tuple[str, ...] | None, decode_kinds: tuple[str, ...] | None, want: str
) -> None:
    prefill = world.node("p", link_facts=facts(transports=prefill_kinds or ("stream",)))
    decode = world.node("d", link_facts=facts(transports=decode_kinds or ("stream",)))
    _hand_off(world, prefill, decode, want)


@pytest.mark.parametrize("older", ["p", "d"])
def test_a_peer_of_the_minor_before_gets_a_stream(world: World, older: str) -> None:
    old = facts(wire=(1, 0))
    prefill, decode = (
        world.node(name, link_facts=old if name == older else facts(transports=BOTH)) for name in ("p", "d")
    )
    _hand_off(world, prefill, decode, "stream-unix")


def test_between_hosts_it_is_a_stream_and_no_failure(world: World) -> None:
    prefill = world.node("p", prefer_unix=False, strict=True)
    decode = world.node("d", prefer_unix=False, strict=True)
    with capture_logs() as logs:
        _hand_off(world, prefill, decode, "stream-tcp")
    assert not [line for line in logs if line["event"] == "link.fell_back"]


@pytest.mark.parametrize("kinds", [(("memfd",), ("stream",)), (("stream",), ("memfd",))])
def test_nothing_in_common_is_a_misfit(world: World, kinds: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    prefill, decode = (
        world.node(name, link_facts=facts(transports=offered)) for name, offered in zip("pd", kinds)
    )
    assert "field=transports" in _down_reason(world, prefill, decode)


def test_memfd_alone_needs_one_host(world: World) -> None:
    only = facts(transports=("memfd",))
    prefill, decode = (world.node(name, link_facts=only, prefer_unix=False) for name in "pd")
    assert "no transport that both offer works here" in _down_reason(world, prefill, decode)


# --- what may come instead of the pool


class _Strange(HostMemory):
    """A pool whose owner passes something else."""

    def __init__(self, num_bytes: int, make: Callable[[int], int]) -> None:
        super().__init__(num_bytes)
        self._descriptor = make(num_bytes)

    def export(self, transport: str) -> int | None:
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _regular_file(num_bytes: int) -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        return os.dup(file.fileno())


def _unsealed(num_bytes: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def _truncated(num_bytes: int) -> int:
    descriptor = _unsealed(num_bytes // 2)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _closed(_num_bytes: int) -> int:
    return -1


STRANGE = [
    (_regular_file, "not a memfd"),
    (_unsealed, "not sealed"),
    (_truncated, "another size"),
    (_closed, "want one descriptor"),
]


@pytest.mark.parametrize(("make", "reason"), STRANGE)
def test_what_is_no_pool_is_said_and_the_bytes_go_over_the_stream(
    world: World, make: Callable[[int], int], reason: str
) -> None:
    memory = _Strange(LAYOUT.pool_bytes, make)
    prefill, decode = world.node("p", memory=memory), world.node("d")
    before = len(os.listdir("/proc/self/fd"))
    with capture_logs() as logs:
        _hand_off(world, prefill, decode, "stream-unix")
    told = [line["because"] for line in logs if line["event"] == "link.fell_back"]
    assert len(told) == 2 and all(reason in text for text in told), "both sides know why"
    assert prefill.owner.metrics.fell_back == {"d": 1} and decode.owner.metrics.fell_back == {"p": 1}
    world.kill(prefill)
    world.run(lambda: not decode.owner._links)
    assert len(os.listdir("/proc/self/fd")) <= before, "every descriptor that came was closed"
    memory.close()


@pytest.mark.parametrize("strict", ["p", "d"])
@pytest.mark.parametrize(("make", "reason"), STRANGE)
def test_under_strict_the_pair_is_down_with_the_reason(
    world: World, strict: str, make: Callable[[int], int], reason: str
) -> None:
    memory = _Strange(LAYOUT.pool_bytes, make)
    prefill = world.node("p", memory=memory, strict=strict == "p")
    decode = world.node("d", strict=strict == "d")
    told = _down_reason(world, prefill, decode)
    assert "the preferred transport failed" in told and reason in told
    memory.close()


def _down_reason(world: World, prefill: Node, decode: Node) -> str:
    world.order(prefill, decode)
    world.run(lambda: bool(link_states(prefill, decode)))
    [state] = link_states(prefill, decode)
    assert not state.up
    return state.reason


# --- nothing is left behind


def test_a_thousand_links_leave_no_descriptor_and_no_mapping(world: World) -> None:
    prefill, decode = world.node("p"), world.node("d")
    _hand_off(world, prefill, decode, "memfd")
    world.settle()
    gc.collect()
    before = _held()
    ends = (decode.owner.metrics, prefill.owner.metrics)
    for opened in range(2, 1002):
        decode.owner._links[0].end(WorkerLost("the test ends it"))
        world.run(functools.partial(_all_opened, ends, opened))
    world.settle()
    gc.collect()
    assert _held() == before


def _all_opened(ends: tuple[TransferMetrics, ...], opened: int) -> bool:
    return all(metrics.links_opened == opened for metrics in ends)


def _held() -> tuple[int, int]:
    """Descriptors of this process, and mappings of pools."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")
