"""The kernels of the device against the gathered ones in float32 on the CPU, over drawn shapes, and products."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.attention import Heads
from pdserve.engine.dequant import PLAIN, decode
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.devices import CpuDevice, CudaDevice, Device
from pdserve.engine.device.kernel_choice import candidates
from pdserve.engine.device.packed_linear import PackedDeviceLinear, packed_linear
from pdserve.engine.device.paged_attention import GatheredKernels
from pdserve.engine.layout import KvLayout
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.modelstore.gguf_types import SUPPORTED
from scripts.gpu.place import GpuPlace

_WITHIN = 1e-4  # of outputs around 1, products of float32 that may be summed in another order
_PRODUCTS_WITHIN = 1e-5
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
    for seed, kind in enumerate(sorted(set(SUPPORTED) - set(PLAIN))):
        error = worst[f"packed {kind}"] = _product_error(kind, seed, device)
        assert error <= _PRODUCTS_WITHIN, f"products with {kind} are wrong by {error}"
    return {"shapes": num_shapes, "worst_error": worst}


def _product_error(kind: str, seed: int, device: Device) -> float:
    """With packed weights, of few rows and of many, relative to the largest result."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = _drawn_weight(300, 512, kind, generator), torch.randn(90, 512, generator=generator)
    want = PackedDeviceLinear(weight, None)(x)
    product = packed_linear(weight, None, device.torch_device, torch.float32)
    there = x.to(device.torch_device)
    errors = [float((product(there[:rows]).cpu() - want[:rows]).abs().max()) for rows in (1, 17, 90)]
    return max(errors) / float(want.abs().max())


def _drawn_weight(rows: int, width: int, kind: str, generator: torch.Generator) -> StoredMatrix:
    """Any bytes are a block; those with scales that no model has become zeros."""
    unit = SUPPORTED[kind]
    shape = (rows * width // unit.num_values, unit.num_bytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    largest = decode(blocks.view(-1), kind).view(len(blocks), -1).abs().amax(dim=1)
    blocks[~(largest < 4.0)] = 0  # NaN isn't less
    return StoredMatrix.of(blocks.view(-1), kind, (rows, width))


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

    for make in candidates(device, layout, heads, torch.float32):
        kernels = make(pool, heads)
        got = there(torch.empty_like(queries))
        kernels.attend_singles(_LAYER, there(queries[:3]), there(singles), there(ends), got[:3])
        kernels.attend_chunk(_LAYER, there(queries[3:]), there(chunk), start, got[3:])
        found[kernels.name] = float((got.cpu() - want).abs().max())
    return found
