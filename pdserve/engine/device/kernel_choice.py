"""Which kernels attend on this device: those that are right and fastest on steps like a decode worker's.

Only a trial knows: it depends on the device, on heads and groups, and on the versions of torch and Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog
import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.attention import Heads
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.devices import Device
from pdserve.engine.device.paged_attention import GatheredKernels, PagedKernels
from pdserve.engine.device.varlen_kernels import VarlenKernels, varlen_attend
from pdserve.engine.layout import KvLayout
from pdserve.engine.numerics import Precision
from pdserve.errors import Incompatible

log = structlog.get_logger()

MakeKernels = Callable[[DevicePool, Heads], PagedKernels]

_ROWS = 8
_ROW_TOKENS = 1024
_CHUNK = 70  # more than a tile of queries
# Of outputs that are weighted means of numbers around 1.
_WITHIN = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def candidates(device: Device, layout: KvLayout, heads: Heads, compute: torch.dtype) -> list[MakeKernels]:
    """The reference first. layout, heads, compute: of the model; not all kernels have all of them."""
    found: list[MakeKernels] = [GatheredKernels]
    if device.torch_device.type == "cuda":
        # Not everywhere: it comes with torch's builds for GPUs.
        from pdserve.engine.device.triton_attention import TritonKernels

        num_processors = device.num_processors

        def make_triton(pool: DevicePool, heads: Heads) -> PagedKernels:
            return TritonKernels(pool, heads, num_processors)

        found.append(make_triton)
        attend = varlen_attend(layout, heads, compute)
        if attend is not None:
            found.append(lambda pool, heads: VarlenKernels(pool, heads, make_triton(pool, heads), attend))
    return found


def choose_kernels(
    makers: Sequence[MakeKernels],
    device: Device,
    layout: KvLayout,
    heads: Heads,
    precision: Precision,
    width: int = 0,
    agree: Callable[[float], float] = float,
) -> MakeKernels:
    """The fastest of those that agree with the first one, which is the reference.

    layout, heads, precision  of the model
    width  block ids that a row of a step has, if that is more than it needs: as in graphs
    agree  makes one number of what each rank has measured, so that all of them choose alike
    Raises Incompatible if one doesn't agree: who computes wrongly here may do so elsewhere. One that refuses such a
    step before it is launched is left out.
    """
    if len(makers) == 1:
        return makers[0]
    trial = _Trial(device, layout, heads, precision, width)
    want = trial.outputs(makers[0](trial.pool, trial.heads))
    times_s: dict[str, float] = {}
    fastest = makers[0]
    for make in makers:
        kernels = make(trial.pool, trial.heads)
        took_s = agree(_seconds(kernels, trial, want, device, precision.compute))
        if took_s < min(times_s.values(), default=math.inf):
            fastest = make
        times_s[kernels.name] = took_s
    log.info(
        "engine.kernels",
        chosen=min(times_s, key=times_s.__getitem__),
        **{f"{name}_us": round(took_s * 1e6, 1) for name, took_s in times_s.items() if took_s < math.inf},
    )
    return fastest


def _seconds(
    kernels: PagedKernels, trial: _Trial, want: Tensor, device: Device, compute: torch.dtype
) -> float:
    """What a step takes by these kernels; inf: they can't be taken. Raises Incompatible if they compute wrongly."""
    try:
        error = float((trial.outputs(kernels) - want).abs().max())
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # the device's own
    except RuntimeError as refused:  # a build of torch without them, a width that they haven't
        log.warning("engine.kernels_refused", kernels=kernels.name, reason=str(refused)[:200])
        return math.inf
    if not error <= _WITHIN[compute]:  # NaN isn't
        raise Incompatible("a kernel of this device computes wrongly", kernels=kernels.name, error=error)
    try:
        return device.seconds_of(lambda: trial.run(kernels))
    except torch.OutOfMemoryError:  # gathers a whole window of each row
        return math.inf


class _Trial:
    """Some rows with a long context, and a chunk behind one of them, in one layer of each kind that the model has.

    Single tokens of the first kind are timed, as in a decode step; all of it is compared.
    """

    def __init__(
        self, device: Device, layout: KvLayout, heads: Heads, precision: Precision, width: int
    ) -> None:
        own = layout.blocks_for(_ROW_TOKENS)
        layers = replace(layout, layers=len(heads.kinds), num_blocks=_ROWS * own)
        self.pool = DevicePool(layers, precision.kv, device)
        generator = torch.Generator(device=device.torch_device).manual_seed(1)
        kept = torch.randn(self.pool.tensor.shape, generator=generator, device=device.torch_device)
        self.pool.tensor.copy_(kept)
        self.heads = Heads(
            heads.num_kv_heads * heads.group_size,
            heads.num_kv_heads,
            heads.head_dim,
            scale=heads.scale,
            softcap=heads.softcap,
            windows=heads.kinds,
        )
        shape = (_ROWS + _CHUNK, heads.num_kv_heads * heads.group_size, heads.head_dim)
        self._queries = torch.randn(shape, generator=generator, device=device.torch_device).to(
            precision.compute
        )
        order = torch.randperm(_ROWS * own, generator=generator, device=device.torch_device)
        self._own_blocks = order.to(torch.int32).view(_ROWS, own)
        self._blocks = functional.pad(self._own_blocks, (0, max(0, width - own)))
        self._ends = torch.full((_ROWS,), _ROW_TOKENS - 3, dtype=torch.int32, device=device.torch_device)
        self._outputs = torch.empty_like(self._queries)
        self._singles = (self._queries[:_ROWS], self._outputs[:_ROWS])

    def run(self, kernels: PagedKernels) -> None:
        """As a graph runs it."""
        queries, outputs = self._singles
        kernels.attend_singles(0, queries, self._blocks, self._ends, outputs)

    def outputs(self, kernels: PagedKernels) -> Tensor:
        """Of all kinds of layers, float32."""
        (queries, outputs), blocks = self._singles, self._own_blocks
        found: list[Tensor] = []
        for layer in range(len(self.heads.kinds)):
            kernels.attend_singles(layer, queries, blocks, self._ends, outputs)
            start = _ROW_TOKENS - _CHUNK - 5
            kernels.attend_chunk(layer, self._queries[_ROWS:], blocks[0], start, self._outputs[_ROWS:])
            found.append(self._outputs.to(torch.float32, copy=True))
        return torch.cat(found)
