"""The same model in one format, so that every engine reads as many bytes: a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from pdserve import modelstore
from pdserve.engine.config_reader import load_config
from pdserve.engine.models import MODELS
from pdserve.engine.weights import Weights

_KEPT_F32 = 1  # dimensions: norms stay float32, as llama.cpp's own converter leaves them
_NOT_COPIED = (".gguf", ".safetensors", "tensors.json", ".index.json")


def widened(source: Path, folder: Path, kind: GGMLQuantizationType) -> Path:
    """All matrices as BF16, F16, Q8_0 or Q4_0. Written once; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_short_name(source)}-{kind.name.lower()}.gguf"
    if target.exists():
        return target
    reader = GGUFReader(source)
    written = target.with_suffix(".part")
    writer = GGUFWriter(written, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], item)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind.name}"])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) <= _KEPT_F32:
            writer.add_tensor(tensor.name, values)
            continue
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written.rename(target)
    return target


def hugging_face(source: Path, folder: Path) -> Path:
    """A folder of safetensors in bfloat16, with the config and the tokenizer. Written once; its path."""
    target = folder / f"{_short_name(source)}-hf"
    if target.exists():
        return target
    stored = modelstore.resolve(str(source))
    written = target.with_suffix(".part")
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir(parents=True)
    for file in stored.iterdir():
        if not file.name.endswith(_NOT_COPIED):
            shutil.copy(file, written)
    weights = Weights(stored, load_config(stored, MODELS))
    tensors = {
        name: weights.load(name, weights.shape(name)).to(torch.bfloat16).contiguous()
        for name in weights.names()
    }
    save_file(tensors, written / "model.safetensors", {"format": "pt"})
    written.rename(target)
    return target


def _short_name(source: Path) -> str:
    return source.resolve().parent.name[:12]
