"""The compiled kernels of this CPU: which variants there are, which one is taken, how it is called.

A variant is one shared library of C functions (kernels/), for one instruction set. Its functions take addresses; they
let the interpreter go while they run, and share the work among the threads of torch's own OpenMP runtime, as many as
torch is set to.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pdserve.engine.native.weight_memory import WeightMemory
from pdserve.modelstore.errors import BadModel

_FOLDER = Path(__file__).parent
_ABI = 8  # threads.c has the same number
#: best last
VARIANTS = ("neon", "avx2", "avx512", "avx512-bf16")
_PROBES = {
    "avx2": ("_is_avx2_supported",),
    "avx512": ("_is_avx512_supported",),
    "avx512-bf16": ("_is_avx512_supported", "_is_vnni_supported", "_is_avx512_bf16_supported"),
}

_address, _count, _flag, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_wide = ctypes.c_double
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pd_linear": (*(_address,) * 4, *(_count,) * 3, _flag),
    "pd_packed_linear": (*(_address,) * 5, *(_count,) * 4, _flag),
    "pd_norm": (*(_address,) * 4, _count, _count, _number, _flag),
    "pd_gate": (_address, _address, _count, _count, _flag, _flag),
    "pd_attend": (*(_address,) * 2, _count, *(_address,) * 3, _number, _address, _flag),
    "pd_run": (_address, _count, _address, _count, *(_address,) * 3, _flag),
    "pd_best": (_address, _count, _count, _address, _address, _flag),
    "pd_shortlist": (_address, _count, *(_wide,) * 3, _count, *(_address,) * 4),
}


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """One variant, loaded. Any thread may call its functions.

    activations  dtype that all kernels take and give unless they say otherwise
    functions    by name; arguments as in _SIGNATURES
    weights      where packed ones lie: of one model, see `for_model`
    """

    variant: str
    activations: torch.dtype
    functions: ctypes.CDLL
    weights: WeightMemory = field(default_factory=WeightMemory)

    def for_model(self) -> Kernels:
        """The same, with memory of its own for a model's weights."""
        return replace(self, weights=WeightMemory())


def supported() -> list[str]:
    """Variants that this CPU can run, the best last, installed or not."""
    if platform.machine() == "aarch64":
        return ["neon"]
    if platform.machine() != "x86_64":
        return []
    return [name for name, probes in _PROBES.items() if all(_has(probe) for probe in probes)]


def available() -> list[str]:
    """Those of them that are installed and of this version."""
    return [name for name in supported() if not _why_not(name)]


def why_none() -> str:
    """Why "auto" finds none, in a few words; "" if it does. Asks about the best variant only: a CPU must not silently
    take a lesser one than its equals elsewhere."""
    names = supported()
    return _why_not(names[-1]) if names else "are not made for this CPU"


def load(variant: str = "auto") -> Kernels:
    """The best variant, or the one named. Raises BadModel, saying why, if it can't be used here."""
    if variant not in ("auto", *VARIANTS):
        raise BadModel(
            "this variant of the kernels is unknown", variant=variant, known=", ".join(("auto", *VARIANTS))
        )
    names = supported()
    if not names or variant not in ("auto", *names):
        raise BadModel("this CPU can't run these compiled kernels", variant=variant, cpu=platform.machine())
    name = names[-1] if variant == "auto" else variant
    why = _why_not(name)
    if why:
        raise BadModel(f"these compiled kernels {why}", variant=name)
    return _loaded(name)


def _why_not(name: str) -> str:
    if not _file(name).exists():
        return "are not installed"
    try:
        found = _opened(_file(name)).pd_abi()
    except (OSError, AttributeError) as error:
        return f"can't be loaded: {error}"
    if found != _ABI:
        return "are of another version: install the package again"
    return ""


@functools.cache
def _opened(file: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(file))


@functools.cache
def _loaded(name: str) -> Kernels:
    functions = _opened(_file(name))
    for function, arguments in _SIGNATURES.items():
        getattr(functions, function).argtypes = arguments
        getattr(functions, function).restype = None
    functions.pd_use_threads.argtypes = (_address,)
    functions.pd_use_threads(_torch_threads())
    is_half = functions.pd_activation_bytes() == 2
    return Kernels(name, torch.bfloat16 if is_half else torch.float32, functions)


def _torch_threads() -> int | None:
    """Where the OpenMP runtime that torch has loaded starts a parallel region; None: nowhere, one thread works then."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except AttributeError:
        return None


def _has(probe: str) -> bool:
    return hasattr(torch.cpu, probe) and bool(getattr(torch.cpu, probe)())


def _file(variant: str) -> Path:
    return _FOLDER / f"kernels-{variant}.so"
