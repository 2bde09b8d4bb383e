"""Matrices of a quantised Hugging Face folder: read from their several tensors, laid out as rows of units.

One matrix at a time is unpacked to a byte a code and packed again with its scales beside the codes (grouped_types.py),
without any rounding: a value is s · (q − z) as public loaders compute it, with s as stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import structlog
import torch
from torch import Tensor

from pdserve.engine.dequant import decode
from pdserve.engine.dequant_grouped import neighbours
from pdserve.engine.stored_matrix import StoredMatrix
from pdserve.modelstore.errors import BadModel
from pdserve.modelstore.grouped_types import GROUP_SIZES, UNITS
from pdserve.modelstore.quantised_tensors import QuantisedTensor
from pdserve.modelstore.stored_tensors import StoredTensor

log = structlog.get_logger()
# Which nibble of AutoAWQ's words each of eight columns is: they hold columns 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
_PIECE_ROWS = 256


def grouped_matrix(
    name: str, stored: QuantisedTensor, bytes_of: Callable[[StoredTensor], Tensor]
) -> StoredMatrix:
    """In this process's own memory: as units where its groups are, else decoded to float32, with the reason logged.

    bytes_of  [num_bytes] uint8 of a stored tensor
    Raises BadModel: a column's group that there isn't.
    """
    codes = _codes(stored, bytes_of(stored.codes))
    scales = _scales(stored, bytes_of(stored.scales))
    zeros = _zeros(stored, bytes_of)
    groups = _groups(name, stored, bytes_of)
    size = _unit_size(stored) if groups is None else None
    if size is None:
        reason = "groups aren't whole units of 32" if groups is None else "columns of a group lie apart"
        decoding(stored.type, reason)
        return StoredMatrix.plain(_values(stored, codes, scales, zeros, groups))
    if stored.is_float:
        base = "F8"
    else:
        is_centred = bool((zeros == stored.middle).all())
        base = f"I{stored.bits}" if is_centred else f"I{stored.bits}Z"
    raw = _units(stored, base, size, codes, scales, zeros)
    return StoredMatrix.of(raw.view(-1), f"{base}_{size}", stored.shape)


@functools.cache
def decoding(stored: str, reason: str) -> None:
    """Say, once for all matrices that it is true of, why they aren't multiplied as they are stored."""
    log.info("weights.decoded", stored=stored, reason=reason)


def _codes(stored: QuantisedTensor, raw: Tensor) -> Tensor:
    """[out, in] uint8, integers without a sign: their least is 0."""
    outputs, width = stored.shape
    if stored.layout == "rows":
        codes = raw.view(outputs, width)
        return codes if stored.is_float else codes ^ 0x80
    if stored.layout == "packed":
        return _unpacked(raw.view(outputs, -1), stored.bits)[:, :width]
    words = raw.view(*stored.codes.shape, 4)
    if stored.layout == "gptq":
        return _unpacked(words, stored.bits).permute(1, 0, 2).reshape(outputs, width)
    return _awq_columns(words).t()


def _scales(stored: QuantisedTensor, raw: Tensor) -> Tensor:
    """[blocks of rows, blocks of columns] float32."""
    scales = decode(raw, stored.scales.type).to(torch.float32)
    rows, columns = stored.num_groups
    return scales.view(columns, rows).t() if stored.layout in ("gptq", "awq") else scales.view(rows, columns)


def _zeros(stored: QuantisedTensor, bytes_of: Callable[[StoredTensor], Tensor]) -> Tensor:
    """As `_scales`: which code means 0, int32."""
    rows, columns = stored.num_groups
    if stored.zeros is None:
        return torch.full((rows, columns), stored.middle, dtype=torch.int32)
    raw = bytes_of(stored.zeros)
    if stored.zeros.type == "I8":
        return raw.view(torch.int8).view(rows, columns).to(torch.int32) + stored.middle
    words = raw.view(*stored.zeros.shape, 4)
    if stored.layout == "packed":  # along the outputs
        return (
            _unpacked(words.transpose(0, 1).reshape(columns, -1), stored.bits)[:, :rows].t().to(torch.int32)
        )
    if stored.layout == "awq":
        return _awq_columns(words).t().to(torch.int32)
    zeros = _unpacked(words.view(columns, -1), stored.bits).t().to(torch.int32)
    return (zeros + stored.offset) & ((1 << stored.bits) - 1)


def _unpacked(raw: Tensor, bits: int) -> Tensor:
    """Bytes of words that hold 4 or 8 bits a code, the lowest bits first: […, n] → […, codes]."""
    return raw if bits == 8 else neighbours(raw)


def _awq_columns(words: Tensor) -> Tensor:
    """[rows, words, 4] uint8 → [rows, columns]"""
    return neighbours(words)[..., list(_AWQ_NIBBLES)].flatten(-2)


def _groups(name: str, stored: QuantisedTensor, bytes_of: Callable[[StoredTensor], Tensor]) -> Tensor | None:
    """[in] int64: of each column, where they aren't those that its place says."""
    if stored.order is None:
        return None
    dtype = torch.int64 if stored.order.type == "I64" else torch.int32
    raw = bytes_of(stored.order)
    groups = raw.clone().view(dtype).to(torch.int64)
    if bool((groups < 0).any()) or bool((groups >= stored.num_groups[1]).any()):
        raise BadModel("a column belongs to a group that there isn't", tensor=name)
    return None if torch.equal(groups, torch.arange(len(groups)) // stored.block[1]) else groups


def _unit_size(stored: QuantisedTensor) -> int | None:
    width, shared = stored.shape[1], stored.block[1]
    fitting = (size for size in GROUP_SIZES if width % size == 0 and (shared % size == 0 or shared >= width))
    return next(fitting, None)


def _values(
    stored: QuantisedTensor, codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None
) -> Tensor:
    outputs, width = stored.shape
    own = torch.arange(width) // stored.block[1] if groups is None else groups
    values = torch.empty(outputs, width)
    for begin in range(0, outputs, _PIECE_ROWS):
        piece = slice(begin, begin + _PIECE_ROWS)
        rows = torch.arange(outputs)[piece] // stored.block[0]
        if stored.is_float:
            centred = codes[piece].view(torch.float8_e4m3fn).to(torch.float32)
        else:
            centred = (codes[piece].to(torch.int32) - zeros[rows][:, own]).to(torch.float32)
        torch.mul(scales[rows][:, own], centred, out=values[piece])
    return values


def _units(
    stored: QuantisedTensor, base: str, size: int, codes: Tensor, scales: Tensor, zeros: Tensor
) -> Tensor:
    """[out, bytes of a row] uint8"""
    outputs, width = stored.shape
    num = width // size
    rows = torch.arange(outputs) // stored.block[0]
    columns = torch.arange(num) * size // stored.block[1]
    units = torch.empty(outputs, num, UNITS[f"{base}_{size}"].num_bytes, dtype=torch.uint8)

    def put(at: int, of_groups: Tensor) -> None:
        each = of_groups.to(torch.float32)[rows][:, columns].contiguous()
        units[:, :, at : at + 4] = each.view(torch.uint8).view(outputs, num, 4)

    put(0, scales)
    if base.endswith("Z"):
        put(4, zeros)
    codes = codes.reshape(outputs, num, size)
    if stored.bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    units[:, :, -codes.shape[2] :] = codes ^ 0x80 if base == "I8" else codes
    return units.view(outputs, -1)
