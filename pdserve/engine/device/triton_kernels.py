"""Triton kernels over the pool's own layout, [num_blocks, kv_heads, layers, 2, block_size, head_dim].

A program gets the pool at its layer and head, and finds a position p of its row in block blocks[p // block_size]:

    singles  program (row, kv head, part of the context): the row's query heads of that KV head against its part;
             then (row, query head): the parts together
    chunk    program (tile of queries, kv head): a tile is some query heads of some positions, whatever the group
    store    program (token, head): normalise, turn, and write a query to the queries, a key or value to the pool

Products take the queries' dtype and give float32; sums and the softmax are float32. What isn't visible isn't loaded.
Strides are in values. A width that is no power of two is padded to the next one and masked. Triton compiles a kernel
again for numbers and addresses that divide by 16 and for others; where these change from step to step it must not, or a
step would wait for a compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["projected", "slots"])
def store_turned(
    projected,  # [tokens, (heads + 2 · kv_heads) · D]
    turns,  # [tokens, D / 2, 2] float32: cosine, sine
    norm_weight,  # [heads + kv_heads, D] float32
    slots,  # [tokens]
    queries,  # [tokens, heads, D]
    pool,  # at its layer
    eps,
    row_stride,
    block_stride,
    head_stride,
    part_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    D: tl.constexpr,
    half: tl.constexpr,
    block_size: tl.constexpr,
    has_norm: tl.constexpr,
    limit: tl.constexpr,  # of what is stored; 0: none
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    pair = tl.arange(0, half)
    inside = pair < D // 2
    source = projected + token.to(tl.int64) * row_stride + head * D + 2 * pair
    real = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    imag = tl.load(source + 1, mask=inside, other=0.0).to(tl.float32)
    if head < num_heads + num_kv_heads:
        if has_norm:
            scale = 1.0 / tl.sqrt(tl.sum(real * real + imag * imag, axis=0) / D + eps)
            weight = norm_weight + head * D + 2 * pair
            real = real * scale * tl.load(weight, mask=inside, other=0.0)
            imag = imag * scale * tl.load(weight + 1, mask=inside, other=0.0)
        turn = turns + token.to(tl.int64) * D + 2 * pair
        cosine = tl.load(turn, mask=inside, other=0.0)
        sine = tl.load(turn + 1, mask=inside, other=0.0)
        turned = real * cosine - imag * sine
        imag = real * sine + imag * cosine
        real = turned
    if head < num_heads:
        target = queries + (token.to(tl.int64) * num_heads + head) * D + 2 * pair
        tl.store(target, real.to(queries.dtype.element_ty), mask=inside)
        tl.store(target + 1, imag.to(queries.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        part = (head - num_heads) // num_kv_heads
        kv_head = (head - num_heads) % num_kv_heads
        place = pool + slot // block_size * block_stride + kv_head * head_stride + part * part_stride
        target = place + slot % block_size * D + 2 * pair
        if limit > 0:
            real = _limited(real, limit)
            imag = _limited(imag, limit)
        tl.store(target, real.to(pool.dtype.element_ty), mask=inside)
        tl.store(target + 1, imag.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _limited(x, limit):
    """NaN stays NaN: it has to show."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _tanh(x):
    """By its series where the quotient would lose digits: |error| < 5e-8."""
    square = x * x
    series = x * (
        1.0
        + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))))
    )
    shrunk = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _attend(
    queries,  # [M, padded]
    positions,  # [M]: each query sees keys up to its own
    blocks,  # of the row
    pool,  # at its layer and head
    begin,  # positions [begin, end) are looked at
    end,
    block_stride,
    part_stride,
    scale,
    softcap,
    window,
    D: tl.constexpr,
    padded: tl.constexpr,
    block_size: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Weighted sums of values [M, padded], largest scores [M], sums of weights [M]; all float32."""
    column = tl.arange(0, padded)
    total = tl.zeros((M, padded), dtype=tl.float32)
    largest = tl.full((M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((M,), dtype=tl.float32)
    for first in range(begin, end, N):
        key = first + tl.arange(0, N)
        is_there = key < end
        block = tl.load(blocks + key // block_size, mask=is_there, other=0).to(tl.int64)
        place = (block * block_stride + key % block_size * D)[:, None] + column[None, :]
        loaded = is_there[:, None] & (column < D)[None, :]
        keys = tl.load(pool + place, mask=loaded, other=0.0).to(queries.dtype)
        values = tl.load(pool + part_stride + place, mask=loaded, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if has_cap:
            scores = softcap * _tanh(scores / softcap)
        is_seen = is_there[None, :] & (key[None, :] <= positions[:, None])
        if window > 0:
            is_seen = is_seen & (key[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        # A query that has seen nothing yet has no largest score to subtract.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        total = total * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        largest = larger
    return total, largest, weight_sum


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["blocks", "ends"])
def attend_singles(
    queries,  # [rows, heads, D]
    blocks,  # [rows, width]
    ends,  # [rows]
    pool,  # at its layer
    sums,  # [rows, heads, num_parts, D] float32
    largest,  # [rows, heads, num_parts] float32
    weights,  # [rows, heads, num_parts] float32
    width,
    block_stride,
    head_stride,
    part_stride,
    scale,
    softcap,
    window,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    D: tl.constexpr,
    padded: tl.constexpr,
    block_size: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    num_parts: tl.constexpr,
    has_cap: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    end = tl.load(ends + row)
    seen_from = 0
    if window > 0:
        seen_from = tl.maximum(end - window, 0)
    # Parts of whole tiles; the last ones of a short row are empty.
    part_size = tl.cdiv(tl.cdiv(end - seen_from, N), num_parts) * N
    begin = tl.minimum(seen_from + part * part_size, end)
    member = tl.arange(0, M)
    column = tl.arange(0, padded)
    is_head = member < group
    here = (row * num_heads + kv_head * group + member) * D
    inside = is_head[:, None] & (column < D)[None, :]
    query = tl.load(queries + here[:, None] + column[None, :], mask=inside, other=0.0)
    total, most, weight_sum = _attend(
        query,
        tl.zeros((M,), dtype=tl.int32) + end - 1,
        blocks + row * width,
        pool + kv_head * head_stride,
        begin,
        tl.minimum(begin + part_size, end),
        block_stride,
        part_stride,
        scale,
        softcap,
        window,
        D,
        padded,
        block_size,
        M,
        N,
        has_cap,
    )
    place = (row * num_heads + kv_head * group + member) * num_parts + part
    tl.store(sums + place[:, None] * D + column[None, :], total, mask=inside)
    tl.store(largest + place, most, mask=is_head)
    tl.store(weights + place, weight_sum, mask=is_head)


@triton.jit
def join_parts(
    sums,
    largest,
    weights,
    outputs,  # [rows, heads, D]
    D: tl.constexpr,
    padded: tl.constexpr,
    num_parts: tl.constexpr,
):
    """Parts of one row and query head, as `attend_singles` left them."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, num_parts)
    column = tl.arange(0, padded)
    most = tl.load(largest + place * num_parts + part)
    factors = tl.exp(most - tl.max(most, axis=0))
    here = (place * num_parts + part)[:, None] * D + column[None, :]
    parts = tl.load(sums + here, mask=(column < D)[None, :], other=0.0)
    weight_sum = tl.sum(factors * tl.load(weights + place * num_parts + part), axis=0)
    joined = tl.sum(parts * factors[:, None], axis=0) / weight_sum
    tl.store(outputs + place * D + column, joined.to(outputs.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["num_tokens", "start"], do_not_specialize_on_alignment=["blocks"])
def attend_chunk(
    queries,  # [tokens, heads, D]
    blocks,  # [width]
    pool,  # at its layer
    outputs,  # [tokens, heads, D]
    num_tokens,
    start,
    block_stride,
    head_stride,
    part_stride,
    scale,
    softcap,
    window,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    D: tl.constexpr,
    padded: tl.constexpr,
    block_size: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    has_cap: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    member = tile * M + tl.arange(0, M)
    token = member // group
    column = tl.arange(0, padded)
    inside = (token < num_tokens)[:, None] & (column < D)[None, :]
    here = ((token.to(tl.int64) * num_heads + kv_head * group + member % group) * D)[:, None] + column[
        None, :
    ]
    query = tl.load(queries + here, mask=inside, other=0.0)
    first = start + tile * M // group
    last = start + tl.minimum((tile * M + M - 1) // group, num_tokens - 1)
    begin = 0
    if window > 0:
        begin = tl.maximum(first + 1 - window, 0)
    total, _, weight_sum = _attend(
        query,
        start + tl.minimum(token, num_tokens - 1),
        blocks,
        pool + kv_head * head_stride,
        begin,
        last + 1,
        block_stride,
        part_stride,
        scale,
        softcap,
        window,
        D,
        padded,
        block_size,
        M,
        N,
        has_cap,
    )
    result = total / weight_sum[:, None]
    tl.store(outputs + here, result.to(outputs.dtype.element_ty), mask=inside)
