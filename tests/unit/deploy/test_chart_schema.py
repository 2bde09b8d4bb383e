"""The chart's schema knows the settings that pdserve knows."""

from __future__ import annotations

import json

from jsonschema import Draft202012Validator

from pdserve.service.config import SETTINGS
from tools.chart_schema import DECIDED, FILE, with_settings


def test_the_schema_is_that_of_the_code() -> None:
    text = FILE.read_text(encoding="utf-8")
    made = json.dumps(with_settings(json.loads(text)), indent=2) + "\n"
    assert text == made, "run: python tools/chart_schema.py"


def test_what_the_chart_decides_are_settings() -> None:
    assert {key.name for key in SETTINGS} >= DECIDED


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(json.loads(FILE.read_text(encoding="utf-8")))
