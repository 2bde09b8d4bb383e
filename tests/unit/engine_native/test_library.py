"""Which compiled kernels are taken, and what is said where they can't be."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

from pdserve.engine.native import build, library
from pdserve.engine.numerics import LinearKind, choose_precision, describe
from pdserve.modelstore.errors import BadModel

needs_kernels = pytest.mark.skipif(not library.available(), reason="not built: python -m pip install -e .")


@needs_kernels
def test_auto_takes_the_best_variant_and_says_which() -> None:
    precision = choose_precision("bfloat16")
    assert precision.linear is LinearKind.NATIVE
    assert precision.kernels is not None
    assert precision.kernels.variant == library.supported()[-1]
    assert f"/native-{precision.kernels.variant}/" in describe(precision, 1)
    assert f"/native-{precision.kernels.variant}-bytes/" in describe(precision, 1, is_quantised=True)
    assert precision.compute is precision.kernels.activations


@needs_kernels
@pytest.mark.parametrize("variant", library.available())
def test_a_variant_can_be_asked_for(variant: str) -> None:
    precision = choose_precision("bfloat16", kernels="native", variant=variant)
    assert precision.kernels is not None
    assert precision.kernels.variant == variant
    assert precision.compute is (torch.bfloat16 if variant == "avx512-bf16" else torch.float32)


def test_torchs_kernels_can_be_asked_for() -> None:
    assert choose_precision("bfloat16", kernels="torch").kernels is None
    assert choose_precision("bfloat16", linear="plain").kernels is None
    assert choose_precision("float32").kernels is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float32"}, "compiled kernels multiply by bfloat16 weights only"),
        ({"dtype": "bfloat16", "linear": "plain"}, "compiled kernels have no such product"),
        ({"dtype": "bfloat16", "variant": "sse9"}, "variant=sse9, known=auto, neon, avx2"),
    ],
)
def test_what_they_cant_do_is_one_line(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(BadModel, match=message):
        choose_precision(**arguments, kernels="native")


def test_a_variant_of_another_cpu_is_refused() -> None:
    foreign = next(name for name in library.VARIANTS if name not in library.supported())
    with pytest.raises(BadModel, match=f"this CPU can't run these compiled kernels .variant={foreign}"):
        choose_precision("bfloat16", variant=foreign)


def test_without_them_auto_computes_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    assert library.why_none() == "are not installed"
    assert choose_precision("bfloat16").kernels is None
    with pytest.raises(BadModel, match="not installed"):
        choose_precision("bfloat16", kernels="native")


@needs_kernels
@pytest.mark.parametrize("broken", [b"no library", None], ids=["garbage", "cut short"])
def test_one_that_cant_be_loaded_is_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: bytes | None
) -> None:
    """Another one, that could be, isn't taken in its place."""
    *others, best = library.supported()
    for name in others:
        shutil.copy(library._file(name), tmp_path)
    content = library._file(best).read_bytes()[:400] if broken is None else broken
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    library._file(best).write_bytes(content)
    assert library.why_none().startswith("can't be loaded: ")
    assert choose_precision("bfloat16").kernels is None
    with pytest.raises(BadModel, match=r"these compiled kernels can't be loaded: .*kernels-"):
        choose_precision("bfloat16", kernels="native")


def test_without_a_compiler_there_are_none_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Older ones are gone, too: they may be of other sources."""
    (tmp_path / "kernels-avx2.so").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why = build.compile_into(tmp_path, "x86_64")
    assert why == "the package ziglang, which compiles them, is not installed"
    assert not list(tmp_path.iterdir())


def test_a_failing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_compiler(
        monkeypatch,
        tmp_path,
        "import sys; out = sys.argv[sys.argv.index('-o') + 1];"
        "'avx2' in out and not open(out, 'w').close() or sys.exit('x.c:1: error: no such thing\\nmore')",
    )
    into = tmp_path / "into"
    assert build.compile_into(into, "x86_64") == "x.c:1: error: no such thing"
    assert not list(into.iterdir())


def test_a_compiler_that_hangs_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They hold the writing end of a pipe: when it has ended, so have they."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    child = tmp_path / "child.py"
    child.write_text(f"import signal; open({str(path)!r}, 'wb', 0).write(b'x'); signal.pause()")
    put_compiler(
        monkeypatch,
        tmp_path,
        f"import subprocess, sys; subprocess.run([sys.executable, {str(child)!r}])",
    )
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as pipe:
        for limit_s in (0.3, 1, 4, 16):  # a child's start takes longer on a busy machine
            why = build.compile_into(tmp_path / "into", "x86_64", limit_s=limit_s)
            assert why == f"the compiler took more than {limit_s} s"
            if pipe.read(3):
                break
        else:
            pytest.fail("no child began")
        assert pipe.read(1) == b""  # None: somebody could still write


def put_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    package = folder / "ziglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(program)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@needs_kernels
def test_libraries_of_another_version_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sources have changed since they were compiled."""
    monkeypatch.setattr(library, "_ABI", 0)
    assert choose_precision("bfloat16").kernels is None
    with pytest.raises(BadModel, match="of another version: install the package again"):
        choose_precision("bfloat16", kernels="native")
