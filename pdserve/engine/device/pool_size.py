"""How many KV blocks a device has room for, once the weights lie there and the largest step has run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdserve.engine.device.devices import Device, DeviceBytes
from pdserve.engine.layout import KvLayout
from pdserve.errors import Incompatible

_GB = 1e9


def pool_size(after: DeviceBytes, layout: KvLayout, *, utilization: float, num_blocks: int | None) -> int:
    """Blocks of the pool.

    after        the largest step, without the pool: `held` are the weights, what is above them at `peak` is the step's
    utilization  part of the device that this process may fill; what others have there is theirs
    num_blocks   wanted; None: as many as fit
    Raises Incompatible, with the figures, if they don't fit, or if none does.
    """
    step = after.peak - after.held
    others = after.total - after.free - after.held
    # Graphs keep what a step needs apart from what other steps use; one block is the spare one.
    most = min(int(after.total * utilization), after.total - others)
    room = most - after.held - 2 * step - layout.block_bytes
    fitting = max(0, room // layout.block_bytes)
    wanted = num_blocks if num_blocks is not None else max(1, fitting)
    if wanted <= fitting:
        return wanted
    raise Incompatible(
        "the device has too little memory",
        device_gb=_gb(after.total),
        utilization=utilization,
        others_gb=_gb(others),
        weights_gb=_gb(after.held),
        step_gb=_gb(2 * step),
        left_gb=_gb(max(0, room)),
        want_gb=_gb(wanted * layout.block_bytes),
        want_blocks=wanted,
        blocks_that_fit=fitting,
    )


@contextmanager
def fitting_on(device: Device) -> Iterator[None]:
    """While weights and the largest step try to find room. Raises Incompatible, with the figures, if there is none."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        there = device.bytes()
        raise Incompatible(
            "the device has too little memory for the weights and one step",
            device_gb=_gb(there.total),
            free_gb=_gb(there.free),
            held_gb=_gb(there.held),
            peak_gb=_gb(there.peak),
            hint="a smaller engine.max_step_tokens or engine.max_batch, or another model",
        ) from error


def _gb(num_bytes: int) -> float:
    return round(num_bytes / _GB, 3)
