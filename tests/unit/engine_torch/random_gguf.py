"""The small random model in GGUF's block formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.unit.engine_torch.random_model import SMALL, llama_tensors, write_random_model


def write_gguf(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The small model as a GGUF whose rotary rows lie as llama.cpp lays them; returns what must be read back."""
    write_random_model(folder, seed=4)
    (folder / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(folder / "weights.gguf", "llama")
    quantised = gguf.GGMLQuantizationType[kind]
    wanted: dict[str, torch.Tensor] = {}
    transforms: dict[str, str] = {}
    for name, tensor in llama_tensors(SMALL, 4, torch.float32).items():
        values = tensor.numpy()
        for part, heads in (("q", SMALL["num_attention_heads"]), ("k", SMALL["num_key_value_heads"])):
            if name.endswith(f"{part}_proj.weight"):
                transforms[name] = f"unpermute_{part}"
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        raw_type = quantised if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        raw = gguf.quantize(values, raw_type)
        writer.add_tensor(name, raw, raw_dtype=raw_type)
        back = torch.from_numpy(np.asarray(gguf.dequantize(raw, raw_type), dtype=np.float32))
        if name in transforms:
            heads = SMALL["num_attention_heads" if transforms[name].endswith("q") else "num_key_value_heads"]
            back = back.view(heads, -1, 2, back.shape[1]).transpose(1, 2).reshape(back.shape)
        wanted[name] = back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(folder / "weights.gguf")
    tensors: dict[str, Any] = {
        tensor.name: {
            "type": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "nbytes": int(tensor.n_bytes),
            "transform": transforms.get(tensor.name),
        }
        for tensor in reader.tensors
    }
    index = {"format": "gguf", "file": "weights.gguf", "tensors": tensors}
    (folder / "tensors.json").write_text(json.dumps(index))
    return wanted
