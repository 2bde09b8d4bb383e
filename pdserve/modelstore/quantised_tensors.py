"""The matrices of a quantised Hugging Face folder, found among its tensors by their names and shapes. No torch.

compressed-tensors  X.weight_packed int32 [out, in·bits/32] or X.weight int8, e4m3 [out, in]; X.weight_scale;
                    X.weight_zero_point, X.weight_shape, X.weight_g_idx
fp8, fbgemm_fp8     X.weight e4m3 [out, in]; X.weight_scale or X.weight_scale_inv, both to multiply by
gptq                X.qweight int32 [in·bits/32, out]; X.scales [groups, out]; X.qzeros [groups, out·bits/32]; X.g_idx
awq                 X.qweight int32 [in, out·bits/32], its columns interleaved; X.scales, X.qzeros as above
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.modelstore.errors import BadModel
from pdserve.modelstore.gguf_types import SUPPORTED
from pdserve.modelstore.quantisation_config import Quantisation, read_quantisation
from pdserve.modelstore.stored_tensors import StoredTensor, read_tensors
from pdserve.modelstore.text_config import text_tensors

_SCALES = ("F32", "F16", "BF16")
# Of activations and KV, which stay as exact here as they are; and what says no more than a matrix's other tensors do.
_UNUSED = (
    ".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale", ".output_scale",
    ".weight_shape", ".weight_zero_point", ".g_idx",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensor:
    """One matrix [out, in], whose codes, scales and zero points are tensors of their own.

    layout  "rows": codes as they lie; "packed": along rows in words of 32 bits; "gptq", "awq": see above
    block   rows and columns that share a scale; scales lie as [blocks of rows, blocks of columns], with "gptq" and
            "awq" the other way round
    offset  what is added to a stored zero point
    order   of each column: which group it belongs to
    """

    layout: str
    method: str
    bits: int
    is_float: bool
    shape: tuple[int, int]
    block: tuple[int, int]
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    order: StoredTensor | None = None
    offset: int = 0

    @property
    def tensors(self) -> list[StoredTensor]:
        found = (self.codes, self.scales, self.zeros, self.order)
        return [tensor for tensor in found if tensor is not None]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def middle(self) -> int:
        """The code of integers with a sign that means 0, when the least code is 0."""
        return 1 << (self.bits - 1)

    @property
    def num_groups(self) -> tuple[int, int]:
        """Blocks one upon the other, and side by side."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def type(self) -> str:
        """For people: kind, bits, what shares a scale, and the method."""
        rows, columns = self.block
        if rows == 1:
            shared = "channel" if columns == self.shape[1] else f"g{columns}"
        else:
            shared = "tensor" if self.block == self.shape else f"{rows}x{columns}"
        return f"{'fp' if self.is_float else 'int'}{self.bits} {shared} ({self.method})"


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """All that a folder has, by the names of weights.

    stored     tensors that can be decoded by themselves
    quantised  matrices of several tensors; their names end in ".weight", like any other's
    every      all tensors of the files that belong to the model, by their own names
    """

    stored: dict[str, StoredTensor]
    quantised: dict[str, QuantisedTensor]
    every: dict[str, StoredTensor]


def read_model_tensors(folder: Path, config: Mapping[str, Any]) -> ModelTensors:
    """Raises BadModel as `read_tensors` and `read_quantisation` do, and where a matrix's tensors don't fit together.

    config  the content of config.json
    """
    architecture = str((config.get("architectures") or ["?"])[0])
    every = text_tensors(architecture, read_tensors(folder))
    quantisation = read_quantisation(config)
    quantised = {} if quantisation is None else _Finder(folder, quantisation, every).found()
    taken = {id(tensor) for matrix in quantised.values() for tensor in matrix.tensors}
    stored: dict[str, StoredTensor] = {}
    for name, tensor in every.items():
        if id(tensor) in taken or (quantised and name.endswith(_UNUSED)):
            continue
        if tensor.type not in SUPPORTED:
            raise BadModel(
                "weights of this type are not supported",
                tensor=name,
                file=tensor.file,
                got=tensor.type,
                supported=", ".join(SUPPORTED),
            )
        stored[name] = tensor
    return ModelTensors(stored, quantised, every)


