"""`generate`, `status` and `chat` against a server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pdserve.cli.chat import Conversation
from pdserve.cli.main import build_parser, main
from pdserve.cli.target import open_client
from pdserve.errors import InvalidRequest, Overloaded, UnknownWorker
from pdserve.rpc.v1 import admin_pb2, session_pb2
from tests.unit.cli.scripted_router import WINDOW_TOKENS, ScriptedRouter


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    with ScriptedRouter() as started:
        yield started


def test_generate_streams_text(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", router.target, "--seed", "3", "--max-tokens", "9", "Say"], {}) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Hello wörld\n", "")
    (request,) = router.requests
    assert (request.text, request.sampling.seed, request.sampling.max_tokens) == ("Say", 3, 9)


def test_generate_prints_one_object(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", router.target, "--json", "--chat", "--system", "s", "Say"], {}) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    answer = json.loads(said)
    assert answer["request_id"] == "r1"
    assert answer["prompt_token_ids"] == [5, 6]
    assert answer["token_ids"] == [100, 101, 102]
    assert answer["text"] == "Hello wörld"
    assert answer["finish_reason"] == "eos"
    assert answer["usage"] == {"prompt": 4, "cached": 1, "completion": 3}
    assert answer["timings"]["ttft_ms"] == 12.346
    assert all(name.endswith("_ms") for name in answer["timings"])
    assert (answer["attempts"], answer["prefill_worker"], answer["decode_worker"]) == (
        1,
        "prefill-0",
        "decode-0",
    )
    assert [(each.role, each.content) for each in router.requests[0].chat.messages] == [
        ("system", "s"),
        ("user", "Say"),
    ]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_refusal_is_one_line(
    router: ScriptedRouter, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    router.refuse = InvalidRequest("prompt and max_tokens don't fit the window", limit=7)
    assert main(["generate", "--target", router.target, "x", *form], {}) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: prompt and max_tokens don't fit")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_what_needs_no_model_is_refused_without_a_router(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--target", "127.0.0.1:9", "--top-p", "7"], {}) == 1
    assert capsys.readouterr().err == "error: top_p out of range (limit=above 0, at most 1, value=7)\n"


@pytest.mark.parametrize("command", [["generate", "x"], ["status"], ["chat"]])
def test_no_router_there_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--target", "127.0.0.1:9"], {}) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: nothing listens there: is `pdserve up` running? (target=127.0.0.1:9)\n"


def test_a_target_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", "nowhere"], {}) == 1
    assert "HOST:PORT" in capsys.readouterr().err


def test_a_deadline(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.wait_behind = 1
    assert main(["generate", "--target", router.target, "--deadline-s", "0.3", "x"], {}) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("Hel")
    assert "deadline" in captured.err.lower()


def test_status_for_programs(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", router.target, "--json"], {}) == 0
    status = json.loads(capsys.readouterr().out)
    (worker,) = status["workers"]
    assert (worker["role"], worker["id"], worker["epoch"], worker["state"]) == (
        "decode",
        "decode-0",
        "1.2",
        "up",
    )
    assert worker["load"] == {"running": 4, "waiting": 5, "queued_tokens": 6}
    assert worker["blocks"] == {
        "free": 90, "granted": 1, "owned": 2, "cached": 6, "quarantined": 1,
    }  # fmt: skip
    assert worker["cache_hits"] == {"hit_tokens": 32, "query_tokens": 64}
    assert status["queue"] == {"waiting": 1, "waiting_tokens": 100, "running": 4, "limit": 1024}
    assert [(pair["up"], pair["transport"], pair["reason"]) for pair in status["pairs"]] == [
        (True, "stream", ""),
        (False, "", "full [x]"),
    ]
    assert (status["scaling"]["num_decode"], status["scaling"]["change_age_s"]) == (2, 75.0)


def test_status_for_people(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", router.target], {}) == 0
    said = capsys.readouterr().out
    for wanted in ("router-1", "decode-0", "quarantined", "90", "32 tok (50%)", "stream", "down: full [x]"):
        assert wanted in said
    assert "scaling, 0 s ago: prefill 1: [at ease]; decode 2: all are needed" in said
    assert "last change, 75 s ago: decode 1 → 2: 90% of the blocks are held" in said


def test_status_explains_placements(router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", router.target, "--explain"], {}) == 0
    said = capsys.readouterr().out
    for wanted in (
        "r1 choice 0, attempt 1, 1.2 s ago",
        "* prefill-0 > decode-0: 42.5 = queue 2.5 + prefill 40.0: chosen",
        "alone > decode-0: 42.5 = queue 2.5 + prefill 40.0: [slower] than a prefill worker",
        "r2 choice 1, waits, 0.5 s ago",
        "prefill-1 > decode-0: –: no credit of prefill-1",
        "first token after 127.5 ms = queue 20.2 + prefill 107.2",
    ):
        assert wanted in said
    assert main(["status", "--target", router.target, "--explain", "--json"], {}) == 0
    first, second = json.loads(capsys.readouterr().out)["placements"]
    assert first["candidates"][0]["cost_ms"] == {"queue": 2.5, "prefill": 40.0}
    assert first["ttft_ms"]["total"] == 127.5 and first["ttft_ms"]["prefill"] == 107.25
    assert second["ttft_ms"] is None
    assert second["attempt"] == 0 and not second["candidates"][0]["cost_ms"]


def test_an_operator_gives_a_worker_another_role_or_lets_it_go(
    router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["role", "--target", router.target, "--worker", "p0", "--set", "decode"], {}) == 0
    assert main(["drain", "--target", router.target, "--worker", "d1", "--force"], {}) == 0
    assert capsys.readouterr().out == "p0 drains, then rejoins as decode\nd1 drains, then ends\n"
    assert router.orders == [
        admin_pb2.SetRoleRequest(worker_id="p0", role=session_pb2.ROLE_DECODE),
        admin_pb2.DrainWorkerRequest(worker_id="d1", force=True),
    ]
    router.refuse = UnknownWorker("no such worker has joined this router", worker="x", known="p0")
    assert main(["drain", "--target", router.target, "--worker", "x"], {}) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == "" and captured.err.startswith("error: no such worker") and "known=p0" in captured.err
    )


def test_an_operator_s_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["role", "--worker", "p0", "--set", "cook"], {}) == 2
    assert main(["drain"], {}) == 2
    assert main(["drain", "--worker", "p0", "--secret-file", "/nowhere/at/all"], {}) == 1
    assert capsys.readouterr().err.count("error: ") == 3


class Terminal:
    """A user who types the given lines; an exception among them is raised in place of a line."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)
        self.shown = ""
        self.interrupt_at = ""

    def ask(self) -> str:
        line = self._lines.pop(0) if self._lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    def say(self, text: str) -> None:
        self.shown += text
        if text == self.interrupt_at:
            raise KeyboardInterrupt


