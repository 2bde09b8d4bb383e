"""What the README says that can be checked without running anything."""

from __future__ import annotations

import re
import shlex

from pdserve.service.config import markdown_table
from tests.support.readme import ADDRESS, ROOT, Grpcurl, between, blocks, commands


def test_the_configuration_table_is_that_of_the_code() -> None:
    assert between("<!-- configuration table", "<!-- end of the configuration table") == markdown_table()


def test_every_command_is_of_a_kind_that_the_end_to_end_test_runs() -> None:
    programs = {shlex.split(line)[0] for line in commands()}
    assert programs == {"make", "pdserve", "grpcurl"}
    assert commands("make") == ["make demo", "make test"]


def test_every_address_in_a_command_is_the_one_that_the_test_replaces() -> None:
    text = "\n".join(commands() + blocks("python"))
    assert set(re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", text)) == {ADDRESS}


def test_grpcurl_lines_can_be_read() -> None:
    calls = [Grpcurl.parse(line) for line in commands("grpcurl")]
    assert {call.address for call in calls} == {ADDRESS}
    assert any(call.what == "list" for call in calls)
    assert any(call.what.endswith("/Generate") and call.request for call in calls)


def test_links_to_files_of_the_repository_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "tests" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
