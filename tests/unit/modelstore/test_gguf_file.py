"""Our reader of GGUF heads finds what the `gguf` package finds, and says in one line what is wrong with a file."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine import dequant
from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_file import read_gguf
from pdserve.modelstore.gguf_import import import_gguf
from pdserve.modelstore.gguf_types import SUPPORTED, TYPE_NAMES
from tests.unit.modelstore.building import write_gguf


def pack_string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def head(
    *, magic: bytes = b"GGUF", version: int = 3, values: bytes = b"", num_values: int = 0, tensors: bytes = b"",
    num_tensors: int = 0, order: str = "<",
) -> bytes:  # fmt: skip
    return magic + struct.pack(f"{order}IQQ", version, num_tensors, num_values) + values + tensors


def tensor(name: str = "t", kind: int = 0, offset: int = 0, shape: tuple[int, ...] = (4,)) -> bytes:
    return (
        pack_string(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(Incompatible) as refused:
        read_gguf(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_values_of_every_kind_are_those_that_the_package_reads(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_float32("f32", 0.1)
    writer.add_uint64("u64", 1 << 60)
    writer.add_int64("i64", -(1 << 60))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grün 世界")
    writer.add_array("texts", ["a", "", "ß"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])
    for name, shape in (("a.weight", (3, 64)), ("b.weight", (2, 5, 32)), ("c", (7,))):
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        values = np.ones(shape, dtype=np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    wanted = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == wanted
    assert ours.architecture() == "llama"
    found = [(t.name, t.type, list(t.shape), t.offset, t.num_bytes) for t in ours.tensors.values()]
    assert found == [
        (t.name, t.tensor_type.name, t.shape.tolist()[::-1], t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    assert ours.floats("c") == [1.0] * 7
    assert ours.floats("d") is None


def test_types_are_ggmls_and_those_that_the_engine_decodes() -> None:
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: known[number] for number in TYPE_NAMES} == TYPE_NAMES
    for name, unit in SUPPORTED.items():
        raw = torch.zeros(unit.num_bytes, dtype=torch.uint8)
        assert len(dequant.decode(raw, name)) == unit.num_values


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file"),
        (head(magic=b"GGML"), "not a GGUF file"),
        (head(order=">"), "wrong byte order"),
        (head(version=1), r"version is not supported \(got=1"),
        (head(version=9), r"version is not supported \(got=9"),
        (head(num_values=1), "not a whole GGUF file"),
        (head(num_values=1 << 60), "not a whole GGUF file"),
        (head(num_tensors=1), "not a whole GGUF file"),
        (head(num_values=1, values=struct.pack("<Q", 1 << 62)), "not a whole GGUF file"),
        (head(num_values=1, values=pack_string("k") + struct.pack("<I", 99)), "unknown type"),
        (
            head(num_values=1, values=pack_string("k") + struct.pack("<IIQ", 9, 4, 1 << 61)),
            "not a whole GGUF file",
        ),
        (
            head(num_values=1, values=pack_string("k") + struct.pack("<IIQ", 9, 8, 1 << 61)),
            "not a whole GGUF file",
        ),
        (
            head(num_values=1, values=pack_string("general.alignment") + struct.pack("<II", 4, 0)),
            "alignment",
        ),
        (head(num_tensors=1, tensors=tensor(kind=77)), "unsupported quantization.*tensor=t, got=type 77"),
        (head(num_tensors=1, tensors=tensor(kind=10)), "unsupported quantization.*tensor=t, got=Q2_K"),
        (head(num_tensors=1, tensors=tensor(kind=8, shape=(33,))), "whole blocks.*tensor=t"),
        (head(num_tensors=1, tensors=tensor(shape=())), "whole blocks"),
        (head(num_tensors=1, tensors=tensor(shape=(1, 1, 1, 1, 1))), "too many dimensions"),
        (head(num_tensors=1, tensors=tensor()), "truncated.*tensor=t"),
        (head(num_tensors=1, tensors=tensor(offset=1 << 63)), "truncated"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    assert re.search(said, refusal(tmp_path / "m.gguf", content.ljust(24, b"\0") if content else content))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_changed_bytes_give_a_model_folder_or_one_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    if not folder.exists():
        folder.mkdir()
        write_gguf(folder / "whole.gguf")
    content = bytearray((folder / "whole.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 9000))] = data.draw(st.integers(0, 255))
    (folder / "changed.gguf").write_bytes(content)
    shutil.rmtree(folder / "imported", ignore_errors=True)
    said = ""
    try:
        import_gguf(folder / "changed.gguf", folder / "imported")
    except Incompatible as refused:
        said = str(refused)
    assert "\n" not in said
