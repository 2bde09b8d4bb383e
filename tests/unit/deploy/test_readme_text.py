"""What README and docs say that can be checked without running anything."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.readme import (
    ADDRESS,
    HTTP_ADDRESS,
    ROOT,
    Grpcurl,
    between,
    blocks,
    commands,
    markdown_table,
)


def test_the_configuration_table_is_that_of_the_code() -> None:
    page = "docs/configuration.md"
    assert (
        between(page, "<!-- configuration table", "<!-- end of the configuration table") == markdown_table()
    )


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1300


def test_every_command_is_of_a_kind_that_the_end_to_end_test_runs() -> None:
    programs = {shlex.split(line)[0] for line in commands()}
    assert programs == {"make", "pdserve", "grpcurl", "curl"}
    assert commands("make") == ["make demo", "make test"]


def test_every_address_in_a_command_is_one_that_the_test_replaces() -> None:
    text = "\n".join(commands() + blocks("python"))
    assert set(re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", text)) <= {ADDRESS, HTTP_ADDRESS}


def test_grpcurl_lines_can_be_read() -> None:
    calls = [Grpcurl.parse(line) for line in commands("grpcurl")]
    assert {call.address for call in calls} == {ADDRESS}
    assert any(call.what == "list" for call in calls)
    assert any(call.what.endswith("/Generate") and call.request for call in calls)


PAGES = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "proto/README.md",
    ROOT / "tests/README.md",
]


def anchors(page: Path) -> set[str]:
    """What its headings are called in links, by GitHub's rule."""
    outside = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_link_check_knows_headings() -> None:
    assert "structure" in anchors(ROOT / "docs/sampling.md")
    assert "a-requests-life" in anchors(ROOT / "docs/architecture.md")


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(page.name[:4]) for page in (ROOT / "docs/decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))
