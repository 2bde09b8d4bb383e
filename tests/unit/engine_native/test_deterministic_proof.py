"""Deterministic mode proves compiled kernels, as it proves torch's, before it announces anything."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.native.library import Kernels
from pdserve.engine.numerics import LinearKind, Precision
from pdserve.engine.torch_runner import TorchRunner
from pdserve.modelstore.errors import BadModel
from tests.support.native_kernels import ALL, EACH_VARIANT
from tests.support.random_families import save_random

FIRST = next((kernels for kernels in ALL.values() if kernels is not None), None)


class Spoiled:
    """The same functions, but one of them changes what it gives."""

    def __init__(self, functions: ctypes.CDLL, name: str, spoil: Callable[[tuple[Any, ...]], None]) -> None:
        self._functions = functions
        self._name = name
        self._spoil = spoil

    def __getattr__(self, name: str) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self._functions, name)
        if name != self._name:
            return function

        def spoiled(*arguments: Any) -> None:
            function(*arguments)
            self._spoil(arguments)

        return spoiled


def runner(folder: Path, kernels: Kernels) -> TorchRunner:
    precision = Precision("bfloat16", kernels.activations, torch.bfloat16, LinearKind.NATIVE, kernels=kernels)
    return TorchRunner(
        folder,
        dtype="bfloat16",
        deterministic=True,
        num_threads=1,
        num_blocks=64,
        kv_memory_bytes=0,
        block_size=16,
        precision=precision,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16)


@pytest.mark.parametrize("kernels", EACH_VARIANT)
def test_a_worker_starts_with_the_proof_of_its_kernels(folder: Path, kernels: Kernels) -> None:
    assert "/rows4096/" in runner(folder, kernels).card.numerics


@pytest.mark.skipif(FIRST is None, reason="no compiled kernels")
@pytest.mark.parametrize(
    ("function", "rows_argument", "result_argument"),
    [("pd_linear", 4, 3), ("pd_norm", 4, 3), ("pd_gate", 2, 1)],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_kernel_that_computes_one_place_otherwise_is_refused(
    folder: Path, function: str, rows_argument: int, result_argument: int, place: int
) -> None:
    """In calls of as many rows as end there: one row alone, the last of three."""
    assert FIRST is not None

    def spoil(arguments: tuple[Any, ...]) -> None:
        if arguments[rows_argument] == place + 1:
            width = arguments[rows_argument + 1]
            at = arguments[result_argument] + place * width * FIRST.activations.itemsize
            ctypes.c_uint16.from_address(at).value ^= 1

    spoiled = replace(FIRST, functions=Spoiled(FIRST.functions, function, spoil))  # type: ignore[arg-type]
    with pytest.raises(BadModel, match=r"deterministic.*function=.*(product|norm|silu)"):
        runner(folder, spoiled)
