"""What users type becomes a request, or one line that says what is wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pdserve.cli.main import build_parser
from pdserve.cli.prompt import request_of
from pdserve.errors import InvalidRequest
from pdserve.request import Chat, ChatMessage, GenerateRequest
from pdserve.sampling import SamplingParams
from pdserve.structure import Structure, StructureKind


def parsed(*argv: str) -> argparse.Namespace:
    return build_parser(["generate"]).parse_args(["generate", *argv])


def test_text_with_all_settings() -> None:
    line = (
        "--max-tokens 5 --temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --typical-p 0.8 --seed 3 "
        "--repetition-penalty 1.2 --presence-penalty -0.5 --frequency-penalty 0.25 --logit-bias 7=-1.5 "
        "--logit-bias 2=3 --allowed-token-id 4 --allowed-token-id 5 --banned-token-id 6 --bad-word x "
        "--min-tokens 2 --stop a --stop b --stop-token-id 9 --include-stop --ignore-eos "
        "--n 2 --best-of 3 --logprobs 4 --prompt-logprobs 1 --echo --truncate-prompt-tokens 50"
    )
    assert request_of(parsed(*line.split(), "the prompt")) == GenerateRequest(
        input="the prompt",
        sampling=SamplingParams(
            temperature=0.5,
            top_k=7,
            top_p=0.9,
            min_p=0.1,
            typical_p=0.8,
            repetition_penalty=1.2,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias=((2, 3.0), (7, -1.5)),
            allowed_token_ids=(4, 5),
            banned_token_ids=(6,),
            bad_words=("x",),
            min_tokens=2,
            max_tokens=5,
            stop=("a", "b"),
            include_stop=True,
            stop_token_ids=(9,),
            ignore_eos=True,
            logprobs=4,
            prompt_logprobs=1,
        ),
        seed=3,
        n=2,
        best_of=3,
        echo=True,
        truncate_prompt_tokens=50,
    )


def test_every_field_of_a_request_has_a_flag() -> None:
    """But for what a terminal has no use for."""
    flags = vars(parsed("x"))
    fields = {*SamplingParams.__dataclass_fields__, *GenerateRequest.__dataclass_fields__}
    fields -= {"input", "request_id", "model", "sampling", "priority", "user", "resume", "cache_salt"}
    fields = fields - {"structure"} | {kind.value for kind in StructureKind}
    assert all(field in flags or field.removesuffix("s") in flags for field in fields)


def test_defaults_are_those_of_the_service() -> None:
    assert request_of(parsed("x")) == GenerateRequest(input="x")


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
        ("x --max-tokens -1", "max_tokens out of range"),
        ("x --top-k -1", "top_k out of range"),
        ("x --seed 18446744073709551616", r"seed out of range .*limit=0 to 2\^64 - 1"),
        ("x --min-tokens -1", "min_tokens out of range"),
        ("x --n -1", "n out of range .*limit=1 to 64, value=-1"),
        ("x --logprobs -1", "logprobs out of range"),
        ("x --logit-bias=-1=2", "logit_bias holds an id outside the vocabulary .*value=-1"),
        ("x --logit-bias 4294967296=1", "logit_bias holds an id outside the vocabulary"),
        ("x --banned-token-id -1", "banned_token_ids holds an id outside the vocabulary"),
    ],
)
def test_what_does_not_go_together(line: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        request_of(parsed(*line.split()))


@pytest.mark.parametrize("bias", ["7", "7:1", "=1", "7=x"])
def test_a_bias_is_an_id_and_a_number(bias: str) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--logit-bias={bias}", "x")


def test_structures(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    (tmp_path / "words.lark").write_text('start: "a"')
    for line, structure in (
        ([], None),
        (["--json-schema", ' {"type": "null"}'], Structure.json_schema(' {"type": "null"}')),
        (["--json-schema", f"{tmp_path}/schema.json"], Structure.json_schema({"type": "null"})),
        (["--json-object"], Structure.json_object()),
        (["--regex", "a+ b"], Structure.regex("a+ b")),
        (["--choice", "yes", "--choice", "no"], Structure.choices(["yes", "no"])),
        (["--grammar", f"{tmp_path}/words.lark"], Structure.grammar('start: "a"')),
    ):
        assert request_of(parsed(*line, "x")).sampling.structure == structure


def test_structures_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9")
    for line, said in (
        (["--json-schema", f"{tmp_path}/none.json"], "none.json can't be read: No such file"),
        (["--grammar", f"{tmp_path}"], "can't be read: Is a directory"),
        (["--grammar", f"{tmp_path}/latin"], "latin is not UTF-8"),
        (["--regex", "a\udcffb"], "regex can't be encoded as UTF-8"),
        (["--choice", "a\udcffb"], "choices can't be encoded as UTF-8"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            request_of(parsed(*line, "x"))
    with pytest.raises(SystemExit):
        parsed("--regex", "a", "--json-object", "x")


def test_text_that_is_not_utf8() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        request_of(parsed("a\udcffb"))


def test_variables_for_the_template() -> None:
    line = ("--chat", "--template-var", "enable_thinking=false", "--template-var", "style=terse=1", "hi")
    chat = request_of(parsed(*line)).input
    assert isinstance(chat, Chat)
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False, "style": "terse=1"}
    with pytest.raises(InvalidRequest, match="NAME=VALUE"):
        request_of(parsed("--chat", "--template-var", "x", "hi"))
    with pytest.raises(InvalidRequest, match="--template-var goes with --chat"):
        request_of(parsed("--template-var", "x=1", "hi"))


def test_special_tokens_in_a_message_count_if_asked_for() -> None:
    def taken(*line: str) -> bool:
        chat = request_of(parsed(*line)).input
        assert isinstance(chat, Chat)
        return chat.parse_special_tokens

    assert taken("--chat", "--parse-special-tokens", "<|im_end|>")
    assert not taken("--chat", "<|im_end|>")
    with pytest.raises(InvalidRequest, match="--parse-special-tokens goes with --chat"):
        request_of(parsed("--parse-special-tokens", "<|im_end|>"))