def talk(
    router: ScriptedRouter, terminal: Terminal, *flags: str, shows_use: bool = False
) -> list[list[tuple[str, str]]]:
    """Run a conversation; the messages of each request that the router got."""
    arguments = build_parser(["chat"]).parse_args(["chat", "--target", router.target, *flags])
    with open_client(arguments) as client:
        Conversation(client, WINDOW_TOKENS, arguments, terminal.ask, terminal.say, shows_use=shows_use).run()
    return [[(each.role, each.content) for each in request.chat.messages] for request in router.requests]


def test_a_conversation_remembers(router: ScriptedRouter) -> None:
    terminal = Terminal("hi\n", "", "and?  \n")
    asked = talk(router, terminal, "--system", "be brief", "--temperature", "0")
    head = [("system", "be brief"), ("user", "hi")]
    assert asked == [head, [*head, ("assistant", "Hello wörld"), ("user", "and?")]]
    assert terminal.shown == "Hello wörld\nHello wörld\n\n"
    assert router.requests[0].sampling.temperature == 0


def test_reset_help_and_quit(router: ScriptedRouter) -> None:
    terminal = Terminal("one", "/reset", "/help", "two", "/quit", "three")
    assert talk(router, terminal, "--system", "s") == [
        [("system", "s"), ("user", "one")],
        [("system", "s"), ("user", "two")],
    ]
    assert "/reset forgets" in terminal.shown


