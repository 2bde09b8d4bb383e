"""Folders whose weights are quantised, written as the public packages write them: from their published layouts.

    compressed-tensors  https://github.com/vllm-project/compressed-tensors
    gptq                AutoGPTQ's QuantLinear.pack: words along the inputs, zero points less one in version 1
    awq                 AutoAWQ's WQLinear_GEMM.from_linear: words along the outputs, in the order 0 2 4 6 1 3 5 7
    fp8                 DeepSeek's and Qwen's blocks of 128 × 128, and a scale a matrix
    fbgemm_fp8          a scale a channel

Weights are rounded to nearest; no calibration.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E4M3_MOST = 448.0


@dataclass(frozen=True)
class Format:
    """How all matrices of the layers are stored. group 0: a channel; scale: dtype of scales."""

    method: str
    bits: int = 4
    group: int = 0
    symmetric: bool = True
    scale: torch.dtype = torch.float16
    style: str = ""
    in_order: bool = True


BF16 = torch.bfloat16
FORMATS: dict[str, Format] = {
    "ct w4a16 g32": Format("compressed-tensors", 4, 32, scale=BF16, style="pack-quantized"),
    "ct w4a16 g32 asym": Format("compressed-tensors", 4, 32, False, BF16, "pack-quantized"),
    "ct w4a16 channel": Format("compressed-tensors", 4, 0, scale=torch.float32, style="pack-quantized"),
    "ct w8a16 g32": Format("compressed-tensors", 8, 32, style="pack-quantized"),
    "ct w8a16 channel asym": Format("compressed-tensors", 8, 0, False, style="pack-quantized"),
    "ct w8a8": Format("compressed-tensors", 8, 0, scale=BF16, style="int-quantized"),
    "ct w8a8 asym": Format("compressed-tensors", 8, 0, False, BF16, "int-quantized"),
    "ct fp8 channel": Format("compressed-tensors", 8, 0, scale=BF16, style="float-quantized"),
    "ct fp8 tensor": Format("compressed-tensors", 8, -1, scale=BF16, style="float-quantized"),
    "gptq int4 g32": Format("gptq", 4, 32),
    "gptq int4 g32 asym": Format("gptq", 4, 32, False),
    "gptq int4 g32 act order": Format("gptq", 4, 32, False, in_order=False),
    "gptq int4 channel": Format("gptq", 4, 0),
    "gptq_v2 int4 g32 asym": Format("gptq", 4, 32, False, style="gptq_v2"),
    "gptq int8 g32": Format("gptq", 8, 32),
    "gptq int8 g32 asym": Format("gptq", 8, 32, False),
    "awq int4 g32": Format("awq", 4, 32, False),
    "fp8 blocks": Format("fp8", 8, -128, scale=torch.float32),
    "fp8 tensor": Format("fp8", 8, -1, scale=torch.float32),
    "fbgemm fp8": Format("fbgemm_fp8", 8, 0, scale=torch.float32),
}


@dataclass(frozen=True)
class _Rounded:
    """codes [out, in] int64 from 0 (or e4m3); scales, zeros [out, groups]; order [in]: of each column, its group."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor

    def values(self, *, is_float: bool) -> Tensor:
        """float32"""
        centred = self.codes.float() if is_float else (self.codes - self.zeros[:, self.order]).float()
        return centred * self.scales.float()[:, self.order]


