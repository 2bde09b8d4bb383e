"""Tensor names: llama.cpp's to Hugging Face's, and what llama.cpp did to the values on its way.

A tensor's `transform` in tensors.json says how the engine undoes that after decoding:

    unpermute_q, unpermute_k   the rows of each head were interleaved for llama.cpp's own RoPE: put them back
    minus_one                  the norm's weight was stored plus one: subtract it

Experts, stored as one tensor of shape [experts, rows, columns] a layer, become one entry an expert: each is a run of
whole rows, hence of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import GgufFile, GgufTensor

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Tables that the config says in words.
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# One tensor an expert, as files of 2023 have it.
_EXPERT_NAME = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_FFN}
# llama.cpp stores Q and K of these with the rows of each head interleaved.
_PERMUTED = {"attn_q": "unpermute_q", "attn_k": "unpermute_k"}


@dataclass(frozen=True, slots=True)
class _Names:
    """How one model class calls what llama.cpp calls otherwise.

    layer      the part of a name behind the layer's number
    experts    the same for stacked tensors; {} is the expert's number
    transform  by llama.cpp's part of the name
    norm       transform of every norm
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    transform: Mapping[str, str] = field(default_factory=dict)
    norm: str | None = None


_LLAMA = _Names(_DENSE, transform=_PERMUTED)
_BY_CLASS: dict[str, _Names] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _Names(
        {**_ATTENTION, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            "ffn_gate": "block_sparse_moe.experts.{}.w1",
            "ffn_down": "block_sparse_moe.experts.{}.w2",
            "ffn_up": "block_sparse_moe.experts.{}.w3",
        },
        transform=_PERMUTED,
    ),
    "Qwen2ForCausalLM": _Names(_DENSE),
    "Qwen3ForCausalLM": _Names({**_DENSE, **_QK_NORM}),
    "Qwen3MoeForCausalLM": _Names(
        {**_ATTENTION, **_QK_NORM, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
        experts={
            "ffn_gate": "mlp.experts.{}.gate_proj",
            "ffn_up": "mlp.experts.{}.up_proj",
            "ffn_down": "mlp.experts.{}.down_proj",
        },
    ),
    "Phi3ForCausalLM": _Names(
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "Gemma3ForCausalLM": _Names(
        {
            **_ATTENTION,
            **_QK_NORM,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            **_FFN,
        },
        norm="minus_one",
    ),
}


def tensor_index(file: GgufFile, architecture: str, weights_name: str) -> dict[str, Any]:
    """The content of `tensors.json` for a GGUF file that will lie beside it as `weights_name`.

    architecture  the model class that config.json names
    Raises Incompatible for a tensor of unknown name.
    """
    names = _BY_CLASS[architecture]
    entries: dict[str, Any] = {}
    for tensor in file.tensors.values():
        if tensor.name in _NOT_WEIGHTS:
            continue
        for name, transform, part in _parts(tensor, names):
            entries[name] = {
                "type": part.type,
                "shape": list(part.shape),
                "offset": part.offset,
                "nbytes": part.num_bytes,
                "transform": transform,
            }
    return {"format": "gguf", "file": weights_name, "tensors": entries}


def _parts(tensor: GgufTensor, names: _Names) -> Iterator[tuple[str, str | None, GgufTensor]]:
    """Hugging Face name, transform and place of each tensor that a stored one holds."""
    if tensor.name in _WHOLE_MODEL:
        yield _WHOLE_MODEL[tensor.name], names.norm if "norm" in tensor.name else None, tensor
        return
    match = _LAYER_NAME.fullmatch(tensor.name)
    if match is not None:
        layer, part, kind = match.groups()
        if part in names.layer:
            transform = names.norm if part.endswith("norm") else names.transform.get(part)
            yield f"model.layers.{layer}.{names.layer[part]}.{kind}", transform, tensor
            return
        stacked = part.removesuffix("_exps")
        if stacked != part and stacked in names.experts and kind == "weight" and len(tensor.shape) == 3:
            yield from _experts(tensor, f"model.layers.{layer}.{names.experts[stacked]}.weight")
            return
    match = _EXPERT_NAME.fullmatch(tensor.name)
    if match is not None and match[2] in names.experts:
        yield f"model.layers.{match[1]}.{names.experts[match[2]].format(match[3])}.weight", None, tensor
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
