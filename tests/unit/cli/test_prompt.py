"""What users type becomes a request, or one line that says what is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pdserve.cli.main import build_parser
from pdserve.cli.prompt import request_of
from pdserve.errors import InvalidRequest
from pdserve.request import Chat, ChatMessage


def parsed(*argv: str) -> argparse.Namespace:
    return build_parser(["generate"]).parse_args(["generate", *argv])


def test_text_with_all_settings() -> None:
    line = "--max-tokens 5 --temperature 0.5 --top-k 7 --top-p 0.9 --seed 3 --stop a --stop b --ignore-eos"
    request = request_of(parsed(*line.split(), "the prompt"))
    assert request.input == "the prompt"
    assert request.seed == 3
    params = request.sampling
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.5, 7, 0.9)
    assert (params.stop, params.ignore_eos) == (("a", "b"), True)


def test_defaults_are_those_of_the_service() -> None:
    request = request_of(parsed("x"))
    assert request.seed is None
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (
        None,
        1.0,
        1.0,
    )


def test_a_chat() -> None:
    assert request_of(parsed("--chat", "hi")).input == Chat((ChatMessage("user", "hi"),))
    with_system = request_of(parsed("--chat", "--system", "be brief", "hi")).input
    assert with_system == Chat((ChatMessage("system", "be brief"), ChatMessage("user", "hi")))


def test_token_ids_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[1, 2, 49151]")
    assert request_of(parsed("--token-ids-file", str(tmp_path / "ids.json"))).input == (1, 2, 49151)


def test_a_prompt_that_begins_with_a_dash() -> None:
    assert request_of(parsed("--", "--not-a-flag")).input == "--not-a-flag"


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "[1, -2]", "[1.0]", '["1"]', "[true]", "[4294967296]", "[" * 99999]
)
def test_files_that_hold_no_ids(tmp_path: Path, content: str) -> None:
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"ids\.json"):
        request_of(parsed("--token-ids-file", str(tmp_path / "ids.json")))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        request_of(parsed("--token-ids-file", str(tmp_path)))
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        request_of(parsed("--token-ids-file", str(tmp_path / "x")))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "PROMPT"),
        ("x --token-ids-file y", "one of them"),
        ("--token-ids-file y --chat", "--chat"),
        ("x --system s", "--chat"),
        ("x --max-tokens -1", "--max-tokens"),
        ("x --top-k -1", "--top-k"),
        ("x --seed 18446744073709551616", "--seed"),
    ],
)
def test_what_does_not_go_together(line: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        request_of(parsed(*line.split()))


def test_text_that_is_not_utf8() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        request_of(parsed("a\udcffb"))
