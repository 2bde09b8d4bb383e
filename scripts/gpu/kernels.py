"""The kernels of the device against the gathered ones in float32 on the CPU, over drawn shapes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.attention import Heads
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.devices import CpuDevice, CudaDevice, Device
from pdserve.engine.device.kernel_choice import candidates
from pdserve.engine.device.paged_attention import GatheredKernels
from pdserve.engine.layout import KvLayout
from scripts.gpu.place import GpuPlace

_WITHIN = 1e-4  # of outputs around 1, products of float32 that may be summed in another order
_LAYER = 1


def check_kernels(place: GpuPlace) -> dict[str, Any]:
    """Raises AssertionError at the first shape at which a kernel is wrong."""
    device: Device = CpuDevice() if place.is_dry else CudaDevice(place.decode)
    num_shapes = 6 if place.is_dry else 150
    worst: dict[str, float] = {}
    for seed in range(num_shapes):
        source = random.Random(seed)
        for name, error in _errors(source, device).items():
            worst[name] = max(error, worst.get(name, 0.0))
            assert error <= _WITHIN, f"{name} is wrong by {error} at shape {seed}"
    return {"shapes": num_shapes, "worst_error": worst}


def _errors(source: random.Random, device: Device) -> dict[str, float]:
    """Of one drawn shape: the largest difference of each kind of kernels, for single tokens and for a chunk."""
    kv_heads, group, size = (
        source.choice((1, 2, 8)),
        source.choice((1, 3, 4, 8)),
        source.choice((32, 64, 80, 128)),
    )
    layout = KvLayout(
        num_blocks=48, kv_heads=kv_heads, layers=2, block_size=source.choice((16, 32)), head_dim=size,
        dtype="float32", item_bytes=4,
    )  # fmt: skip
    windows = (0, source.choice((0, 0, 5, 70)))
    heads = Heads(
        kv_heads * group, kv_heads, size, scale=0.0, softcap=source.choice((0.0, 50.0)), windows=windows
    )
    reference = DevicePool(layout, torch.float32, CpuDevice())
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    reference.tensor.normal_(generator=generator)
    width = 12
    ends = torch.tensor(
        [source.randrange(1, width * layout.block_size + 1) for _ in range(3)], dtype=torch.int32
    )
    order = torch.randperm(layout.num_blocks, generator=generator).to(torch.int32)
    singles, chunk = order[: 3 * width].view(3, width), order[3 * width :]
    length = source.randrange(2, 40)
    start = source.randrange(0, len(chunk) * layout.block_size - length)
    queries = torch.randn(3 + length, kv_heads * group, size, generator=generator)
    gathered = GatheredKernels(reference, heads)
    want = torch.empty_like(queries)
    gathered.attend_singles(_LAYER, queries[:3], singles, ends, want[:3])
    gathered.attend_chunk(_LAYER, queries[3:], chunk, start, want[3:])
    pool = DevicePool(replace(layout), torch.float32, device)
    pool.tensor.copy_(reference.tensor)
    found: dict[str, float] = {}

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device.torch_device)

    for make in candidates(device):
        kernels = make(pool, heads)
        got = there(torch.empty_like(queries))
        kernels.attend_singles(_LAYER, there(queries[:3]), there(singles), there(ends), got[:3])
        kernels.attend_chunk(_LAYER, there(queries[3:]), there(chunk), start, got[3:])
        found[kernels.name] = float((got.cpu() - want).abs().max())
    return found
