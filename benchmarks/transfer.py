"""How fast KV blocks move between two worker processes on this host, over each transport, beside a plain copy.

    python -m benchmarks.transfer [--block-kib 256] [--blocks 512] [--rounds 15] [--json]

Two processes with a transfer owner each, as in workers: P offers a lease of that many blocks, D takes them in. A rate
is bytes over the time from D's first pull to its last byte. CPU seconds are each process's own, per GB moved. `memcpy`
copies as many blocks of the same size inside one process, just before and after each round, so that both meet the same
machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import multiprocessing
import random
import resource
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import structlog

from kv_transfer import messages
from kv_transfer.link_facts import LinkFacts
from kv_transfer.owner import TransferOwner
from kv_transfer.transports.stream import StreamNetwork
from kv_transfer.transports.stream_tls import LinkTls
from pdserve.clock import SystemClock
from pdserve.engine.layout import KvLayout
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.memfd import MemfdMemory
from pdserve.service.config import TimeoutsConfig, TransportConfig
from pdserve.service.tls_config import TlsConfig

CLOCK = SystemClock()
TRANSPORTS = ("memfd", "stream-unix", "stream-tcp", "stream-tls")
P, D = WorkerRef("p", Epoch(1, 1)), WorkerRef("d", Epoch(1, 2))
_HEAD_BYTES = 2 * 16 * 64 * 2  # a KV head of a layer: K and V of 16 positions of 64 values of 2 bytes
_LIMIT_S = 60.0
_TLS_NAME = "bench.test"

E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One transport, medians over the rounds. spread: lowest and highest rate; ratios are to that round's memcpy."""

    transport: str
    block_kib: int
    gb_per_s: float
    spread: tuple[float, float]
    of_memcpy: float
    of_memcpy_spread: tuple[float, float]
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float
    n: int


class End:
    """One worker's transfer owner, driven by whoever calls `until`."""

    def __init__(self, me: WorkerRef, layout: KvLayout, transport: str, folder: Path) -> None:
        kinds = ("memfd", "stream") if transport == "memfd" else ("stream",)
        make: type[HostMemory] = MemfdMemory if transport == "memfd" else HostMemory
        self.memory = make(layout.pool_bytes)
        ctypes.memset(_address(self.memory), 1 if me is P else 2, layout.pool_bytes)
        self.network = StreamNetwork(
            memory=self.memory,
            kv_listen="127.0.0.1:0",
            unix_dir=str(folder),
            prefer_unix=transport not in ("stream-tcp", "stream-tls"),
            strict=True,
            clock=CLOCK,
            random=random.Random(me.epoch.nonce),
            tls=_tls(folder) if transport == "stream-tls" else None,
        )
        self.seen: list[object] = []
        self.owner = TransferOwner(
            me=me,
            facts=LinkFacts(
                layout_json=layout.wire_json(),
                weights_fingerprint="w",
                tokenizer_fingerprint="t",
                numerics="n",
                checksums=self.memory.checksums,
                transports=kinds,
            ),
            pool=self.memory,
            layout=layout,
            network=self.network,
            timeouts=TimeoutsConfig(),
            config=TransportConfig(kinds=kinds, strict=True),
            clock=CLOCK,
            random=random.Random(me.epoch.nonce),
            to_engine=self.seen.append,
            to_loop=self.seen.append,
            secret=None,
        )

    def until(self, kind: type[E]) -> E:
        """Turns until the owner has said this; nothing said before is looked at again."""
        waiter, limit_s = self.network.waiter(), CLOCK.now_s() + _LIMIT_S
        while CLOCK.now_s() < limit_s:
            while self.seen:
                said = self.seen.pop(0)
                if isinstance(said, kind):
                    return said
            wait_s = self.owner.step()
            if not self.seen:
                waiter.wait(1.0 if wait_s is None else min(wait_s, 1.0))
        raise TimeoutError(kind.__name__)


def _send(pipe: Connection, transport: str, layout: KvLayout, folder: Path, decode: tuple[str, ...]) -> None:
    """The prefill worker's process: a lease for each number that comes, and what it cost."""
    _quiet()
    end = End(P, layout, transport, folder)
    end.owner.handle(messages.OrderLink(1, D, decode))
    state = end.until(messages.LinkState)
    pipe.send(state.transport if state.up else state.reason)
    while (lease_id := pipe.recv()) is not None:
        blocks = random.Random(lease_id).sample(range(layout.num_blocks), layout.num_blocks)
        before_s = _cpu_s()
        end.owner.handle(messages.OpenLease(lease_id, D, len(blocks), 0))
        end.owner.handle(messages.Offer(lease_id, len(blocks), tuple(blocks)))
        end.owner.handle(messages.CommitLease(lease_id, 7, None))
        closed = end.until(messages.LeaseClosed)
        assert closed.error is None, closed
        pipe.send(_cpu_s() - before_s)
    end.owner.close()


