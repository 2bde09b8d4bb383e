"""Whether the HTTP door can be opened here."""

from __future__ import annotations

import sys

import pytest

from pdserve.service.http_config import has_http


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "httptools"])
def test_a_door_lacks_what_one_of_its_libraries_lacks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert has_http()
    monkeypatch.setitem(sys.modules, name, None)  # the import system's own way to say that there is none
    assert not has_http()