class _Finder:
    def __init__(self, folder: Path, quantisation: Quantisation, every: Mapping[str, StoredTensor]) -> None:
        self._folder = folder
        self._quantisation = quantisation
        self._every = every

    def found(self) -> dict[str, QuantisedTensor]:
        readers: dict[str, Callable[[str, str], QuantisedTensor | None]] = {
            "weight_packed": self._packed,
            "weight": self._rows,
            "qweight": self._awq if self._quantisation.method == "awq" else self._gptq,
        }
        matrices: dict[str, QuantisedTensor] = {}
        for name in self._every:
            module, _, last = name.rpartition(".")
            if last in readers and (matrix := readers[last](module, name)) is not None:
                matrices[f"{module}.weight"] = matrix
        return matrices

    def _packed(self, module: str, name: str) -> QuantisedTensor:
        if f"{module}.weight_global_scale" in self._every:
            raise BadModel("floats of 4 bits are not supported", tensor=name)
        codes = self._need(name, ("I32",), 2)
        shape = self._stored_shape(f"{module}.weight_shape")
        fits = [bits for bits in (4, 8) if (shape[0], -(-shape[1] * bits // 32)) == codes.shape]
        if not fits:
            raise BadModel("packed weights don't fit their shape", tensor=name, got=codes.shape, shape=shape)
        bits = fits[0]
        self._check_kind(name, is_float=False, bits=bits)
        block, scales = self._scales(f"{module}.weight_scale", shape)
        zeros = self._every.get(f"{module}.weight_zero_point")
        if zeros is not None:
            groups = -(-shape[0] // block[0]), -(-shape[1] // block[1])
            words = -(-groups[0] * bits // 32), groups[1]
            if (zeros.type, zeros.shape) not in (("I32", words), ("I8", groups)):
                raise self._bad(f"{module}.weight_zero_point", zeros, words)
        order = self._order(f"{module}.weight_g_idx", shape[1])
        return QuantisedTensor(
            layout="packed", method=self._quantisation.method, bits=bits, is_float=False, shape=shape,
            block=block, codes=codes, scales=scales, zeros=zeros, order=order,
        )  # fmt: skip

    def _rows(self, module: str, name: str) -> QuantisedTensor | None:
        codes = self._every[name]
        if codes.type not in ("I8", "F8_E4M3"):
            return None
        if len(codes.shape) != 2:
            raise BadModel("quantised weights must be matrices", tensor=name, got=codes.shape)
        shape = codes.shape[0], codes.shape[1]
        is_float = codes.type != "I8"
        if (False, 4) not in self._quantisation.kinds or is_float:  # 4 bits may lie in bytes of their own
            self._check_kind(name, is_float=is_float, bits=8)
        scale = f"{module}.weight_scale"
        block, scales = self._scales(scale if scale in self._every else f"{scale}_inv", shape)
        zeros = None if is_float else self._every.get(f"{module}.weight_zero_point")
        if zeros is not None and (zeros.type != "I8" or _size(zeros) != _size(scales)):
            raise self._bad(f"{module}.weight_zero_point", zeros, scales.shape)
        return QuantisedTensor(
            layout="rows", method=self._quantisation.method, bits=8, is_float=is_float, shape=shape,
            block=block, codes=codes, scales=scales, zeros=zeros,
            order=self._order(f"{module}.weight_g_idx", shape[1]),
        )  # fmt: skip

    def _gptq(self, module: str, name: str) -> QuantisedTensor:
        return self._columns(module, self._need(name, ("I32",), 2), "gptq")

    def _awq(self, module: str, name: str) -> QuantisedTensor:
        return self._columns(module, self._need(name, ("I32",), 2), "awq")

    def _columns(self, module: str, codes: StoredTensor, layout: str) -> QuantisedTensor:
        """Scales tell the number of outputs, zero points the bits."""
        scales = self._need(f"{module}.scales", _SCALES, 2)
        zeros = self._need(f"{module}.qzeros", ("I32",), 2)
        groups, outputs = scales.shape
        words = {bits: (groups, outputs * bits // 32) for bits in (4, 8) if outputs * bits % 32 == 0}
        bits = next((bits for bits, shape in words.items() if shape == zeros.shape), 0)
        if not bits:
            raise self._bad(f"{module}.qzeros", zeros, tuple(words.values()))
        self._check_kind(f"{module}.qweight", is_float=False, bits=bits)
        inputs = codes.shape[0] * 32 // bits if layout == "gptq" else codes.shape[0]
        want = outputs if layout == "gptq" else outputs * bits // 32
        if codes.shape[1] != want:
            raise self._bad(f"{module}.qweight", codes, (codes.shape[0], want))
        group = self._quantisation.group_size or inputs
        if -(-inputs // group) != groups and not self._quantisation.kinds:  # a rule of its own
            group = inputs // groups or 1
        if -(-inputs // group) != groups:
            raise BadModel(
                "groups don't fit a matrix", tensor=f"{module}.scales", inputs=inputs, groups=groups
            )
        return QuantisedTensor(
            layout=layout, method=layout, bits=bits, is_float=False, shape=(outputs, inputs),
            block=(1, group), codes=codes, scales=scales, zeros=zeros,
            order=self._order(f"{module}.g_idx", inputs) if layout == "gptq" else None,
            offset=self._quantisation.zero_point,
        )  # fmt: skip

    def _scales(self, name: str, shape: tuple[int, int]) -> tuple[tuple[int, int], StoredTensor]:
        """With the block that shares each."""
        scales = self._need(name, _SCALES, None)
        size = _size(scales)
        block = self._quantisation.block
        if block is not None and scales.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
            return block, scales
        if scales.shape in ((), (1,), (1, 1)):
            return shape, scales
        if scales.shape[0] == shape[0] and size % shape[0] == 0 and len(scales.shape) <= 2:
            groups, sizes = size // shape[0], self._quantisation.group_sizes
            is_said = groups == 1 or not sizes or (groups and shape[1] // groups in sizes)
            if is_said and shape[1] % groups == 0:
                return (1, shape[1] // groups), scales
        raise BadModel("scales don't fit a matrix", tensor=name, got=scales.shape, matrix=shape)

    def _order(self, name: str, width: int) -> StoredTensor | None:
        order = self._every.get(name)
        if order is None or order.shape in ((0,), ()):
            return None
        if order.type not in ("I32", "I64") or order.shape != (width,):
            raise self._bad(name, order, (width,))
        return order

    def _stored_shape(self, name: str) -> tuple[int, int]:
        tensor = self._need(name, ("I64", "I32"), 1)
        if tensor.shape != (2,):
            raise self._bad(name, tensor, (2,))
        with (self._folder / tensor.file).open("rb") as file:
            file.seek(tensor.offset)
            rows, columns = struct.unpack(
                "<2q" if tensor.type == "I64" else "<2i", file.read(tensor.num_bytes)
            )
        if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
            raise BadModel("this is no shape of a matrix", tensor=name, got=(rows, columns))
        return rows, columns

    def _check_kind(self, name: str, *, is_float: bool, bits: int) -> None:
        kinds = self._quantisation.kinds
        if kinds and (is_float, bits) not in kinds:
            raise BadModel(
                "weights are not stored as config.json says",
                tensor=name,
                got=f"{'fp' if is_float else 'int'}{bits}",
            )

    def _need(self, name: str, types: tuple[str, ...], rank: int | None) -> StoredTensor:
        tensor = self._every.get(name)
        if tensor is None:
            raise BadModel("the model lacks a tensor", tensor=name)
        if tensor.type not in types or (rank is not None and len(tensor.shape) != rank) or not _size(tensor):
            raise BadModel(
                "a tensor isn't what its name says",
                tensor=name,
                got=f"{tensor.type} {list(tensor.shape)}",
                want=" or ".join(types),
            )
        return tensor

    @staticmethod
    def _bad(name: str, tensor: StoredTensor, want: object) -> BadModel:
        return BadModel(
            "a quantised matrix's tensors don't fit together",
            tensor=name,
            got=f"{tensor.type} {list(tensor.shape)}",
            want=want,
        )


def _size(tensor: StoredTensor) -> int:
    size = 1
    for each in tensor.shape:
        size *= each
    return size
