"""Tensor names: llama.cpp's to Hugging Face's, and what llama.cpp did to the rows."""

from __future__ import annotations

import re
from typing import Any

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile, GgufTensor

# What the engine can dequantise.
SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp stores Q and K of these architectures with the rows of each head interleaved for its own RoPE.
_PERMUTED = {"llama": {"attn_q": "unpermute_q", "attn_k": "unpermute_k"}}
# Tables that the config says in words: rope_freqs becomes `rope_scaling`.
_NOT_WEIGHTS = ("rope_freqs.weight",)
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def tensor_index(file: GgufFile, weights_name: str) -> dict[str, Any]:
    """The content of `tensors.json` for a GGUF file that will lie beside it as `weights_name`.

    Raises Incompatible for a tensor of unknown name or quantisation.
    """
    permuted = _PERMUTED.get(file.architecture(), {})
    entries: dict[str, Any] = {}
    for tensor in file.tensors:
        if tensor.name in _NOT_WEIGHTS:
            continue
        if tensor.type not in SUPPORTED_TYPES:
            raise Incompatible(
                "GGUF tensor of unsupported quantisation",
                tensor=tensor.name,
                got=tensor.type,
                supported=", ".join(SUPPORTED_TYPES),
            )
        name, transform = _hugging_face_name(tensor, permuted)
        entries[name] = {
            "type": tensor.type,
            "shape": list(tensor.shape),
            "offset": tensor.offset,
            "nbytes": tensor.num_bytes,
            "transform": transform,
        }
    return {"format": "gguf", "file": weights_name, "tensors": entries}


def _hugging_face_name(tensor: GgufTensor, permuted: dict[str, str]) -> tuple[str, str | None]:
    if tensor.name in _WHOLE_MODEL:
        return _WHOLE_MODEL[tensor.name], None
    match = _LAYER_NAME.fullmatch(tensor.name)
    if match is None or match[2] not in _LAYER:
        raise Incompatible("GGUF tensor of unknown name", tensor=tensor.name)
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}", permuted.get(match[2])
