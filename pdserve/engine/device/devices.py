"""What an engine asks of the device that it computes on, beside torch's own calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.errors import Incompatible
from pdserve.kv_memory import AddressedMemory, HostMemory, KvMemory

Replay = Callable[[], None]

_WARM_RUNS, _TIMED_RUNS = 3, 20


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Memory of a device.

    total  all of it; free: what nobody has, this process's own cache of freed tensors not counted
    peak   the most that this process's tensors had at once since the last `forget_peak`; held: what they have now
    """

    total: int
    free: int
    held: int
    peak: int


class Mark(Protocol):
    """A point behind everything that was launched before it."""

    def wait(self) -> None:
        """Until all of that is done. Raises what the device reports."""
        ...


class Device(Protocol):
    """Engine owner's thread only. Calls launch; only `Mark.wait` waits."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """What its bits depend on: for the numerics of `ModelCard`."""
        ...

    @property
    def gpus(self) -> tuple[int, ...]:
        """As in `ModelCard`."""
        ...

    @property
    def has_fp8(self) -> bool:
        """Whether its kernels know 8-bit floats."""
        ...

    @property
    def num_processors(self) -> int:
        """That run programs of a kernel side by side."""
        ...

    @property
    def is_sound_after_errors(self) -> bool:
        """Whether a process may go on once a call has raised."""
        ...

    def enter(self) -> None:
        """This thread launches on it from now on."""
        ...

    def host_buffer(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """[num_values] of the host, zeros, that copies to and from the device needn't wait for."""
        ...

    def mark(self) -> Mark: ...

    def seconds_of(self, step: Callable[[], None]) -> float:
        """What a step takes on the device, once it has run some times."""
        ...

    def bytes(self) -> DeviceBytes: ...

    def forget_peak(self) -> None: ...

    def pool(self, num_bytes: int, spare_bytes: int) -> tuple[Tensor, KvMemory]:
        """Zeroed memory for a KV pool, [num_bytes + spare_bytes] uint8; and what links see of it: all but the spare."""
        ...

    def capture(self, step: Callable[[], None]) -> Replay:
        """Record what a step launches, without doing it; the replay launches it again on the same tensors.

        A step must have run before, or what it sets up on first use would be recorded, too.
        """
        ...


class CpuDevice:
    """Implements `Device` on the CPU: for tests, which run all that isn't a kernel by it."""

    torch_device = torch.device("cpu")
    name = "cpu"
    gpus: tuple[int, ...] = ()
    num_processors = 1
    has_fp8 = True
    is_sound_after_errors = False  # as of a GPU: a step launched ahead may be left

    def __init__(self, has: DeviceBytes | None = None, seconds: Sequence[float] = ()) -> None:
        """has, seconds: what `bytes` and `seconds_of` say, one after the other; it doesn't measure."""
        self._has = has or DeviceBytes(total=1 << 30, free=1 << 30, held=0, peak=0)
        self._seconds = iter(seconds)
        #: how many steps were captured, and how often they were replayed
        self.num_captured = 0
        self.num_replayed = 0

    def enter(self) -> None:
        """There is no other."""

    def host_buffer(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_values, dtype=dtype)

    def mark(self) -> Mark:
        return _Done()

    def seconds_of(self, step: Callable[[], None]) -> float:
        step()
        return next(self._seconds)

    def bytes(self) -> DeviceBytes:
        return self._has

    def forget_peak(self) -> None:
        """It has none."""

    def pool(self, num_bytes: int, spare_bytes: int) -> tuple[Tensor, KvMemory]:
        values = torch.zeros(num_bytes + spare_bytes, dtype=torch.uint8)
        return values, HostMemory(num_bytes, values.numpy().data)

    def capture(self, step: Callable[[], None]) -> Replay:
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            step()

        return replay


class _Done:
    def wait(self) -> None:
        """The CPU computes when it is called."""


class CudaDevice:
    """Implements `Device` on a GPU."""

    is_sound_after_errors = False  # a kernel's error comes late, and the context may be broken by it

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.enter()
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name = f"{properties.name.replace(' ', '-')}/cuda{torch.version.cuda}"
        self.gpus = (_nvml_index(index),)
        self.has_fp8 = (properties.major, properties.minor) >= (8, 9)
        self.num_processors = int(properties.multi_processor_count)
        self._pool: Any = None  # of graphs, a handle that torch names only for its own eyes

    def enter(self) -> None:
        torch.cuda.set_device(self.torch_device)  # torch keeps it by thread, and whoever loads is another one

    def host_buffer(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_values, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return _CudaMark(event)

    def seconds_of(self, step: Callable[[], None]) -> float:
        for _ in range(_WARM_RUNS):
            step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_TIMED_RUNS):
            step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / _TIMED_RUNS

    def bytes(self) -> DeviceBytes:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceBytes(
            total=total,
            free=free,
            held=torch.cuda.memory_allocated(self.torch_device),
            peak=torch.cuda.max_memory_allocated(self.torch_device),
        )

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def pool(self, num_bytes: int, spare_bytes: int) -> tuple[Tensor, KvMemory]:
        values = torch.zeros(num_bytes + spare_bytes, dtype=torch.uint8, device=self.torch_device)
        return values, DeviceKvMemory(values, num_bytes)

    def capture(self, step: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # By thread: the watchdog of torch's NCCL asks for events on one of its own meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        self._pool = self._pool or graph.pool()  # the graphs run one after the other: they can share scratch
        return graph.replay


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class DeviceKvMemory(AddressedMemory):
    """The first bytes of a tensor."""

    def __init__(self, values: Tensor, num_bytes: int) -> None:
        super().__init__(values.data_ptr(), num_bytes, str(values.device))
        self._values = values  # keeps it alive


def send(device: Device, values: npt.NDArray[np.generic]) -> Tensor:
    """An array as a tensor of the device; doesn't wait."""
    staged = torch.from_numpy(values)
    host = device.host_buffer(staged.numel(), staged.dtype).view(staged.shape)
    return host.copy_(staged).to(device.torch_device, non_blocking=True)


def find_cuda(wanted: str, rank: int = 0) -> CudaDevice | None:
    """The GPU of "cuda:N"; of "auto" the first one, if there is any; None: the CPU is to be used.

    rank  so many GPUs behind that one
    Raises Incompatible if the one that is wanted isn't there.
    """
    if wanted == "cpu":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        if not count:
            return None
        wanted = "cuda:0"
    index = int(wanted.partition(":")[2] or 0) + rank
    if index >= count:
        built = f"torch {torch.__version__} for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        raise Incompatible(
            "engine.device names a GPU that isn't there",
            device=f"cuda:{index}",
            devices=count,
            torch=built or f"{torch.__version__}, without CUDA",
        )
    return CudaDevice(index)


def _nvml_index(index: int) -> int:
    """The driver's number of a device: CUDA_VISIBLE_DEVICES may have named others."""
    return int(torch.cuda._get_nvml_device_index(index))
