"""P and D as two processes, over CUDA IPC, NCCL, or a stream through pinned memory, of which one may be a CPU's: three
sizes beside a copy, either killed meanwhile, paired again."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pdserve.clock import SystemClock
from pdserve.engine.layout import KvLayout
from scripts.gpu.link_end import ref, run_end
from scripts.gpu.place import GpuPlace

_CLOCK = SystemClock()
_LIMIT_S = 30.0
_ROUNDS = 5
_UNSOUND = 1  # how an owner that raised ends here; in a worker it is exit code 4


def check_links(place: GpuPlace, kind: str, on_cpu: str = "") -> dict[str, Any]:
    """on_cpu: "p" or "d", whose pool lies there (stream).

    Raises AssertionError where a byte is wrong, a pair doesn't come up (again), or a lease isn't ended.
    """
    layout = _layout(place, kind)
    folder = place.folder / f"links-{kind}-{place.prefill}-{place.decode}{on_cpu}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found: dict[str, Any] = {"block_kib": layout.block_bytes >> 10, "sizes": []}
    with _pair(place, kind, layout, folder, on_cpu) as pair:
        found["paired_s"] = pair.connect()
        found["copy_gb_per_s"] = copy = _copy_gb_per_s(place, layout)
        for part in (64, 8, 1):
            moved = [pair.hand_off(max(1, layout.num_blocks // part)) for _ in range(_ROUNDS)]
            rates = [each["bytes"] / each["s"] / 1e9 for each in moved if each["s"] > 0]
            rate = statistics.median(rates) if rates else 0.0
            found["sizes"].append(
                {"bytes": moved[0]["bytes"], "gb_per_s": rate, "of_copy": rate / copy, "n": len(rates)}
            )
        found["prefill_killed"] = pair.kill("p")
        found["decode_killed"] = pair.kill("d")
    return found


class _Pair:
    """Both ends; each process that is started takes the next number."""

    def __init__(self, place: GpuPlace, kind: str, layout: KvLayout, folder: Path, on_cpu: str) -> None:
        self._on_cpu = on_cpu
        self._place = place
        self._kind = kind
        self._layout = layout
        self._folder = folder
        self._numbers = {"p": 0, "d": 0}
        self._lease_id = 0
        self.processes: dict[str, BaseProcess] = {}
        self._pipes: dict[str, Connection] = {}
        self._addresses: tuple[str, ...] = ()

    def start(self, role: str) -> None:
        """A new process in this role."""
        self._numbers[role] += 1
        # A server that has imported all of it forks them: torch alone takes two seconds of a CPU.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["scripts.gpu.link_end"])
        self._pipes[role], theirs = context.Pipe()
        gpu, environ = None, dict[str, str]()
        if self._place.is_dry:
            environ["PDSERVE_STAGING"] = "" if role == self._on_cpu else "double"
        elif role != self._on_cpu:
            gpu = self._place.prefill if role == "p" else self._place.decode
            # NCCL takes two processes on one GPU for a mistake, unless they seem to be on two hosts.
            environ["NCCL_HOSTID"] = role if self._place.prefill == self._place.decode else "one"
        process = self.processes[role] = context.Process(
            target=run_end,
            args=(theirs, role, self._numbers[role], self._kind, self._layout, gpu, environ, self._folder),
        )
        process.start()
        theirs.close()
        (addresses,) = self._hear(role, "addresses")
        if role == "d":
            self._addresses = addresses

    def connect(self) -> float:
        """Pair those that run now; seconds until P says that it is up."""
        began_s = _CLOCK.now_s()
        self._pipes["p"].send(("pair", ref("d", self._numbers["d"]), self._addresses))
        transport, reason = self._hear("p", "up")
        while not transport:  # the last peer's end, or a first try that failed
            assert _CLOCK.now_s() < began_s + _LIMIT_S, reason
            transport, reason = self._hear("p", "up")
        assert transport.startswith(self._kind), (transport, reason)
        return _CLOCK.now_s() - began_s

    def hand_off(self, num_blocks: int) -> dict[str, Any]:
        """A whole lease, each byte right."""
        self._begin(num_blocks)
        moved: dict[str, Any] = self._end_of("d")
        assert moved.get("right") is True and moved["transport"].startswith(self._kind), moved
        closed = self._end_of("p")
        assert closed["error"] == "", closed
        return moved

    def kill(self, role: str) -> dict[str, Any]:
        """SIGKILL this end in the middle of a lease over the whole pool; then a new process, and a hand-off."""
        other = "d" if role == "p" else "p"
        self._begin(self._layout.num_blocks)
        self._hear("d", "begun")
        self.processes[role].kill()
        self.processes[role].join()
        killed_s = _CLOCK.now_s()
        found: dict[str, Any] = {"other_lives": True}
        try:
            ended = self._end_of(other)
            found |= {
                "noticed_s": _CLOCK.now_s() - killed_s,
                "lease": ended.get("error", "handed off before"),
            }
            if other == "d" or self._kind != "cuda_ipc":
                (found["freed_s"],) = self._hear(other, "freed")
        except EOFError:  # its device was broken by it: a worker's supervisor would start another
            self.processes[other].join()
            found |= {"other_lives": False, "exit_code": self.processes[other].exitcode}
            assert self.processes[other].exitcode == _UNSOUND, found
            self.start(other)
        self.start(role)
        found["paired_again_s"] = self.connect()
        self.hand_off(self._layout.num_blocks)
        return found

    def _begin(self, num_blocks: int) -> None:
        self._lease_id += 1
        self._pipes["d"].send(("expect", self._lease_id, num_blocks, ref("p", self._numbers["p"])))
        self._pipes["p"].send(("offer", self._lease_id, num_blocks))

    def _end_of(self, role: str) -> dict[str, Any]:
        while True:
            lease_id, found = self._hear(role, "end")
            if lease_id == self._lease_id:
                return dict(found)

    def _hear(self, role: str, what: str) -> tuple[Any, ...]:
        """The next of this kind; others before it are passed over. Raises EOFError when the process has gone."""
        while True:
            if not self._pipes[role].poll(_LIMIT_S):
                raise AssertionError(f"{role} doesn't say {what} within {_LIMIT_S:.0f} s")
            said = self._pipes[role].recv()
            if said[0] == what:
                return tuple(said[1:])


@contextmanager
def _pair(place: GpuPlace, kind: str, layout: KvLayout, folder: Path, on_cpu: str) -> Iterator[_Pair]:
    pair = _Pair(place, kind, layout, folder, on_cpu)
    try:
        for role in "dp":
            pair.start(role)
        yield pair
    finally:
        for process in pair.processes.values():
            process.kill()
            process.join()


def _layout(place: GpuPlace, kind: str) -> KvLayout:
    """Blocks of a Llama 8B's size; 4 GiB of them on a GPU, 256 MiB where the host has to carry and check them."""
    if place.is_dry:
        return KvLayout(
            num_blocks=64, kv_heads=2, layers=4, block_size=16, head_dim=64, dtype="bfloat16", item_bytes=2
        )
    return KvLayout(
        num_blocks=128 if kind == "stream" else 2048,
        kv_heads=8,
        layers=32,
        block_size=16,
        head_dim=128,
        dtype="bfloat16",
        item_bytes=2,
    )


def _copy_gb_per_s(place: GpuPlace, layout: KvLayout) -> float:
    """Of as many bytes from one GPU to the other, or on the one."""
    source = torch.zeros(layout.pool_bytes // 2, dtype=torch.uint8, device=place.device(place.prefill))
    target = torch.zeros(layout.pool_bytes // 2, dtype=torch.uint8, device=place.device(place.decode))
    times = []
    for _ in range(6):
        began_s = _CLOCK.now_s()
        target.copy_(source)
        if not place.is_dry:
            torch.cuda.synchronize()
        times.append(_CLOCK.now_s() - began_s)
    return len(source) / statistics.median(times[1:]) / 1e9
