"""The worked examples of docs/sizing.md are what its formulas give."""

from __future__ import annotations

import contextlib
import io
import re

from tests.support.readme import ROOT

PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    [found] = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def printed(code: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "docs/sizing.md", "exec"), {})
    return output.getvalue()


def test_the_example_is_what_the_formulas_give() -> None:
    assert printed(block("python")) == block("text")


def test_so_are_the_figures_for_ten_times_the_load() -> None:
    words = printed(block("python").replace("requests_per_s = 1.0", "requests_per_s = 10.0"))
    prefill, decode, links = re.findall(
        r"^(?:prefill workers|decode workers|links) +(\d+)", words, flags=re.MULTILINE
    )
    [rate] = re.findall(r"([\d.]+) MB/s", words)
    counts = f"{prefill} prefill and {decode} decode workers, {links} links"
    assert f"Ten times the load gives {counts}, {float(rate):.0f} MB/s." in PAGE
    assert f"{prefill} : {decode} for ten times the example's" in PAGE
