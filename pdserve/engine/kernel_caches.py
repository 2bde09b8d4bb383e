"""What oneDNN keeps of the kernels that it writes for each number of rows: few of them, and bounded.

It makes a kernel of half a megabyte for each number of rows that a product meets, and keeps the last thousand. So a
product meets one of few numbers: up to 16 each, above that eight in each doubling, 57 up to 576.

    17 18 | 19 20 | … | 31 32 | 33 … 36 | 37 … 40 | … | 61 … 64 | 65 … 72 | …      the last of each is computed
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# Four or five products a layer of a model with equal layers, times 57, and what mixed steps put through the head.
_CAPACITY = "384"
# oneDNN's own cache, and the one that torch has before it.
_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_kernel_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bound both caches of this process, unless its environment says otherwise; before anything is multiplied."""
    for name in _VARIABLES:
        environ.setdefault(name, _CAPACITY)


def rounded_rows(num_rows: int) -> int:
    """The number of rows that is computed for so many: an eighth more at most."""
    step = 1 << max(0, (num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step