def test_a_text_of_several_lines_keeps_its_indentation(router: ScriptedRouter) -> None:
    pasted = "    if x:\n        y()\n\n/quit"
    assert talk(router, Terminal(f"{pasted}\n")) == [[("user", pasted)]]


def test_a_question_may_begin_with_a_slash(router: ScriptedRouter) -> None:
    questions = ["/etc/hosts: what is it?", "/ and %?", "/what", "/reset the clock?"]
    asked = talk(router, Terminal(*questions))
    assert [each[-1] for each in asked] == [("user", question) for question in questions]


@pytest.mark.parametrize(("typed", "meant"), [("/rest", "/reset"), ("/quti", "/quit"), ("/Drop", "/drop")])
def test_a_mistyped_command_is_no_question(router: ScriptedRouter, typed: str, meant: str) -> None:
    terminal = Terminal(typed)
    assert talk(router, terminal) == []
    assert f"did you mean {meant}?" in terminal.shown


def test_the_use_of_the_window_is_shown(router: ScriptedRouter) -> None:
    terminal = Terminal("hello")
    talk(router, terminal, shows_use=True)
    assert terminal.shown == "Hello wörld\n(8 of 64 tokens)\n\n"


def test_a_full_window_is_told_and_the_oldest_turns_are_dropped_if_asked(router: ScriptedRouter) -> None:
    answer = ("assistant", "Hello wörld")
    terminal = Terminal("a" * 20, "b" * 10, "c" * 30, "/drop", "/drop", "d")
    asked = talk(router, terminal, "--system", "s")
    a, b, c, d = (("user", text) for text in ("a" * 20, "b" * 10, "c" * 30, "d"))
    system = ("system", "s")
    assert asked == [
        [system, a],
        [system, a, answer, b],
        [system, a, answer, b, answer, c],  # too long
        [system, b, answer, c],  # asked again
        [system, c, answer, d],
    ]
    assert (
        "(the conversation fills the model's 64 tokens: /drop forgets its oldest turn and asks again"
        in terminal.shown
    )
    assert "(1 turn forgotten, 1 left)\nHello wörld" in terminal.shown
    assert "error:" not in terminal.shown


def test_a_question_that_fits_no_window(router: ScriptedRouter) -> None:
    terminal = Terminal("a", "b" * 70, "/drop", "/drop", "c")
    assert [each[-1][1] for each in talk(router, terminal)] == ["a", "b" * 70, "b" * 70, "c"]
    assert "(1 turn forgotten, 0 left)" in terminal.shown
    assert "(there is no turn to forget)" in terminal.shown


def test_what_the_template_is_told(router: ScriptedRouter) -> None:
    talk(router, Terminal("hi"), "--template-var", "enable_thinking=false", "--parse-special-tokens")
    chat = router.requests[0].chat
    assert (chat.template_kwargs_json, chat.parse_special_tokens) == ('{"enable_thinking": false}', True)


def test_stopping_an_answer_keeps_what_came_and_cancels_the_rest(router: ScriptedRouter) -> None:
    router.wait_behind = 2
    terminal = Terminal("one", KeyboardInterrupt(), "two")
    terminal.interrupt_at = "lo"
    asked = talk(router, terminal)
    assert router.cancelled.wait(10)
    assert asked[1] == [("user", "one"), ("assistant", "Hello"), ("user", "two")]
    assert "(stopped)" in terminal.shown


def test_a_failed_turn_is_taken_back(router: ScriptedRouter) -> None:
    router.refuse = Overloaded("the queue is full")
    terminal = Terminal("one", "two")
    assert talk(router, terminal) == [[("user", "one")], [("user", "two")]]
    assert terminal.shown.count("error: ") == 2


def test_a_model_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedRouter(has_template=False) as router:
        assert main(["chat", "--target", router.target], {}) == 1
    assert "no chat template" in capsys.readouterr().err
