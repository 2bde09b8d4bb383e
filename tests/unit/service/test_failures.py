"""Errors as messages: whatever a peer writes into one, the reader gets an error of the taxonomy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import (
    DEFAULT_RETRY_AFTER_S,
    Failure,
    InvariantViolated,
    Overloaded,
    PdserveError,
    WorkerLost,
    from_failure,
    to_failure,
)

NAMES = ["Overloaded", "WorkerLost", "InvariantViolated", "Draining", "PdserveError", "NotThere", ""]
FIELDS = ["message", "self", "error", "fields", "retry_after_s", "lease", "", "with space"]


@given(st.sampled_from(NAMES), st.text(), st.dictionaries(st.sampled_from(FIELDS) | st.text(), st.text()))
def test_any_failure_can_be_raised_again(name: str, message: str, fields: dict[str, str]) -> None:
    error = from_failure(Failure(name, message, fields))
    assert isinstance(error, PdserveError) and error.message == message
    for field, value in fields.items():
        if field not in ("error", "retry_after_s"):
            assert error.fields[field] == value
    assert str(error).startswith(message)
    again = from_failure(to_failure(error))
    assert type(again) is type(error) and again.message == message


@pytest.mark.parametrize("text", ["soon", "", "nan", "inf", "-1", "1e999"])
def test_a_retry_after_that_is_no_duration_counts_as_the_default(text: str) -> None:
    error = from_failure(Failure("Overloaded", "full", {"retry_after_s": text}))
    assert isinstance(error, Overloaded) and error.retry_after_s == DEFAULT_RETRY_AFTER_S


def test_what_is_told_comes_back() -> None:
    full = from_failure(to_failure(Overloaded("full", retry_after_s=2.5, limit=7)))
    assert isinstance(full, Overloaded) and full.retry_after_s == 2.5 and full.fields["limit"] == "7"
    lost = from_failure(to_failure(WorkerLost("gone", peer="p0")))
    assert isinstance(lost, WorkerLost) and lost.counts_as_attempt and lost.fields == {"peer": "p0"}
    unknown = from_failure(Failure("OfALaterVersion", "what", {"a": "b"}))
    assert isinstance(unknown, InvariantViolated) and unknown.fields == {"a": "b", "error": "OfALaterVersion"}


@given(st.text())
def test_an_error_is_one_line_whatever_its_values_hold(value: str) -> None:
    said = str(WorkerLost("gone", peer=value))
    assert said.isprintable()
    assert not value.isprintable() or said == f"gone (peer={value})"
