"""Which arithmetic this machine does well, and its name, so that workers can tell whether their bits will be equal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from pdserve import __version__
from pdserve.engine.kernel_caches import rounded_rows
from pdserve.engine.native import library
from pdserve.engine.native.library import Kernels
from pdserve.engine.row_tiles import MakeInputs, RowFunction, RowSubject, RowTiles, alone, undivided
from pdserve.modelstore.errors import BadModel


class LinearKind(Enum):
    """How a weight matrix is stored and multiplied."""

    FBGEMM_HALF = "fbgemm-half"  # 16-bit weights widened in registers, float32 activations and sums
    ONEDNN = "onednn"  # packed once in the dtype of the activations
    PLAIN = "plain"  # torch.nn.functional.linear
    NATIVE = "native"  # compiled kernels; the only kind that can't be asked for apart from the rest of them


@dataclass(frozen=True, slots=True)
class Precision:
    """The arithmetic of one runner.

    name     "bfloat16" or "float32": what the user chose, and the dtype of the KV pool
    compute  dtype of activations and attention
    linear   kind of all weight matrices
    device   all weights and activations lie there as plain tensors; None: on the CPU, the way that suits it best
    tiles    deterministic mode: how rows are cut that torch's kernels compute
    kernels  compiled ones, whose rows never depend on each other; None: torch's compute everything
    """

    name: str
    compute: torch.dtype
    kv: torch.dtype
    linear: LinearKind
    device: torch.device | None = None
    tiles: RowTiles | None = None
    kernels: Kernels | None = None

    @property
    def product_tiles(self) -> RowTiles | None:
        """How the rows of products are cut."""
        return None if self.linear is LinearKind.NATIVE else self.tiles

    def padded(self, num_rows: int) -> int:
        """So many rows and those to spare with which no product has to make its input longer."""
        if self.product_tiles is not None:
            return sum(self.product_tiles.cut(num_rows))
        return rounded_rows(num_rows) if self.linear is LinearKind.ONEDNN else num_rows

    def rowwise(
        self, name: str, function: RowFunction, width: int, inputs: MakeInputs = alone
    ) -> RowFunction:
        """A function of rows other than a product, as this precision applies it; what follows as in `RowSubject`.

        To be used for all that is neither exact nor one rounding a number.
        """
        if self.tiles is None:
            return function
        return self.tiles.each(RowSubject(name, undivided(function), width, inputs))

    def uncut(self, name: str, function: RowFunction, width: int) -> None:
        """Have a compiled function of rows proven in deterministic mode; what follows as in `RowSubject`."""
        if self.tiles is not None:
            self.tiles.leave_uncut(RowSubject(name, function, width))


def choose_precision(
    dtype: str, linear: str = "auto", kernels: str = "auto", variant: str = "auto"
) -> Precision:
    """The best arithmetic of this CPU for "auto", "bfloat16" or "float32".

    dtype    "auto": bfloat16 where compiled kernels or the CPU's own instructions multiply it, else float32
    linear   "auto", or a `LinearKind` of torch's instead
    kernels  "auto": compiled ones where they are installed and this CPU and dtype have them, "native": those or none,
             "torch"
    variant  of the compiled kernels: "auto", or one of `library.VARIANTS`

    By capability, never by a timing: two workers on equal machines must choose alike. Compiled kernels multiply by
    bfloat16 weights in bfloat16 where the CPU has instructions for that, else in float32. Without them, a CPU that
    lacks these instructions serves bfloat16 models with FBGEMM's half-precision weights: bfloat16 values fit into
    float16 but for the tiniest (|w| < 6e-5 lose bits, at most 3e-8 each), memory traffic is that of 16 bits, and
    activations stay float32, so it is more exact than bfloat16 arithmetic, not less.
    Raises BadModel for other names, and for kernels that this CPU or this dtype doesn't have.
    """
    _check("this dtype is not supported", "dtype", dtype, ("auto", "bfloat16", "float32"))
    torch_kinds = tuple(kind.value for kind in LinearKind if kind is not LinearKind.NATIVE)
    if linear != "auto":
        _check("this kind of product is not supported", "linear", linear, torch_kinds)
    _check("these kernels are not supported", "kernels", kernels, ("auto", "native", "torch"))
    native = _native("bfloat16" if dtype == "auto" else dtype, linear, kernels, variant)
    if native is not None:
        return native
    half, has_bfloat16 = LinearKind.FBGEMM_HALF.value, has_native_bfloat16()
    if dtype == "auto":
        dtype = "bfloat16" if has_bfloat16 or linear == half else "float32"
    if linear != "auto":
        wanted = [linear]
    else:
        wanted = [
            LinearKind.ONEDNN.value if has_bfloat16 or dtype == "float32" else half,
            LinearKind.PLAIN.value,
        ]
    for name in wanted:
        kind = LinearKind(name)
        precision = _precision(dtype, kind)
        if precision is not None and _works(kind, precision.compute):
            return precision
    raise BadModel("this CPU has no such product for this dtype", linear=linear, dtype=dtype)


def _check(message: str, key: str, value: str, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise BadModel(message, **{key: value, "supported": ", ".join(supported)})


def _native(dtype: str, linear: str, kernels: str, variant: str) -> Precision | None:
    """By compiled kernels; None where they aren't wanted, or "auto" finds none. Raises as `choose_precision`."""
    if kernels == "torch" or (kernels == "auto" and (linear != "auto" or dtype != "bfloat16")):
        return None
    if linear != "auto":
        raise BadModel("compiled kernels have no such product", linear=linear, kernels=kernels)
    if dtype != "bfloat16":
        raise BadModel("compiled kernels multiply by bfloat16 weights only", dtype=dtype, kernels=kernels)
    if kernels == "auto" and variant == "auto" and library.why_none():
        return None
    found = library.load(variant)
    return Precision(dtype, found.activations, torch.bfloat16, LinearKind.NATIVE, kernels=found)


