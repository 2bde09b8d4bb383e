"""Prompts for comparisons with the reference: texts, and chats that go through the model's template."""

from __future__ import annotations

TEXTS: dict[str, str] = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "list": "Three reasons to drink water:\n1.",
    "python": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "json": '{"name": "Ada", "languages": ["en", "fr"], "address": {"street": "',
    "sql": "SELECT customer, SUM(amount) FROM orders WHERE year = 2023 GROUP BY",
    "german": "Die Größe des Übungsraums beträgt fünfzig Quadratmeter, und",
    "russian": "Москва является столицей России, и",
    "greek": "Η Αθήνα είναι η πρωτεύουσα της",
    "arabic": "القاهرة هي عاصمة",
    "hindi": "भारत की राजधानी",
    "chinese": "今天天气很好,我们一起去",
    "japanese": "日本の首都は東京で、",
    "korean": "서울은 대한민국의",
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ 🎉🎉",
    "one space": " ",
    "whitespace": " \t\n\n  \n    \n",
    "numbers": "3.14159 26535 89793 23846 26433",
    "mixed": "Zoë paid 12 € for naïve café façades — 你好 👋 — x² + y² = z²",
}

CHATS: dict[str, list[dict[str, str]]] = {
    "question": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "turns": [
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": "Apple."},
        {"role": "user", "content": "Another one, and write it in Python as a string."},
    ],
}

LONG = "".join(
    f"Chapter {number}. The expedition left at {number % 12 + 1} o'clock and walked {number * 7 % 31} miles north. "
    for number in range(1, 97)
)
