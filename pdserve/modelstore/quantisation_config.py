"""What `quantization_config` in a config.json says, and whether weights stored like this can be read.

Every public loader builds its layers from this section. Here the tensors themselves say which modules are quantised,
so lists of exceptions (`ignore`, `modules_to_not_convert`, rules of `dynamic`) need no matching: what they leave out is
stored as any other weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.modelstore.errors import BadModel

METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "fbgemm_fp8")
_COMPRESSED_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense",
)  # fmt: skip
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """What a folder's quantised weights have in common.

    kinds       (is float, bits) that a matrix may have; empty: any of 4 and 8 bits
    group_size  columns that share a scale where the tensors alone don't say it; 0: all
    group_sizes  those that a matrix may have whose tensors do; empty: any
    block       rows and columns that share one; None: not in blocks
    zero_point  what is added to a stored zero point
    """

    method: str
    kinds: frozenset[tuple[bool, int]]
    group_size: int = 0
    group_sizes: frozenset[int] = frozenset()
    block: tuple[int, int] | None = None
    zero_point: int = 0


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Of the content of a config.json; None: its weights aren't quantised.

    Raises BadModel in one line for what can't be read, naming the key.
    """
    key = "quantization_config" if "quantization_config" in config else "compression_config"
    section = config.get(key)
    if section is None or section == {}:
        return None
    if not isinstance(section, Mapping):
        raise BadModel("config.json needs an object here", key=key, got=section)
    method = section.get("quant_method")
    if method not in METHODS:
        raise BadModel(
            "weights quantised like this are not supported: take the model's unquantised files, or a GGUF file",
            quantisation=method,
            supported=", ".join(METHODS),
        )
    return _READERS[method](section)


def _compressed(section: Mapping[str, Any]) -> Quantisation:
    """Source: https://github.com/vllm-project/compressed-tensors, README and its quantization package."""
    _one_of(section, "format", _COMPRESSED_FORMATS, "dense")
    sparsity = section.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise BadModel("sparse weights are not supported", quantisation="compressed-tensors", got=sparsity)
    if section.get("transform_config"):
        raise BadModel("transforms of activations are not supported", key="transform_config")
    groups = section.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise BadModel("config.json needs an object here", key="config_groups", got=groups)
    read = [_group(name, group) for name, group in groups.items()]
    blocks = {block for _, block, _ in read if block is not None}
    if len(blocks) > 1:
        raise BadModel("blocks of several sizes in one model are not supported", got=sorted(blocks))
    kinds = frozenset(kind for kind, *_ in read)
    return Quantisation(
        method="compressed-tensors",
        kinds=kinds,
        group_sizes=frozenset(size for *_, size in read if size),
        block=next(iter(blocks), None),
    )


def _group(name: str, group: object) -> tuple[tuple[bool, int], tuple[int, int] | None, int]:
    """A group's kind of weights, their blocks, and the columns that share a scale (0: not in groups)."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise BadModel("config.json needs an object here", key=f"config_groups.{name}.weights", got=weights)
    if "format" in group and group["format"] is not None:
        _one_of(group, "format", _COMPRESSED_FORMATS, "")
    bits = _one_of(weights, "num_bits", (4, 8), 8)
    is_float = _one_of(weights, "type", ("int", "float"), "int") == "float"
    if is_float and (bits != 8 or weights.get("symmetric", True) is not True):
        raise BadModel("floats other than e4m3 without zero points are not supported", bits=bits, group=name)
    strategy = weights.get("strategy")
    if strategy is not None:
        _one_of(weights, "strategy", _STRATEGIES, "")
    inputs = group.get("input_activations")
    if not is_float and isinstance(inputs, Mapping) and inputs.get("dynamic", False) is not True:
        raise BadModel("activations with scales of their own are not supported", group=name, bits=bits)
    if group.get("output_activations"):
        raise BadModel("quantised results of products are not supported", group=name)
    block = _block(weights, "block_structure") if strategy == "block" else None
    size = _group_size(weights) if strategy == "group" else 0
    return (is_float, int(bits)), block, size


def _gptq(section: Mapping[str, Any]) -> Quantisation:
    """Source: AutoGPTQ's and GPTQModel's quantize_config.

    Version 1 stores zero points less one, 2 as they are.
    """
    bits = _one_of(section, "bits", (4, 8), None)
    form = _one_of(section, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    kinds = frozenset() if section.get("dynamic") else frozenset({(False, int(bits))})
    return Quantisation(
        method="gptq", kinds=kinds, group_size=_group_size(section), zero_point=1 if form == "gptq" else 0
    )


def _awq(section: Mapping[str, Any]) -> Quantisation:
    """Source: AutoAWQ's quant_config."""
    _one_of(section, "bits" if "bits" in section else "w_bit", (4,), None)
    version = section.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise BadModel("this order of weights is not supported", key="version", got=version, supported="gemm")
    _one_of(section, "zero_point", (True,), True)
    return Quantisation(method="awq", kinds=frozenset({(False, 4)}), group_size=_group_size(section))


def _fp8(section: Mapping[str, Any]) -> Quantisation:
    """Source: transformers' FineGrainedFP8Config, FbgemmFp8Config."""
    _one_of(section, "fmt", ("e4m3",), "e4m3")
    has_blocks = section.get("weight_block_size") is not None
    return Quantisation(
        method=str(section["quant_method"]),
        kinds=frozenset({(True, 8)}),
        block=_block(section, "weight_block_size") if has_blocks else None,
    )


_READERS = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
}


def _one_of(section: Mapping[str, Any], key: str, supported: tuple[Any, ...], default: Any) -> Any:
    value = section.get(key, default)
    # A list is in no tuple of these, and True is no 1.
    if not any(type(value) is type(each) and value == each for each in supported):
        raise BadModel(
            "weights quantised like this are not supported",
            key=key,
            got=value,
            supported=", ".join(map(str, supported)),
        )
    return value


def _group_size(section: Mapping[str, Any]) -> int:
    key = "q_group_size" if "q_group_size" in section else "group_size"
    size = section.get(key, -1)
    if not isinstance(size, int) or isinstance(size, bool) or not (size == -1 or size > 0):
        raise BadModel("config.json needs -1 or a positive whole number here", key=key, got=size)
    return max(size, 0)


def _block(section: Mapping[str, Any], key: str) -> tuple[int, int]:
    sizes = section.get(key)
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    ):
        raise BadModel("config.json needs two positive whole numbers here", key=key, got=sizes)
    return sizes[0], sizes[1]
