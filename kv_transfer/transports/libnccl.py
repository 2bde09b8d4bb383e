"""NCCL itself: the library that is loaded already (torch brings one), else the one that is installed, never two."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from kv_transfer.frames import UNIQUE_ID_BYTES
from kv_transfer.transports.nccl_port import nccl_failed
from pdserve.errors import Incompatible
from pdserve.kv_memory import ByteSpan

LEAST_VERSION = (2, 27, 0)
_NAME = "libnccl.so.2"
_MAPS = Path("/proc/self/maps")

_SUCCESS, _IN_PROGRESS = 0, 7
_BYTES = 1  # ncclUint8
_MAX_CTAS = 4  # of a communicator: a group must leave the engine most of the device
_UNDEFINED = -(2**31)
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21805


class Cuda(Protocol):
    """What NCCL's user needs of a device: streams and events. Calls that fail raise WorkerLost."""

    def enter(self) -> None:
        """Make the device this thread's."""
        ...

    def make_stream(self) -> int: ...

    def record(self, stream: int) -> int:
        """An event behind what lies on the stream."""
        ...

    def is_over(self, event: int) -> bool:
        """Doesn't wait. An event that is over is given back."""
        ...

    def blank(self, num_bytes: int) -> int:
        """The address of so many bytes that nobody uses."""
        ...


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """The first fields of ncclConfig_t, as of version 2.18.5: later libraries take what isn't there as undefined."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """path: of the file that is loaded."""

    handle: ctypes.CDLL
    path: str
    version: tuple[int, int, int]

    @classmethod
    def at(cls, path: str) -> Self:
        """What is there, or what the system's loader finds by that name. Raises OSError."""
        handle = ctypes.CDLL(path)
        number = ctypes.c_int()
        handle.ncclGetVersion(ctypes.byref(number))
        version = number.value // 10_000, number.value // 100 % 100, number.value % 100
        return cls(handle, loaded_paths()[0], version)

    def __str__(self) -> str:
        return f"NCCL {'.'.join(map(str, self.version))} ({self.path})"


def loaded_paths() -> list[str]:
    """Files of NCCL that this process has loaded: at most one, or communicators of one are unknown to the other."""
    lines = _MAPS.read_text().splitlines() if _MAPS.exists() else []
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/libnccl.so" in line})


def describe_loaded(loaded: Callable[[], list[str]] = loaded_paths) -> str:
    """For `pdserve doctor`: version and file; "several: " and all files, which is wrong; "" = none."""
    paths = loaded()
    if len(paths) > 1:
        return "several: " + ", ".join(paths)
    return str(NcclLibrary.at(paths[0])) if paths else ""


def load_nccl() -> NcclLibrary:
    """Load it, unless something else has. Raises Incompatible: none, two of them, or too old a one."""
    loaded = loaded_paths()
    if len(loaded) > 1:
        raise Incompatible("two NCCL libraries in one process", loaded=", ".join(loaded))
    try:
        library = NcclLibrary.at(loaded[0] if loaded else _installed_path())
    except OSError as error:
        raise Incompatible("NCCL can't be loaded; pip install 'pdserve[cuda12]'", said=error) from error
    if library.version < LEAST_VERSION:
        raise Incompatible("NCCL is too old", found=library.version, least=LEAST_VERSION, path=library.path)
    return library


