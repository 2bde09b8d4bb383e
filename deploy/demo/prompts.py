"""What the demo asks: a chat, a completion, and a prompt of more than 1,000 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.request import Chat, ChatMessage, Input


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One stream of the demo."""

    label: str
    title: str
    input: Input


def demo_prompts() -> list[DemoPrompt]:
    """In the order in which they are shown."""
    question = "Why is the sky blue, and why is it red in the evening? Answer in a few sentences."
    beginning = "The three most important inventions in history are"
    task = "Who was Ilse Varn, and what did she do? Answer in a few sentences."
    return [
        DemoPrompt("chat", question, Chat((ChatMessage("user", question),))),
        DemoPrompt("completion", f"{beginning} …", beginning),
        DemoPrompt("long", f"(a story) {task}", Chat((ChatMessage("user", f"{_story()}\n\n{task}"),))),
    ]


def _story() -> str:
    """A line a paragraph."""
    text = Path(__file__).with_name("story.txt").read_text(encoding="utf-8").strip()
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.split("\n\n"))
