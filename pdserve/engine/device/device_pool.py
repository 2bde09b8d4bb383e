"""The KV pool of a device: the layout of `kv_pool`, and one block more that belongs to nobody."""

from __future__ import annotations

import torch

from pdserve.engine.device.devices import Device
from pdserve.engine.layout import KvLayout


class DevicePool:
    """Owned by the engine; the transfer owner reads and writes single blocks through `memory`.

    Steps are padded to a few sizes. What the rows to spare compute goes to the block behind the last one, which no
    link sees.
    """

    def __init__(self, layout: KvLayout, dtype: torch.dtype, device: Device) -> None:
        self.layout = layout
        values = torch.zeros(
            layout.pool_bytes + layout.block_bytes, dtype=torch.uint8, device=device.torch_device
        )
        self.memory = device.memory(values, layout.pool_bytes)
        #: [num_blocks + 1, kv_heads, layers, 2, block_size, head_dim]
        self.tensor = values.view(dtype).view(
            -1, layout.kv_heads, layout.layers, 2, layout.block_size, layout.head_dim
        )

    @property
    def spare_block(self) -> int:
        return self.layout.num_blocks
