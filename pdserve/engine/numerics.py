"""Which arithmetic this machine does well, and its name, so that workers can tell whether their bits will be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from pdserve import __version__
from pdserve.engine.model_config import BadModel

_PADDINGS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
# A padding is tried with its first multiples, and with those that follow these row counts (kernels change there).
_PROBE_MULTIPLES = 12
_PROBE_ROWS = (31, 32, 33, 63, 64, 65, 96, 127, 128, 200, 256, 500, 512)
_REFERENCE_ROWS = (576, 96)  # multiples of every padding; the small one where the large one would take long
_PROBE_FLOP = 4e9


class LinearKind(Enum):
    """How a weight matrix is stored and multiplied."""

    FBGEMM_HALF = "fbgemm-half"  # 16-bit weights widened in registers, float32 activations and sums
    ONEDNN = "onednn"  # packed once in the dtype of the activations
    PLAIN = "plain"  # torch.nn.functional.linear


@dataclass(frozen=True, slots=True)
class Precision:
    """The arithmetic of one runner.

    name     "bfloat16" or "float32": what the user chose, and the dtype of the KV pool
    compute  dtype of activations and attention
    linear   kind of all weight matrices
    undivided  elementwise functions are not divided among threads (deterministic mode; layers.undivided says why)
    """

    name: str
    compute: torch.dtype
    kv: torch.dtype
    linear: LinearKind
    undivided: bool = False


def choose_precision(dtype: str) -> Precision:
    """The best arithmetic of this CPU for "auto", "bfloat16" or "float32".

    By capability, never by a timing: two workers on equal machines must choose alike. A CPU without bfloat16
    instructions serves bfloat16 models with FBGEMM's half-precision weights: bfloat16 values fit into float16 but for
    the tiniest (|w| < 6e-5 lose bits, at most 3e-8 each), memory traffic is that of 16 bits, and activations stay
    float32, so it is more exact than bfloat16 arithmetic, not less.
    Raises BadModel for other names.
    """
    if dtype not in ("auto", "bfloat16", "float32"):
        raise BadModel("this dtype is not supported", dtype=dtype, supported="auto, bfloat16, float32")
    native = has_native_bfloat16()
    if dtype == "float32" or (dtype == "auto" and not native):
        kind = LinearKind.ONEDNN if _works(_try_onednn, torch.float32) else LinearKind.PLAIN
        return Precision("float32", torch.float32, torch.float32, kind)
    if native:
        kind = LinearKind.ONEDNN if _works(_try_onednn, torch.bfloat16) else LinearKind.PLAIN
        return Precision("bfloat16", torch.bfloat16, torch.bfloat16, kind)
    if _works(_try_fbgemm, torch.float32):
        return Precision("bfloat16", torch.float32, torch.bfloat16, LinearKind.FBGEMM_HALF)
    return Precision("bfloat16", torch.bfloat16, torch.bfloat16, LinearKind.PLAIN)


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in probes if hasattr(torch.cpu, name))


RowFunction = Callable[[Tensor], Tensor]
"""[rows, width] → [rows, …], each row from its own row alone."""


def safe_row_padding(functions: Mapping[str, tuple[RowFunction, int]], dtype: torch.dtype) -> int:
    """The smallest P such that with rows padded to a multiple of P each row's bits don't depend on the others' number.

    functions  by name: all that the model applies row by row, with the width of their input; one of each shape
    Raises BadModel if none of the tried paddings holds: then this machine can't be deterministic.
    """
    generator = torch.Generator().manual_seed(20)
    trials: list[_Trial] = []
    for function, width in functions.values():
        x = torch.randn(_REFERENCE_ROWS[0], width, generator=generator).to(dtype)
        is_large = 2.0 * len(x) * width * function(x[:1]).shape[-1] > _PROBE_FLOP
        trials.append(_Trial(function, x, function(x[: _REFERENCE_ROWS[1]] if is_large else x)))
    for padding in _PADDINGS:  # mostly the first one holds; trying all of them takes seconds
        if all(trial.holds(padding) for trial in trials):
            return padding
    raise BadModel("this machine's kernels can't be made deterministic", tried=str(_PADDINGS))


@dataclass(frozen=True, slots=True)
class _Trial:
    """A function, rows to try it with, and what all of them, or the first of them, gave together."""

    function: RowFunction
    x: Tensor
    reference: Tensor

    def holds(self, padding: int) -> bool:
        """Whether row counts that are multiples of `padding` give the bits of the reference."""
        counts = [padding * factor for factor in range(1, _PROBE_MULTIPLES + 1)]
        counts += [-(-rows // padding) * padding for rows in _PROBE_ROWS]
        num_rows = len(self.reference)
        for count in sorted(set(counts)):
            first = (num_rows - count) // 2  # another place in the batch, besides another number
            if first > 0 and not self._is_equal(first, count):
                return False
        return num_rows == len(self.x) or self._is_equal(0, max(counts))

    def _is_equal(self, first: int, count: int) -> bool:
        want = self.reference[first : first + count]
        return torch.equal(self.function(self.x[first : first + count])[: len(want)], want)


def describe(precision: Precision, num_threads: int) -> str:
    """What the bits of results depend on, as far as it can be named; beginning of the numerics fingerprint."""
    return "/".join(
        (
            precision.name,
            str(precision.compute).removeprefix("torch."),
            precision.linear.value,
            f"threads{num_threads}",
            torch.backends.cpu.get_cpu_capability().lower().replace(" ", ""),
            "bf16" if has_native_bfloat16() else "nobf16",
            f"torch{torch.__version__}",
            f"pdserve{__version__}",
        )
    )


def _works(trial: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> bool:
    """Whether a kernel exists here and gives the right product of a small matrix."""
    try:
        got = trial(dtype)
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
