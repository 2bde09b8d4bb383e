"""Tensor names: llama.cpp's to Hugging Face's, and what llama.cpp did to the values on its way.

A tensor's `transform` in tensors.json says how the engine undoes that after decoding:

    unpermute_q, unpermute_k   the rows of each head were interleaved for llama.cpp's own RoPE: put them back
    minus_one                  the norm's weight was stored plus one: subtract it

Experts, stored as one tensor of shape [experts, rows, columns] a layer, become one entry an expert: each is a run of
whole rows, hence of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pdserve.errors import Incompatible
from pdserve.modelstore.families import FAMILIES, FamilyTensors
from pdserve.modelstore.gguf_file import GgufFile, GgufTensor

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Tables that the config says in words.
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# With a number behind the name: one tensor an expert, as files of 2023 have it.
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")


def tensor_index(file: GgufFile, architecture: str, weights_name: str) -> dict[str, Any]:
    """The content of `tensors.json` for a GGUF file that will lie beside it as `weights_name`.

    architecture  the model class that config.json names
    Raises Incompatible for a tensor of unknown name.
    """
    family = FAMILIES[architecture]
    entries: dict[str, Any] = {}
    for tensor in file.tensors.values():
        if tensor.name in _NOT_WEIGHTS:
            continue
        for name, transform, part in _parts(tensor, family):
            entries[name] = {
                "type": part.type,
                "shape": list(part.shape),
                "offset": part.offset,
                "nbytes": part.num_bytes,
                "transform": transform,
            }
    return {"format": "gguf", "file": weights_name, "tensors": entries}


def _parts(tensor: GgufTensor, family: FamilyTensors) -> Iterator[tuple[str, str | None, GgufTensor]]:
    """Hugging Face name, transform and place of each tensor that a stored one holds."""
    if tensor.name in _WHOLE_MODEL:
        yield _WHOLE_MODEL[tensor.name], family.norm if "norm" in tensor.name else None, tensor
        return
    match = _LAYER_NAME.fullmatch(tensor.name)
    layer, name, number, kind = match.groups() if match is not None else ("", "", None, "")
    is_stacked = name.endswith("_exps")
    for part in family.layer + (family.experts or family.dense):
        if part.gguf != name.removesuffix("_exps"):
            continue
        full_name = f"model.layers.{layer}.{part.name}.{kind}"
        if "{}" not in part.name:
            if number is None and not is_stacked:
                yield full_name, family.norm if name.endswith("norm") else part.transform, tensor
                return
        elif kind == "weight" and number is not None and not is_stacked:
            yield full_name.format(number), None, tensor
            return
        elif kind == "weight" and number is None and is_stacked and len(tensor.shape) == 3:
            yield from _experts(tensor, full_name)
            return
    raise Incompatible("GGUF tensor has an unknown name", tensor=tensor.name)


def _experts(tensor: GgufTensor, name: str) -> Iterator[tuple[str, None, GgufTensor]]:
    num_experts, *shape = tensor.shape
    num_bytes = tensor.num_bytes // num_experts
    for expert in range(num_experts):
        part = GgufTensor(
            tensor.name, tensor.type, tuple(shape), tensor.offset + expert * num_bytes, num_bytes
        )
        yield name.format(expert), None, part
