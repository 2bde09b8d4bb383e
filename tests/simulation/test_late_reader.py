"""Without CONFIRM a late reader runs on foreign KV; with it never."""

from __future__ import annotations

import json
from pathlib import Path

from tests.simulation import late_reader, mutation


def test_a_late_reader_is_never_confirmed_and_its_request_gets_the_right_text() -> None:
    played = late_reader.play()
    assert played["read_late"], "blocks were left to be read when the prefill worker had let go of them"
    assert played["got"] == played["want"]


def test_without_confirm_the_late_reader_shows_foreign_text(tmp_path: Path) -> None:
    mutation.mutate("confirm_not_awaited", tmp_path)
    output = mutation.run_in(tmp_path, "tests.simulation.late_reader", []).output
    played = json.loads(output.splitlines()[-1])
    assert played["read_late"]
    assert len(played["got"]) == len(played["want"])
    assert played["got"] != played["want"], "foreign KV must show"
    assert played["got"][0] == played["want"][0], "the first token is the prefill worker's own"
