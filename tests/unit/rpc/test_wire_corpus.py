"""Messages and frames as they were first written are read, and written again, the same."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, get_args

import pytest

from kv_transfer.frames import FRAME_CLASSES
from pdserve import messages as m
from pdserve import response
from pdserve.sampling import FinishReason
from tests.support.wire_corpus import WIRES, lines, said

RETIRED = {"promised"}
"""Fields that are no longer sent; whoever still gets one skips it."""

RETIRED_WIRES = {"cache", "opening"}
"""What a worker before 1.2 says on its stream of cache events, which nobody reads any more."""

KINDS = sorted({(line.wire, line.kind) for line in lines() if line.wire not in RETIRED_WIRES})


@pytest.mark.parametrize(("wire", "kind"), KINDS, ids=lambda name: name)
def test_frozen_bytes_are_read_and_written_the_same(wire: str, kind: str) -> None:
    for line in lines():
        if (line.wire, line.kind) == (wire, kind):
            message = WIRES[wire].read(line.octets)
            assert type(message).__name__ == kind
            says = _without_retired(line.says)
            assert said(message, says) == says
            written = WIRES[wire].write(message)
            if says == line.says:
                assert written == line.octets
            else:
                assert WIRES[wire].read(written) == message


def _without_retired(says: Any) -> Any:
    """What a version that has retired some fields reads of it."""
    if isinstance(says, dict):
        return {name: _without_retired(value) for name, value in says.items() if name not in RETIRED}
    return [_without_retired(each) for each in says] if isinstance(says, list) else says


def test_the_corpus_holds_every_kind() -> None:
    assert len(lines()) >= 500
    held = defaultdict(set)
    for line in lines():
        held[line.wire].add(line.kind)
    for wire, union in (("up", m.Up), ("down", m.Down), ("answer", response.Event)):
        assert held[wire] == {kind.__name__ for kind in get_args(union)}
    later = {"Memory", "Mapped", "Join", "Joined"}
    assert held["link"] | later == {kind.__name__ for kind in FRAME_CLASSES.values()}


def test_the_corpus_holds_every_value_that_is_a_case_of_its_own() -> None:
    """Each field has several values; what may be absent is so at times; each enum member stands somewhere."""
    values: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for line in lines():
        if isinstance(line.says, dict):
            for name, value in line.says.items():
                values[line.wire, line.kind, name].append(value)
    single = {name for name, seen in values.items() if all(value == seen[0] for value in seen)}
    assert not single
    reasons = values["up", "FirstToken", "reason"]
    assert set(reasons) == {None, *(reason.value for reason in FinishReason)}
    assert set(values["up", "Hello", "role"]) == {role.value for role in m.Role}
    assert set(values["up", "Progress", "phase"]) == {phase.value for phase in m.Phase}
    assert None in values["down", "StartDecode", "source"]
    assert None in values["link", "Commit", "logprobs"]
