"""Triton kernels over weights as files store them: rows of blocks (pdserve/engine/dequant.py has their layouts), or of
units (pdserve/modelstore/grouped_types.py).

    product   program (tile of rows of x, tile of outputs): takes the tile's weights apart as it goes along the width
    decoded   program (outputs, tile of the width): the values themselves, for products of many rows

Weights are rounded to the dtype of x, as a model is that was decoded when it was loaded; sums are float32. Any value is
found by its place in the row alone, so that one function has all formats and any tile fits any block. What changes from
step to step isn't compiled for (triton_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x", "y", "bias", "x_stride"])
def product(
    x,  # [num_rows, width]
    raw,  # [outputs, row_bytes] uint8, even addresses
    bias,  # [outputs]
    y,  # [num_rows, outputs], a part of wider rows
    num_rows,
    outputs,
    width,
    row_bytes,
    x_stride,
    y_stride,
    kind: tl.constexpr,
    unit: tl.constexpr,
    has_bias: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    outs = tl.program_id(1) * N + tl.arange(0, N)
    is_row = rows < num_rows
    is_out = outs < outputs
    own = raw + outs.to(tl.int64) * row_bytes
    inputs = x + rows.to(tl.int64) * x_stride
    total = tl.zeros((M, N), dtype=tl.float32)
    for begin in range(0, width, K):
        places = begin + tl.arange(0, K)
        inside = places < width
        values = tl.load(inputs[:, None] + places[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        weights = values_at(own[:, None], places[None, :], is_out[:, None] & inside[None, :], kind, unit)
        total = tl.dot(values, tl.trans(weights.to(values.dtype)), total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    target = y + rows.to(tl.int64)[:, None] * y_stride + outs[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def decoded(
    raw,  # [outputs, row_bytes] uint8, even addresses
    values,  # [outputs, width]
    width,
    row_bytes,
    kind: tl.constexpr,
    unit: tl.constexpr,
    K: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * K + tl.arange(0, K)
    inside = places < width
    found = values_at(raw + out * row_bytes, places, inside, kind, unit)
    tl.store(values + out * width + places, found.to(values.dtype.element_ty), mask=inside)


@triton.jit
def values_at(row, places, mask, kind: tl.constexpr, unit: tl.constexpr):
    """Values as float32; row: addresses of rows of bytes, broadcast with places in them; 0 where the mask isn't set.

    kind  of grouped types without their size, `unit`: values that share a scale
    """
    if kind == "I8":
        block = row + places // unit * (4 + unit)
        q = tl.load(block + 4 + places % unit, mask=mask, other=0).to(tl.int8, bitcast=True)
        return _float(block, mask) * q.to(tl.float32)
    if kind == "I8Z":
        block = row + places // unit * (8 + unit)
        q = _byte(block + 8 + places % unit, mask).to(tl.float32)
        return _float(block, mask) * (q - _float(block + 4, mask))
    if kind == "I4":
        block = row + places // unit * (4 + unit // 2)
        return _float(block, mask) * (_neighbour(block + 4, places % unit, mask) - 8).to(tl.float32)
    if kind == "I4Z":
        block = row + places // unit * (8 + unit // 2)
        q = _neighbour(block + 8, places % unit, mask).to(tl.float32)
        return _float(block, mask) * (q - _float(block + 4, mask))
    if kind == "F8":
        block = row + places // unit * (4 + unit)
        return _float(block, mask) * _e4m3(_byte(block + 4 + places % unit, mask))
    if kind == "Q8_0":
        block = row + places // 32 * 34
        q = tl.load(block + 2 + places % 32, mask=mask, other=0).to(tl.int8, bitcast=True)
        return _half(block, mask) * q.to(tl.float32)
    if kind == "Q4_0":
        block = row + places // 32 * 18
        return _half(block, mask) * (_nibble(block + 2, places % 32, mask) - 8).to(tl.float32)
    if kind == "Q4_1":
        block = row + places // 32 * 20
        q = _nibble(block + 4, places % 32, mask)
        return _half(block, mask) * q.to(tl.float32) + _half(block + 2, mask)
    if kind == "Q5_0":
        block = row + places // 32 * 22
        q = _nibble(block + 6, places % 32, mask) | _bit(block + 2, places % 32, mask) << 4
        return _half(block, mask) * (q - 16).to(tl.float32)
    if kind == "Q5_1":
        block = row + places // 32 * 24
        q = _nibble(block + 8, places % 32, mask) | _bit(block + 4, places % 32, mask) << 4
        return _half(block, mask) * q.to(tl.float32) + _half(block + 2, mask)
    if kind == "Q4_K":
        block = row + places // 256 * 144
        place = places % 256
        q = _of_two_runs(block + 16, place, mask)
        return _scaled_less_minimum(block, place // 32, q, mask)
    if kind == "Q5_K":
        block = row + places // 256 * 176
        place = places % 256
        fifth = _byte(block + 16 + place % 32, mask) >> (place // 32) & 1
        q = _of_two_runs(block + 48, place, mask) | fifth << 4
        return _scaled_less_minimum(block, place // 32, q, mask)
    tl.static_assert(kind == "Q6_K")
    block = row + places // 256 * 210
    place = places % 256
    half = place // 128
    low = _byte(block + half * 64 + place % 64, mask) >> (place % 128 // 64 * 4) & 15
    upper = _byte(block + 128 + half * 32 + place % 32, mask) >> (place % 128 // 32 * 2) & 3
    scale = tl.load(block + 192 + place // 16, mask=mask, other=0).to(tl.int8, bitcast=True)
    return _half(block + 208, mask) * scale.to(tl.float32) * ((low | upper << 4) - 32).to(tl.float32)


@triton.jit
def _scaled_less_minimum(block, run, q, mask):
    """The common end of Q4_K and Q5_K; run: of 32 values."""
    own = run % 4
    first = _byte(block + 4 + own, mask)
    second = _byte(block + 8 + own, mask)
    mixed = _byte(block + 12 + own, mask)
    scale = tl.where(run < 4, first & 63, (mixed & 15) | (first >> 2 & 48))
    minimum = tl.where(run < 4, second & 63, mixed >> 4 | (second >> 2 & 48))
    scaled = _half(block, mask) * scale.to(tl.float32) * q.to(tl.float32)
    return scaled - _half(block + 2, mask) * minimum.to(tl.float32)


@triton.jit
def _byte(place, mask):
    return tl.load(place, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(place, mask):
    return tl.load(place.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _float(place, mask):
    return tl.load(place.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)


@triton.jit
def _e4m3(code):
    """A float16 has one bit more of exponent, whose bias is 8 more: moved there, any code is 1/256 of its value."""
    moved = ((code & 127) << 7 | (code & 128) << 8).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(code & 127 == 127, float("nan"), moved.to(tl.float32) * 256.0)


@triton.jit
def _neighbour(packed, place, mask):
    """Of bytes whose low nibbles come before their high ones."""
    return _byte(packed + place // 2, mask) >> (place % 2 * 4) & 15


@triton.jit
def _nibble(packed, place, mask):
    """Of 16 bytes, whose low nibbles come first."""
    return _byte(packed + place % 16, mask) >> (place // 16 * 4) & 15


@triton.jit
def _of_two_runs(packed, place, mask):
    """Of groups of 32 bytes, each two runs of 32 nibbles, the low ones first."""
    return _byte(packed + place // 64 * 32 + place % 32, mask) >> (place // 32 % 2 * 4) & 15


@triton.jit
def _bit(packed, place, mask):
    return _byte(packed + place // 8, mask) >> (place % 8) & 1
