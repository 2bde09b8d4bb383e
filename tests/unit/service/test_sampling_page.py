"""The tables of docs/sampling.md say what the code does: every field of a request, its default and its limits."""

from __future__ import annotations

from pdserve.fields import Field, fields_of
from pdserve.request import GenerateRequest
from pdserve.sampling import SamplingParams
from tests.support.readme import ROOT

OF_REQUESTS = ("seed", "n", "best_of", "echo", "truncate_prompt_tokens")


def described() -> list[Field]:
    return [
        *fields_of(SamplingParams),
        *(each for each in fields_of(GenerateRequest) if each.name in OF_REQUESTS),
    ]


def written() -> dict[str, tuple[str, str]]:
    """Field → default and limits, of all tables that have these columns."""
    found: dict[str, tuple[str, str]] = {}
    inside = False
    for line in (ROOT / "docs/sampling.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:3] == ["field", "default", "limits"]:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and cells[0].startswith("`"):
            found[cells[0].strip("`")] = (cells[1], cells[2])
    return found


def test_every_field_has_its_row_with_its_default_and_limits() -> None:
    wanted = {each.name: (each.default_text, each.limit_text) for each in described()}
    assert written() == wanted
