"""A model's format, by what its template holds."""

from __future__ import annotations

import pytest

from http_door.reasoning.think import REASONING
from http_door.tools.detect import reasoning_format_of, tool_format_of
from http_door.tools.formats import FORMATS
from tests.unit.http_door.templates import TEMPLATES, THINKING, WITHOUT


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_template_of_each_family(name: str) -> None:
    assert tool_format_of(TEMPLATES[name]) == name
    assert reasoning_format_of(TEMPLATES[name]) == ""


@pytest.mark.parametrize("name", sorted(REASONING))
def test_a_template_that_thinks(name: str) -> None:
    assert reasoning_format_of(THINKING[name]) == name
    assert tool_format_of(THINKING[name]) == ""


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_calls_in_a_form_that_is_not_known(name: str) -> None:
    assert tool_format_of(WITHOUT[name]) == reasoning_format_of(WITHOUT[name]) == ""