def measure(transport: str, layout: KvLayout, num_rounds: int, folder: Path) -> Moved:
    """One transport; the first round warms up and doesn't count."""
    end = End(D, layout, transport, folder)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(theirs, transport, layout, folder, end.owner.addresses))
    sender.start()
    while not ours.poll():
        end.owner.step()
        end.network.waiter().wait(0.01)
    spoken = ours.recv()
    assert spoken == transport, spoken
    rates: list[float] = []
    ratios: list[float] = []
    costs: list[tuple[float, float]] = []
    for lease_id in range(1, num_rounds + 2):
        before = _memcpy_gb_per_s(layout)
        blocks = random.Random(-lease_id).sample(range(layout.num_blocks), layout.num_blocks)
        before_s = _cpu_s()
        end.owner.handle(messages.ExpectLease(lease_id, P, 0, tuple(blocks)))
        ours.send(lease_id)
        handed_off = end.until(messages.HandedOff)
        mine_s = _cpu_s() - before_s
        rates.append(layout.pool_bytes / handed_off.transfer_s / 1e9)
        ratios.append(2 * rates[-1] / (before + _memcpy_gb_per_s(layout)))
        costs.append((ours.recv(), mine_s))
    ours.send(None)
    sender.join()
    end.owner.close()
    del rates[0], ratios[0], costs[0]
    gb = layout.pool_bytes / 1e9
    return Moved(
        transport=transport,
        block_kib=layout.block_bytes >> 10,
        gb_per_s=statistics.median(rates),
        spread=(min(rates), max(rates)),
        of_memcpy=statistics.median(ratios),
        of_memcpy_spread=(min(ratios), max(ratios)),
        sender_cpu_s_per_gb=statistics.median(sent for sent, _ in costs) / gb,
        receiver_cpu_s_per_gb=statistics.median(received for _, received in costs) / gb,
        n=len(rates),
    )


class _Copies:
    """Two pools in this process, made once."""

    made: tuple[HostMemory, HostMemory] | None = None


def _memcpy_gb_per_s(layout: KvLayout) -> float:
    """As many blocks, as scattered, by memcpy."""
    if _Copies.made is None:
        _Copies.made = HostMemory(layout.pool_bytes), HostMemory(layout.pool_bytes)
        for memory in _Copies.made:
            ctypes.memset(_address(memory), 3, layout.pool_bytes)
    source, target = (_address(memory) for memory in _Copies.made)
    size, draw = layout.block_bytes, random.Random(1)
    order = draw.sample(range(layout.num_blocks), layout.num_blocks)
    places = draw.sample(range(layout.num_blocks), layout.num_blocks)
    began_s = CLOCK.now_s()
    for start, place in zip(order, places):
        ctypes.memmove(target + place * size, source + start * size, size)
    return layout.pool_bytes / (CLOCK.now_s() - began_s) / 1e9


def _address(memory: HostMemory) -> int:
    return memory.address(ByteSpan(0, memory.num_bytes))


def _tls(folder: Path) -> LinkTls:
    """One certificate for both ends, its own authority; made with the openssl command."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    if not cert.exists():
        made = (
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
        )
        named = ("-subj", f"/CN={_TLS_NAME}", "-addext", f"subjectAltName=DNS:{_TLS_NAME}")
        subprocess.run((*made, *named, "-keyout", key, "-out", cert), check=True, capture_output=True)
    files = TlsConfig(cert_file=str(cert), key_file=str(key), ca_file=str(cert), worker_name=_TLS_NAME)
    return LinkTls(files)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _layout(block_kib: int, num_blocks: int) -> KvLayout:
    layers = max(1, (block_kib << 10) // _HEAD_BYTES)
    return KvLayout(
        num_blocks=num_blocks,
        kv_heads=1,
        layers=layers,
        block_size=16,
        head_dim=64,
        dtype="bfloat16",
        item_bytes=2,
    )


def _cpu_line() -> str:
    """Model of the CPU and what it can do."""
    lines: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        lines[name.strip()] = value.strip()
    has = lines.get("flags", "").split()
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "erms", "fsrm") if flag in has]
    return f"{lines.get('model name', 'unknown')}; {' '.join(flags)}"


def _quiet() -> None:
    """Only what is wrong is logged beside the table."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block-kib", type=int, default=256, help="size of a block")
    parser.add_argument("--blocks", type=int, default=512, help="blocks of a lease, and of each pool")
    parser.add_argument("--rounds", type=int, default=15, help="leases that count")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only these")
    parser.add_argument("--json", action="store_true", help="one JSON object a transport")
    options = parser.parse_args(arguments)
    _quiet()
    layout = _layout(options.block_kib, options.blocks)
    if not options.json:
        say(f"{_cpu_line()}\n{layout.num_blocks} blocks of {layout.block_bytes >> 10} KiB a lease")
        say(
            f"{'':12}{'GB/s':>7}{'(spread)':>16}{'of memcpy':>11}{'(spread)':>14}"
            f"{'P CPU s/GB':>12}{'D CPU s/GB':>12}{'n':>4}"
        )
    with tempfile.TemporaryDirectory(prefix="pdb") as name:
        for transport in options.transport or TRANSPORTS:
            moved = measure(transport, layout, options.rounds, Path(name))
            if options.json:
                say(json.dumps(asdict(moved)))
                continue
            low, high = moved.spread
            least, most = moved.of_memcpy_spread
            say(
                f"{transport:12}{moved.gb_per_s:7.2f}{f'({low:.2f}-{high:.2f})':>16}{moved.of_memcpy:11.2f}"
                f"{f'({least:.2f}-{most:.2f})':>14}{moved.sender_cpu_s_per_gb:12.4f}{moved.receiver_cpu_s_per_gb:12.4f}"
                f"{moved.n:4}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
