"""Texts to tokenize: hand-picked ones, and hundreds drawn from many scripts."""

from __future__ import annotations

from random import Random

PICKED = {
    "plain": "The capital of France is",
    "empty": "",
    "one space": " ",
    "spaces": " " * 7,
    "leading spaces": "   a  b   c",
    "whitespace": " \t\n\n  \r\n \u00a0 \u3000\n",
    "spelled space": "▁a ▁▁b a▁",
    "python": "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\nprint(fib(10))  # 55\n",
    "c": '#include <stdio.h>\nint main(void) {\n\tfor (int i = 0; i < 0x1F; ++i) printf("%d\\n", i);\n\treturn 0;\n}\n',
    "json": '{"a": [1, 2.5e-10, null, true], "b": {"c": "d\\u00e9"}}',
    "html": "<!doctype html><p class='x'>a &amp; b</p><!-- 12 -->",
    "numbers": "3.14159 1,000,000 0xDEADBEEF 12345678901234567890  2 ² ½ ٣ 十二",
    "contractions": "I'm he's they'RE we've DON'T it'll y'all'd've",
    "cases": "XMLHttpRequest iPhone ÉCOLE straße ǅungla HELLOworld",
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
    "more specials": "<s>[INST] hi [/INST]</s> <bos><start_of_turn>user\nx<end_of_turn> <unk><pad>",
    "byte pieces": "<0x41><0x0A> 0x41",
    "controls": "a\x00b\x07c\x1b[31m\x7f\ufeff\ufffd\u2028",
    "long": "The quick brown fox jumps over the lazy dog; 42 times. " * 200,
    "long mixed": "".join(chr(0x20 + (index * 7919) % 0x2000) for index in range(6000)),
}

# Letters of a script: first and last code point.
_SCRIPTS = (
    (0x41, 0x5A), (0x61, 0x7A), (0x61, 0x7A), (0xC0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x530, 0x58F),
    (0x5D0, 0x5EA), (0x621, 0x652), (0x904, 0x94D), (0x985, 0x9CD), (0xB85, 0xBCD), (0xE01, 0xE4E), (0xEDC, 0xEDF),
    (0x10A0, 0x10FF), (0x1200, 0x135A), (0x1780, 0x17D2), (0x1E00, 0x1EFF), (0x3041, 0x3096), (0x30A1, 0x30FA),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x10330, 0x1034A), (0x20000, 0x2A6DF), (0x300, 0x36F),
)  # fmt: skip
_BETWEEN = (
    " ",
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    ", ",
    ". ",
    "-",
    "'",
    "’s ",
    "/",
    "",
    "\u00a0",
)
_DIGITS = "0123456789"
_SIGNS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~€£¥§°±×÷…–—„“«»¿¡'


def drawn(count: int, seed: int = 0) -> list[str]:
    """So many texts of one to thirty pieces: words of a script, numbers, signs, any character of any plane."""
    random = Random(seed)
    return [_text(random) for _ in range(count)]


def _text(random: Random) -> str:
    pieces = []
    for _ in range(random.randint(1, 30)):
        pieces += [_piece(random), random.choice(_BETWEEN)]
    return "".join(pieces)


def _piece(random: Random) -> str:
    kind = random.random()
    if kind < 0.7:
        first, last = random.choice(_SCRIPTS)
        return "".join(chr(random.randint(first, last)) for _ in range(random.randint(1, 9)))
    if kind < 0.82:
        return "".join(random.choice(_DIGITS) for _ in range(random.randint(1, 8)))
    if kind < 0.94:
        return "".join(random.choice(_SIGNS) for _ in range(random.randint(1, 5)))
    code = random.randint(0, 0x10FFFF)
    return chr(code) if not 0xD800 <= code <= 0xDFFF else "?"
