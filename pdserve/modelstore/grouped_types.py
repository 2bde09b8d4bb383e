"""Types of matrices whose values share scales, as a load lays out what a Hugging Face folder keeps in several tensors.

Units of 32, 64 or 128 neighbours of a row; NAME_SIZE:

    I8   s: f32 | codes: i8                value = s·q
    I8Z  s: f32 | z: f32 | codes: u8       value = s·(q − z)
    I4   s: f32 | codes: u4                value = s·(q − 8)
    I4Z  s: f32 | z: f32 | codes: u4       value = s·(q − z)
    F8   s: f32 | codes: e4m3              value = s·q

Two codes of 4 bits are a byte, the low nibble first. A wider group, a channel, a block or a whole matrix with one scale
are several units with equal ones.
"""

from __future__ import annotations

from pdserve.modelstore.gguf_types import SUPPORTED, StoredType

GROUP_SIZES = (128, 64, 32)
#: bytes before the codes, and bits of a code
_HEADS = {"I8": (4, 8), "I8Z": (8, 8), "I4": (4, 4), "I4Z": (8, 4), "F8": (4, 8)}

GROUPED: dict[str, StoredType] = {
    f"{name}_{size}": StoredType(size, head + size * bits // 8)
    for name, (head, bits) in _HEADS.items()
    for size in GROUP_SIZES
}
#: of everything that can be decoded
UNITS: dict[str, StoredType] = SUPPORTED | GROUPED


def base_of(kind: str) -> str:
    """A type's name without the size of its units, for those above; others as they are."""
    return kind.rpartition("_")[0] if kind in GROUPED else kind
