"""Whatever bytes come, a decoder reads them or refuses them with an error of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.decoders import DECODERS, ends_well

CORPUS = Path(__file__).parents[2] / "fuzz/corpus"
KEPT = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
JSON = ("config_json", "tokenizer_config", "tokenizer_json")
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "<s>", "x" * 300, "default", "yarn", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("name", DECODERS)
def test_a_seed_is_read(name: str) -> None:
    """Or mutations of it would never get far."""
    assert any(ends_well(DECODERS[name], seed) == "read" for seed in DECODERS[name].seeds())


@pytest.mark.parametrize("path", KEPT, ids=[f"{path.parent.name}-{path.name[:20]}" for path in KEPT])
def test_what_the_fuzzer_once_found(path: Path) -> None:
    ends_well(DECODERS[path.parent.name], path.read_bytes())


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_bytes_changed_anywhere(name: str, data: st.DataObject) -> None:
    seed = bytearray(data.draw(st.sampled_from(DECODERS[name].seeds())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(seed)))
        removed = data.draw(st.integers(0, 3))
        seed[at : at + removed] = data.draw(st.binary(max_size=3))
    ends_well(DECODERS[name], bytes(seed))


@pytest.mark.parametrize("name", JSON)
@given(data=st.data())
def test_values_of_other_kinds_anywhere_in_json(name: str, data: st.DataObject) -> None:
    """Bytes that are changed rarely stay JSON; odd files do."""
    content = json.loads(data.draw(st.sampled_from(DECODERS[name].seeds())))
    for _ in range(data.draw(st.integers(1, 2))):
        content = _changed(content, data)
    ends_well(DECODERS[name], json.dumps(content).encode("utf-8", "surrogatepass"))


def _changed(content: Any, data: st.DataObject) -> Any:
    """The same with another value at one place, or without it."""
    if isinstance(content, dict) and content and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(content)))
        if not data.draw(st.integers(0, 9)):
            return {name: value for name, value in content.items() if name != key}
        return {**content, key: _changed(content[key], data)}
    if isinstance(content, list) and content and data.draw(st.integers(0, 5)):
        at = data.draw(st.integers(0, len(content) - 1))
        return [*content[:at], _changed(content[at], data), *content[at + 1 :]]
    return data.draw(ODD)
