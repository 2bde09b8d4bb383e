"""Prompt token ids of the packaged model equal those of transformers on the same file, chat template included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pdserve import modelstore
from pdserve.errors import UnknownModel
from pdserve.tokenizer import Tokenizer
from tests.unit.modelstore.building import write_gguf

TEXTS = {
    "plain": "The capital of France is",
    "empty": "",
    "one space": " ",
    "spaces": " " * 7,
    "whitespace": " \t\n\n  \r\n \u00a0 \u3000\n",
    "python": "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\nprint(fib(10))  # 55\n",
    "c": '#include <stdio.h>\nint main(void) {\n\tfor (int i = 0; i < 0x1F; ++i) printf("%d\\n", i);\n\treturn 0;\n}\n',
    "json": '{"a": [1, 2.5e-10, null, true], "b": {"c": "d\\u00e9"}}',
    "html": "<!doctype html><p class='x'>a &amp; b</p><!-- 12 -->",
    "numbers": "3.14159 1,000,000 0xDEADBEEF 12345678901234567890  2 ² ½ ٣ 十二",
    "contractions": "I'm he's they'RE we've DON'T it'll y'all'd've",
    "german": "Fünf große Äpfel, süßer als die Übrigen – „wirklich?“",
    "russian": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "arabic": "نصٌّ حكيمٌ لهُ سِرٌّ قاطِعٌ وَذُو شَأنٍ عَظيمٍ",
    "hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "hindi": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "chinese": "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。",
    "japanese": "いろはにほへと ちりぬるを カタカナ 漢字",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고",
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ 🫠🤷🏿‍♀️ x😀y",
    "combining": "e\u0301 vs \u00e9, Z\u0351\u036b\u0343\u036aa\u035c\u0329l\u034cgo",
    "specials inside": "before<|im_start|>user\nhi<|im_end|>after <|endoftext|> <|im_end |> <file_sep>",
    "controls": "a\x00b\x07c\x1b[31m\x7f\ufeff\ufffd\u2028",
    "long": "The quick brown fox jumps over the lazy dog; 42 times. " * 200,
    "long mixed": "".join(chr(0x20 + (index * 7919) % 0x2000) for index in range(6000)),
}

SYSTEM = {"role": "system", "content": "You answer in one word."}
USER = {"role": "user", "content": "  What is 2 + 2?\nShow `code`: 🧮  "}
ANSWER = {"role": "assistant", "content": "Four. "}
CHATS: dict[str, list[dict[str, str]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Why? 为什么?"}],
    "empty content": [{"role": "user", "content": ""}],
    "markers in content": [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant"}],
    "long": [USER, ANSWER] * 150 + [USER],
}


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return modelstore.resolve("smollm2-135m")
    except UnknownModel:
        return modelstore.fetch(modelstore.ALIASES["smollm2-135m"])


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    # Apart from our tokenizer.json, so that transformers really reads the GGUF file.
    from transformers import AutoTokenizer

    alone = tmp_path_factory.mktemp("gguf")
    os.symlink(folder / "weights.gguf", alone / "model.gguf")
    return AutoTokenizer.from_pretrained(str(alone), gguf_file="model.gguf")


@pytest.mark.parametrize("name", TEXTS)
def test_text_ids_equal(name: str, ours: Tokenizer, reference: Any) -> None:
    text = TEXTS[name]
    ids = ours.encode(text)
    assert ids == reference(text).input_ids
    assert ours.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@pytest.mark.parametrize("name", CHATS)
def test_chat_ids_equal(name: str, ours: Tokenizer, reference: Any) -> None:
    chat = CHATS[name]
    want = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert ours.encode_chat(chat) == want["input_ids"]
    text = reference.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
    assert ours.render_chat(chat, add_generation_prompt=False) == text


@pytest.mark.parametrize("name", ["several turns", "system"])
def test_continued_chat_equal(name: str, ours: Tokenizer, reference: Any) -> None:
    chat = [*CHATS[name], {"role": "assistant", "content": "It is fo"}]
    want = reference.apply_chat_template(chat, continue_final_message=True, tokenize=False)
    assert ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True) == want


def test_long_prompts_are_long(ours: Tokenizer) -> None:
    assert len(ours.encode(TEXTS["long"])) > 2_000
    assert len(ours.encode(TEXTS["long mixed"])) > 2_000
    assert len(ours.encode_chat(CHATS["long"])) > 2_000


def test_transformers_reads_the_folder_too(folder: Path, ours: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS.values():
        assert theirs(text).input_ids == ours.encode(text)
    chat = CHATS["several turns"]
    assert theirs.apply_chat_template(chat, tokenize=False) == ours.render_chat(
        chat, add_generation_prompt=False
    )
    assert theirs.eos_token_id in ours.eos_token_ids


def test_streamed_text_equals_the_whole(ours: Tokenizer) -> None:
    for text in TEXTS.values():
        ids = ours.encode(text)
        stream = ours.stream()
        pieces = [stream.step([token_id]) for token_id in ids]
        assert "".join(pieces) + stream.flush() == ours.decode(ids)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_other_pre_tokenizers_equal_on_a_small_file(pre: str, add_bos: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "model.gguf", pre=pre, add_bos=add_bos)
    small = Tokenizer.load(modelstore.resolve(path, tmp_path / "cache"))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="model.gguf")
    for text in TEXTS.values():
        assert small.encode(text) == theirs(text).input_ids
