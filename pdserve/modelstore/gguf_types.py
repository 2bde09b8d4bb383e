"""Types of stored tensors by their ids, and what the engine can decode; types of tokens."""

from __future__ import annotations

from dataclasses import dataclass

CONTROL, USER_DEFINED = 3, 4  # of tokens. Source: `llama_token_type`


@dataclass(frozen=True, slots=True)
class StoredType:
    """A type's smallest unit: `num_bytes` hold `num_values` values of one row."""

    num_values: int
    num_bytes: int


# Decoded by pdserve.engine.dequant.
SUPPORTED: dict[str, StoredType] = {
    "F32": StoredType(1, 4),
    "F16": StoredType(1, 2),
    "BF16": StoredType(1, 2),
    "Q8_0": StoredType(32, 34),
    "Q4_0": StoredType(32, 18),
    "Q4_1": StoredType(32, 20),
    "Q5_0": StoredType(32, 22),
    "Q5_1": StoredType(32, 24),
    "Q4_K": StoredType(256, 144),
    "Q5_K": StoredType(256, 176),
    "Q6_K": StoredType(256, 210),
}

# Source: ggml's `enum ggml_type`; ids that are left out were given up.
TYPE_NAMES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
