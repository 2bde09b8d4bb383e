"""The KV pool of a device: the layout of `kv_pool`, and one block more that belongs to nobody."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.device.devices import Device
from pdserve.engine.layout import KvLayout


class DevicePool:
    """Owned by the engine; the transfer owner reads and writes single blocks through `memory`.

    Steps are padded to a few sizes. What the rows to spare compute goes to the block behind the last one, which no
    link sees.
    """

    def __init__(self, layout: KvLayout, dtype: torch.dtype, device: Device) -> None:
        self.layout = layout
        values, self.memory = device.pool(layout.pool_bytes, layout.block_bytes)
        self._blocks = values.view(-1, layout.block_bytes)
        #: [num_blocks + 1, kv_heads, layers, 2, block_size, head_dim]
        self.tensor = values.view(dtype).view(
            -1, layout.kv_heads, layout.layers, 2, layout.block_size, layout.head_dim
        )

    @property
    def indexed(self) -> Tensor:
        """`tensor`, as torch's indexing takes it: it has none for 8-bit floats, which are bytes then."""
        return self.tensor.view(torch.uint8) if self.tensor.itemsize == 1 else self.tensor

    @property
    def limit(self) -> float:
        """The largest number that is stored: larger ones become it. 0: whatever they are."""
        return torch.finfo(self.tensor.dtype).max if self.tensor.itemsize == 1 else 0.0

    def begin_blocks(self, block_ids: Tensor) -> None:
        """Zero blocks that a step begins and leaves partly unfilled: a CPU that gets them reads them whole."""
        self._blocks.index_fill_(0, block_ids, 0)

    @property
    def spare_block(self) -> int:
        return self.layout.num_blocks