def _installed_path() -> str:
    """Of the Python package; else what the system's loader finds."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = (Path(folder) / "nccl" / "lib" / _NAME for folder in folders)
    return next((str(path) for path in found if path.exists()), _NAME)


class LibNccl:
    """Nccl (nccl_port.py), and its rules. One for a process and device.

    address     where the bytes of a span lie on the device
    run_beside  calls a function on a thread that nobody waits for
    """

    def __init__(
        self,
        library: NcclLibrary,
        cuda: Cuda,
        *,
        address: Callable[[ByteSpan], int],
        run_beside: Callable[[Callable[[], None]], None],
    ) -> None:
        self._lib = library.handle
        self._lib.ncclGetLastError.restype = ctypes.c_char_p
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        self._cuda = cuda
        self._address = address
        self._run_beside = run_beside
        self._num_made = 0
        self._comms: dict[int, ctypes.c_void_p] = {}
        self._ranks: dict[int, int] = {}
        self._streams: dict[int, int] = {}  # by rank: sends and receives don't wait for each other
        self._aborted: set[int] = set()

    def make_unique_id(self) -> bytes:
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def init(self, unique_id: bytes, rank: int) -> int:
        self._cuda.enter()
        comm = ctypes.c_void_p()
        config = _Config(
            ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNDEFINED, _UNDEFINED, _MAX_CTAS, None, _UNDEFINED
        )  # fmt: skip
        told = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRankConfig", ctypes.byref(comm), 2, told, rank, ctypes.byref(config))
        self._num_made += 1
        self._comms[self._num_made] = comm
        self._ranks[self._num_made] = rank
        return self._num_made

    def is_settled(self, comm: int) -> bool:
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", self._comms[comm], ctypes.byref(state), comm=comm)
        if state.value not in (_SUCCESS, _IN_PROGRESS):
            raise nccl_failed("ncclCommGetAsyncError", self._words(state.value, comm))
        return state.value == _SUCCESS

    def begin_group(self) -> None:
        self._cuda.enter()
        self._call("ncclGroupStart")

    def send(self, comm: int, span: ByteSpan) -> None:
        self._move("ncclSend", comm, self._address(span), span.num_bytes)

    def send_blank(self, comm: int, num_bytes: int) -> None:
        self._move("ncclSend", comm, self._cuda.blank(num_bytes), num_bytes)

    def receive(self, comm: int, into: ByteSpan) -> None:
        self._move("ncclRecv", comm, self._address(into), into.num_bytes)

    def _move(self, call: str, comm: int, address: int, num_bytes: int) -> None:
        peer = 1 - self._ranks[comm]
        at, size, stream = (
            ctypes.c_void_p(address),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(self._stream(comm)),
        )
        self._call(call, at, size, _BYTES, peer, self._comms[comm], stream, comm=comm)

    def _stream(self, comm: int) -> int:
        rank = self._ranks[comm]
        if rank not in self._streams:
            self._streams[rank] = self._cuda.make_stream()
        return self._streams[rank]

    def end_group(self, comm: int) -> None:
        self._call("ncclGroupEnd", comm=comm)

    def record(self, comm: int) -> int:
        return self._cuda.record(self._stream(comm))

    def is_over(self, event: int) -> bool:
        return self._cuda.is_over(event)

    def revoke(self, comm: int) -> None:
        """Since 2.28; an abort of an earlier library does it, too, only that it waits for others first."""
        if hasattr(self._lib, "ncclCommRevoke"):
            # Whatever it says: the communicator may be broken already, and is aborted next.
            self._lib.ncclCommRevoke(self._comms[comm], 0)

    def abort(self, comm: int) -> None:
        def abort() -> None:
            self._cuda.enter()
            self._lib.ncclCommAbort(self._comms[comm])
            self._aborted.add(comm)

        self._run_beside(abort)

    def is_aborted(self, comm: int) -> bool:
        if comm not in self._aborted:
            return False
        self._aborted.discard(comm)
        del self._comms[comm], self._ranks[comm]
        return True

    def _call(self, name: str, *arguments: object, comm: int | None = None) -> None:
        result = getattr(self._lib, name)(*arguments)
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise nccl_failed(name, self._words(result, comm))

    def _words(self, result: int, comm: int | None) -> str:
        kind = self._lib.ncclGetErrorString(result).decode(errors="replace")
        last = self._lib.ncclGetLastError(None if comm is None else self._comms[comm]) or b""
        return f"{kind}: {last.decode(errors='replace').strip()}" if last.strip() else kind
