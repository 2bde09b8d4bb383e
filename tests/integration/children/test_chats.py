"""Chats rendered in real child processes: whatever a template or the messages make it do ends at a limit."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.children.frames import RenderChat
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.structure import Structure
from tests.integration.children.proving import Bench, bench, kill_all

CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SQUARE = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
DOUBLING = (
    "{%% set n = namespace(x=9) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}{{ n.x }}"
)
TIME = "the chat template takes longer than children.render_s (limit_s=2)"
MEMORY = "the chat template needs more memory than children.memory_bytes (limit_bytes=134217728)"
TEXT = "the chat template writes too much text (limit=16777216, value="


def job(template: str, messages: list[dict[str, Any]] | None = None, **how: Any) -> RenderChat:
    return RenderChat(
        template,
        {"bos_token": "<s>"},
        json.dumps({"messages": messages or [{"role": "user", "content": "hi"}], **how}),
    )


async def outcome(b: Bench, asked: RenderChat) -> str:
    assert b.renderer is not None
    try:
        return await b.renderer.render(asked, "")
    except PdserveError as error:
        return f"{type(error).__name__}: {error}"


async def test_a_chat_is_written_and_errors_are_told_as_ever() -> None:
    async with bench(render_s=60.0) as b:
        assert await outcome(b, job("{{ bos_token }}" + CHATML)) == (
            "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        for asked, said in [
            (job("{{ 1 +"), "the model's chat template doesn't compile (why=unexpected 'end of template')"),
            (job("{{ raise_exception('system first') }}"), "refused the messages (why=system first)"),
            (
                job("{{ messages.__class__ }}"),
                "needs what the sandbox forbids (why=attribute '__class__' of 'list')",
            ),
            (job(CHATML, [{"content": "x"}]), "a chat message needs a role (index=0)"),
            (job("{{ '\\ud800' }}"), "text is not valid Unicode"),
            (job("\ud800"), "the model's chat template is not valid Unicode"),
        ]:
            found = await outcome(b, asked)
            assert found.startswith("InvalidRequest: ") and said in found


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP + "{% endfor %}{% endfor %}", TIME),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
        ("{{ 9 ** (9 ** 9) }}", TIME),
        (DOUBLING % "n.x * n.x", TIME),
        ("{{ 'a' * 999999999 }}", MEMORY),
        ("{{ [1] * 999999999 }}", MEMORY),
        (DOUBLING % "n.x ~ n.x", MEMORY),
        (DOUBLING % "[n.x, n.x]", "than children."),
        ("{{ 'x'.join(['y' * 999999] * 9999) }}", MEMORY),
        ("{{ '%9999999999d' % 1 }}", MEMORY),
        ("{{ ('x' * 999999) | replace('x', 'y' * 999999) }}", MEMORY),
        ("{{ 'x' * 16777217 }}", TEXT),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth exceeded"),
    ],
)  # fmt: skip
async def test_a_template_without_an_end_is_ended(template: str, said: str) -> None:
    async with bench(render_s=2.0) as b:
        found = await outcome(b, job(template))
        assert found.startswith("InvalidRequest: ") and said in found
        assert "<|im_start|>" in await outcome(b, job(CHATML))


async def test_a_template_that_is_itself_too_large_to_compile_is_refused() -> None:
    """200,000 expressions: 14 s and 2 GB."""
    async with bench(render_s=2.0) as b:
        found = await outcome(b, job("{{ messages }}" * 200_000))
        assert found.removeprefix("InvalidRequest: ") in (TIME, MEMORY)


async def test_messages_that_take_for_ever_hold_up_no_other_chat() -> None:
    """And once they did, they are known for a while."""
    many = [{"role": "user", "content": ""}] * 5000
    async with bench(render_s=3.0) as b:
        ended: list[str] = []

        async def ask(name: str, asked: RenderChat) -> None:
            found = await outcome(b, asked)
            ended.append(name)
            assert ("takes longer than children.render_s" in found) == (name == "endless"), found

        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(ask("endless", job(SQUARE, many, variables={"number": number})))
            await asyncio.sleep(0)
            for _ in range(4):
                tasks.create_task(ask("usual", job(CHATML)))
        assert ended == ["usual"] * 4 + ["endless"] * 3
        kills = b.count("pdserve_child_kills_total", kind="chat", reason="time")
        assert (kills, b.count("pdserve_child_kills_total", kind="slow_chat", reason="time")) == (3, 3)
        assert "children.render_s" in await outcome(b, job(SQUARE, many, variables={"number": 0}))
        assert b.count("pdserve_child_kills_total", kind="chat", reason="time") == 3


async def test_chats_and_structures_have_children_of_their_own() -> None:
    async with bench(render_s=60.0) as b:
        await b.warm(6)
        await asyncio.gather(outcome(b, job(CHATML)), b.outcome(Structure.regex("a")))
        kill_all(await b.warm(6))
        assert "<|im_start|>" in await outcome(b, job(CHATML))


async def test_a_long_chat_comes_through_whole() -> None:
    messages = [{"role": "user", "content": f"é{number}" * 2000} for number in range(200)]
    async with bench(render_s=60.0) as b:
        found = await outcome(b, job("{% for m in messages %}{{ m.content }}{% endfor %}", messages))
        assert found == "".join(message["content"] for message in messages)


async def test_the_error_is_the_requests() -> None:
    async with bench(render_s=60.0) as b:
        assert b.renderer is not None
        with pytest.raises(InvalidRequest):
            await b.renderer.render(job("{{ 1 // 0 }}"), "")