def _precision(dtype: str, kind: LinearKind) -> Precision | None:
    if dtype == "float32":
        is_half = kind is LinearKind.FBGEMM_HALF
        return None if is_half else Precision(dtype, torch.float32, torch.float32, kind)
    compute = torch.float32 if kind is LinearKind.FBGEMM_HALF else torch.bfloat16
    return Precision(dtype, compute, torch.bfloat16, kind)


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in probes if hasattr(torch.cpu, name))


def describe(precision: Precision, num_threads: int, *, is_quantised: bool = False) -> str:
    """What the bits of results depend on, as far as it can be named; beginning of the numerics fingerprint.

    is_quantised  the model has weights that compiled kernels multiply by bytes, as they are stored
    """
    products = precision.linear.value
    if precision.kernels is not None:
        products = f"native-{precision.kernels.variant}{'-bytes' if is_quantised else ''}"
    return "/".join(
        (
            precision.name,
            str(precision.compute).removeprefix("torch."),
            products,
            f"threads{num_threads}",
            torch.backends.cpu.get_cpu_capability().lower().replace(" ", ""),
            "bf16" if has_native_bfloat16() else "nobf16",
            f"torch{torch.__version__}",
            f"pdserve{__version__}",
        )
    )


def _works(kind: LinearKind, dtype: torch.dtype) -> bool:
    """Whether the kernel exists here and gives the right product of a small matrix."""
    if kind is LinearKind.PLAIN:
        return True
    try:
        got = _try_onednn(dtype) if kind is LinearKind.ONEDNN else _try_fbgemm(dtype)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    want = _trial_input(torch.float32) @ _trial_weight(torch.float32).t()
    return bool(torch.allclose(got.float(), want, atol=0.05, rtol=0.05))


def _trial_input(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, 2 * 32).view(2, 32).to(dtype)


def _trial_weight(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-0.5, 0.5, 48 * 32).view(48, 32).to(dtype)


def _try_onednn(dtype: torch.dtype) -> Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(_trial_weight(dtype), 16)
    return torch.ops.mkldnn._linear_pointwise(_trial_input(dtype), packed, None, "none", [], "")  # type: ignore[no-any-return]


def _try_fbgemm(dtype: torch.dtype) -> Tensor:
    packed = torch.ops.quantized.linear_prepack_fp16(_trial_weight(dtype), None)
    return torch.ops.quantized.linear_dynamic_fp16(_trial_input(dtype), packed)  # type: ignore[no-any-return]