def quantise(
    folder: Path, form: Format, keep: Callable[[str], bool] = lambda name: False
) -> dict[str, Tensor]:
    """Store a folder's matrices anew; embeddings, norms, biases, routers and what `keep` names stay.

    returns  all tensors as they must be read, float32 where they are quantised
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    stored: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        is_kept = tensor.ndim != 2 or last != "weight" or "embed" in name or name.endswith("gate.weight")
        if is_kept or keep(module):
            stored[name] = wanted[name] = tensor
            continue
        parts, wanted[name] = _stored(tensor.float(), form)
        stored |= {f"{module}.{part}": values.contiguous() for part, values in parts.items()}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantisation_config(form)
    (folder / "config.json").write_text(json.dumps(config))
    return wanted


def quantisation_config(form: Format) -> dict[str, Any]:
    group = form.group if form.group > 0 else -1
    if form.method == "gptq":
        own = {"bits": form.bits, "group_size": group, "desc_act": not form.in_order, "sym": form.symmetric}
        return {"quant_method": "gptq", **own, **({"checkpoint_format": form.style} if form.style else {})}
    if form.method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    if form.method == "fp8":
        blocks = {"weight_block_size": [128, 128]} if form.group == -128 else {}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **blocks}
    if form.method == "fbgemm_fp8":
        return {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        }
    is_float = form.style == "float-quantized"
    strategy = "tensor" if form.group == -1 else "group" if form.group else "channel"
    weights = {
        "num_bits": form.bits,
        "type": "float" if is_float else "int",
        "symmetric": form.symmetric,
        "strategy": strategy,
        "group_size": form.group if strategy == "group" else None,
        "dynamic": False,
    }
    inputs = None
    if form.style in ("int-quantized", "float-quantized"):
        inputs = {
            "num_bits": 8,
            "type": weights["type"],
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": form.style,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


def _stored(weight: Tensor, form: Format) -> tuple[dict[str, Tensor], Tensor]:
    if form.method in ("fp8", "fbgemm_fp8") or form.style == "float-quantized":
        return _floats(weight, form)
    rounded = _rounded(weight, form)
    values = rounded.values(is_float=False)
    if form.method == "gptq":
        less = 0 if form.style == "gptq_v2" else 1
        return {
            "qweight": _down(rounded.codes.t(), form.bits),
            "qzeros": _words((rounded.zeros.t() - less) & ((1 << form.bits) - 1), form.bits),
            "scales": rounded.scales.t(),
            "g_idx": rounded.order.to(torch.int32),
        }, values
    if form.method == "awq":
        return {
            "qweight": _words(_shuffled(rounded.codes.t()), 4),
            "qzeros": _words(_shuffled(rounded.zeros.t()), 4),
            "scales": rounded.scales.t(),
        }, values
    middle = 1 << (form.bits - 1)
    if form.style == "int-quantized":
        parts = {"weight": (rounded.codes - middle).to(torch.int8), "weight_scale": rounded.scales}
        if not form.symmetric:
            parts["weight_zero_point"] = (rounded.zeros - middle).to(torch.int8)
        return parts, values
    parts = {
        "weight_packed": _words(rounded.codes, form.bits),
        "weight_scale": rounded.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not form.symmetric:
        parts["weight_zero_point"] = _down(rounded.zeros, form.bits)
    return parts, values


def _rounded(weight: Tensor, form: Format) -> _Rounded:
    width = weight.shape[1]
    group = form.group or width
    order = torch.arange(width) // group
    if not form.in_order:
        order = order[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    most = (1 << form.bits) - 1
    parts = [weight[:, order == each] for each in range(-(-width // group))]
    highest = torch.stack([part.amax(1) for part in parts], dim=1)
    lowest = torch.stack([part.amin(1) for part in parts], dim=1)
    if form.symmetric:
        scales = (torch.maximum(highest.abs(), lowest.abs()) / (most / 2)).to(form.scale)
        zeros = torch.full_like(scales, (most + 1) // 2, dtype=torch.int64)
    else:
        scales = ((highest.clamp(min=0) - lowest.clamp(max=0)) / most).to(form.scale)
        zeros = (-lowest.clamp(max=0) / scales.float()).round().clamp(1, most).to(torch.int64)
    codes = (weight / scales.float()[:, order]).round().to(torch.int64) + zeros[:, order]
    return _Rounded(codes.clamp(0, most), scales, zeros, order)


def _floats(weight: Tensor, form: Format) -> tuple[dict[str, Tensor], Tensor]:
    size = {0: (1, weight.shape[1]), -1: tuple(weight.shape), -128: (128, 128)}[form.group]
    rows, columns = (-(-length // each) for length, each in zip(weight.shape, size, strict=True))
    scales = torch.empty(rows, columns, dtype=form.scale)
    spread = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * size[0], (row + 1) * size[0]),
                slice(column * size[1], (column + 1) * size[1]),
            )
            scales[row, column] = weight[place].abs().max() / _E4M3_MOST
            spread[place] = scales[row, column].float()
    codes = (weight / spread).clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if form.group == -128 else "weight_scale"
    if form.group == -1:
        scales = scales.view(1) if form.method == "compressed-tensors" else scales.view(())
    return {"weight": codes, name: scales}, codes.float() * spread


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes of a row side by side in words of 32 bits, the first one lowest."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    words = (padded << (torch.arange(each) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _down(codes: Tensor, bits: int) -> Tensor:
    """The same, codes of a column one upon the other."""
    return _words(codes.t(), bits).t()


def _shuffled(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, 8)[..., list(_AWQ_ORDER)].flatten(1)
