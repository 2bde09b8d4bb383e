"""GGUF files with the same model in 16 bits, so that every engine has as many bytes to read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

_KEPT_F32 = 1  # dimensions: norms stay float32, as llama.cpp's own converter leaves them


def widened(source: Path, folder: Path, kind: GGMLQuantizationType) -> Path:
    """All matrices as BF16 or F16. Written once; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{source.resolve().parent.name[:12]}-{kind.name.lower()}.gguf"
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
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if kind.name == "F16" else LlamaFileType.MOSTLY_BF16)
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
