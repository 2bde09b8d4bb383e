"""The kernels of another kind of machine, by qemu: called as those of this one, their memory goes to and fro."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import cast

import torch

from pdserve.engine.native import build
from pdserve.engine.native.library import Kernels

QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
_CALLS = Path(__file__).with_name("emulated_calls.c")
_FLAGS = (
    "-std=gnu23",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffreestanding",
    "-nostdlib",
    "-static",
)
_LIMIT_S = 280
_FORMATS = {
    0: 34,
    1: 18,
    2: 20,
    3: 22,
    4: 24,
    5: 144 / 8,
    6: 176 / 8,
    7: 210 / 8,
}  # bytes of 32 values, by kind


def compile_calls(into: Path) -> Path:
    """The program for aarch64. Raises CalledProcessError."""
    program = into / "calls"
    sources = [path for path in build.sources() if path.suffix == ".c"]
    subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu", "-mcpu=generic"),
            *(*_FLAGS, "-o", str(program), str(_CALLS), *map(str, sources)),
        ],
        check=True, timeout=_LIMIT_S, env={"PATH": "/usr/bin:/bin", "ZIG_GLOBAL_CACHE_DIR": str(into / "zig"),
                                           "ZIG_LOCAL_CACHE_DIR": str(into / "zig")},
    )  # fmt: skip
    return program


class _Memory:
    """What a call's pointers point to."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []  # address, bytes
        self.pointers: list[tuple[int, int, int]] = []

    def at(self, address: int | None, size: int) -> int:
        """A region's number; -1 for NULL."""
        if address is None:
            return -1
        self.regions.append((address, size))
        return len(self.regions) - 1


class Emulated:
    """Has the functions of `Kernels.functions` but attention. Use from one thread, then close."""

    def __init__(self, program: Path) -> None:
        assert QEMU is not None
        self._process = subprocess.Popen([QEMU, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def kernels(self) -> Kernels:
        return Kernels("neon", torch.float32, cast(ctypes.CDLL, self))

    def pd_linear(
        self, x: int, w: int, bias: int | None, y: int, rows: int, outputs: int, width: int, _: int
    ) -> None:
        memory, padded = _Memory(), -(-outputs // 32) * 32
        places = [
            memory.at(x, 4 * rows * width), memory.at(w, 2 * padded * width), memory.at(bias, 4 * outputs),
            memory.at(y, 4 * rows * outputs),
        ]  # fmt: skip
        self._call(0, memory, [*places, rows, outputs, width])

    def pd_packed_linear(
        self, x: int, room: int, segments: int, bias: int | None, y: int, num_segments: int, rows: int,
        outputs: int, width: int, _: int,
    ) -> None:  # fmt: skip
        memory = _Memory()
        places = [
            memory.at(x, 4 * rows * width), memory.at(room, rows * width // 32 * 48),
            memory.at(segments, 24 * num_segments), memory.at(bias, 4 * outputs), memory.at(y, 4 * rows * outputs),
        ]  # fmt: skip
        table = struct.unpack(f"<{3 * num_segments}q", ctypes.string_at(segments, 24 * num_segments))
        for index in range(num_segments):
            rows_at, kind, count = table[3 * index : 3 * index + 3]
            padded = -(-count // 16) * 16
            addresses = memory.at(rows_at, 8 * padded)
            memory.pointers.append((places[2], 24 * index, addresses))
            for row, address in enumerate(
                struct.unpack(f"<{padded}q", ctypes.string_at(rows_at, 8 * padded))
            ):
                memory.pointers.append(
                    (addresses, 8 * row, memory.at(address, int(_FORMATS[kind] * width / 32)))
                )
        self._call(1, memory, [*places, num_segments, rows, outputs, width])

    def pd_norm(
        self, x: int, more: int | None, weight: int, y: int, rows: int, width: int, eps: float, _: int
    ) -> None:
        memory, size = _Memory(), 4 * rows * width
        places = [memory.at(x, size), memory.at(more, size), memory.at(weight, 4 * width), memory.at(y, size)]
        self._call(2, memory, [*places, rows, width, _bits(eps)])

    def pd_gate(self, x: int, y: int, rows: int, width: int, kind: int, _: int) -> None:
        memory = _Memory()
        self._call(
            3, memory, [memory.at(x, 8 * rows * width), memory.at(y, 4 * rows * width), rows, width, kind]
        )

    def pd_best(self, logits: int, rows: int, width: int, best: int, sound: int, _: int) -> None:
        memory = _Memory()
        places = [
            memory.at(logits, 4 * rows * width),
            rows,
            width,
            memory.at(best, 8 * rows),
            memory.at(sound, rows),
        ]
        self._call(4, memory, places)

    def pd_shortlist(
        self, x: int, width: int, highest: float, temperature: float, lowest: float, k: int, room: int, ids: int,
        left: int, count: int,
    ) -> None:  # fmt: skip
        memory = _Memory()
        row = memory.at(x, 4 * width)
        outs = [
            memory.at(room, 8 * k),
            memory.at(ids, 8 * width),
            memory.at(left, 8 * width),
            memory.at(count, 8),
        ]
        self._call(5, memory, [row, width, *map(_bits, (highest, temperature, lowest)), k, *outs])

    def _call(self, function: int, memory: _Memory, arguments: list[int]) -> None:
        send, receive = self._process.stdin, self._process.stdout
        assert send is not None and receive is not None
        send.write(_numbers(function, len(memory.regions)))
        for address, size in memory.regions:
            send.write(_numbers(size) + (ctypes.string_at(address, size) if size else b""))
        send.write(_numbers(len(memory.pointers)))
        for region, offset, target in memory.pointers:
            send.write(_numbers(region, offset, target))
        send.write(_numbers(len(arguments), *arguments))
        send.flush()
        held = {region for region, _, _ in memory.pointers}  # addresses of another process
        for index, (address, size) in enumerate(memory.regions):
            content = receive.read(size)
            assert len(content) == size, "the emulated process has ended"
            if index not in held and size:
                ctypes.memmove(address, content, size)


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)
