"""Ids, ends, special tokens and files of a tokenizer, on the fake one and on small folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pdserve.errors import Incompatible, InvalidRequest, UnknownModel
from pdserve.tokenizer import Tokenizer


def backend_json(*, with_bos: bool = False, truncated: bool = False) -> bytes:
    """Four words, `<s>` and `</s>`; perhaps a rule that puts `<s>` before texts."""
    words = {word: index for index, word in enumerate(("<unk>", "<s>", "</s>", "a", "b", "c"))}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if truncated:
        backend.enable_truncation(2)
        backend.enable_padding(length=8)
    return str(backend.to_str()).encode()


def small(
    config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **options: bool
) -> Tokenizer:
    files = {"tokenizer.json": backend_json(**options)}
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config).encode()
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation).encode()
    return Tokenizer.from_files(files)


def test_fake_ids_are_the_bytes() -> None:
    fake = Tokenizer.fake()
    text = "Grüße, 世界 🌍\n\x00"
    assert fake.encode(text) == list(text.encode())
    assert fake.decode(list(text.encode())) == text
    assert fake.encode("a<|eos|>b") == [97, 256, 98]
    assert (fake.eos_token_ids, fake.vocab_size) == ((256,), 260)


def test_fake_vocabularies_of_any_size() -> None:
    fake = Tokenizer.fake(1000)
    assert fake.vocab_size == 1000
    assert fake.decode([257, 65, 999, 256]) == "<257>A<999>"
    assert Tokenizer.fake(257).vocab_size == 257
    with pytest.raises(ValueError, match="257"):
        Tokenizer.fake(256)


def test_fake_chats_end_with_an_opened_turn() -> None:
    fake = Tokenizer.fake()
    chat = [{"role": "user", "content": "hi"}]
    assert fake.render_chat(chat) == "<|user|>hi\n<|assistant|>"
    assert fake.encode_chat(chat) == list(b"<|user|>hi\n<|assistant|>")


def test_files_make_an_equal_tokenizer_elsewhere() -> None:
    first = Tokenizer.fake()
    second = Tokenizer.from_files(dict(reversed(first.files.items())))
    assert second.fingerprint == first.fingerprint
    assert len(first.fingerprint) == 32
    assert second.encode("x") == first.encode("x")
    assert Tokenizer.fake(261).fingerprint != first.fingerprint


def test_a_folder_loads_as_its_files(tmp_path: Path) -> None:
    fake = Tokenizer.fake()
    for name, content in fake.files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "weights.bin").write_bytes(b"big")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.files == fake.files
    assert loaded.fingerprint == fake.fingerprint


def test_config_json_counts_where_generation_config_is_silent(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(backend_json())
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 5]}')
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token_ids == (2, 5)
    assert Tokenizer.from_files(loaded.files).eos_token_ids == (2, 5)


def test_a_model_that_sees_images_may_say_the_ends_in_its_text_part(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(backend_json())
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [2, 5]}}')
    assert Tokenizer.load(tmp_path).eos_token_ids == (2, 5)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3, "text_config": {"eos_token_id": [2, 5]}}')
    assert Tokenizer.load(tmp_path).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({"eos_token": "</s>"}, None, (2,)),
        ({"eos_token": {"content": "</s>", "lstrip": False}}, {}, (2,)),
        ({"eos_token": "</s>"}, {"eos_token_id": 5}, (5, 2)),
        ({"eos_token": "</s>"}, {"eos_token_id": [2, 5]}, (2, 5)),
        ({}, {"eos_token_id": []}, ()),
    ],
)
def test_which_ids_end_a_text(
    config: dict[str, Any], generation: dict[str, Any] | None, wanted: tuple[int, ...]
) -> None:
    assert small(config, generation).eos_token_ids == wanted


def test_a_text_gets_what_the_model_puts_around_and_a_chat_only_what_its_template_writes() -> None:
    tokenizer = small(
        {"bos_token": "<s>", "chat_template": "{{ bos_token }} {{ messages[0].content }}"}, with_bos=True
    )
    assert tokenizer.encode("a b") == [1, 3, 4]
    assert tokenizer.encode("a b", add_special_tokens=False) == [3, 4]
    assert tokenizer.encode_chat([{"role": "user", "content": "a b"}]) == [1, 3, 4]


@pytest.mark.parametrize(
    "flags", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}, {}]
)
def test_begin_and_end_are_tokenizer_jsons_own_rule(flags: dict[str, bool]) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    assert small(config, with_bos=True).encode("a") == [1, 3]
    assert small(config).encode("a") == [3]


def test_named_and_extra_tokens_of_the_plain_vocabulary_become_special() -> None:
    tokenizer = small({"eos_token": "b", "additional_special_tokens": ["c", "d"]})
    assert tokenizer.decode([3, 4, 5, 6]) == "a"
    assert tokenizer.encode("abc") == [3, 4, 5]
    assert (tokenizer.vocab_size, tokenizer.highest_token_id) == (7, 6)


def test_an_added_token_that_would_get_another_id_is_refused() -> None:
    entry = {"content": "<tool>", "special": False}
    with pytest.raises(Incompatible, match=r"token=<tool>, listed=9, got=6"):
        small({"added_tokens_decoder": {"9": entry}})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"added_tokens_decoder": {"nine": {"content": "<t>"}}}, "without an id or a text .*id=nine"),
        ({"added_tokens_decoder": {"9": {}}}, "without an id or a text .*id=9"),
        ({"added_tokens_decoder": {"9": {"content": "\ud800"}}}, "without an id or a text"),
        ({"additional_special_tokens": 5}, r"not a list of tokens \(file=tokenizer_config.json, got=5\)"),
        ({"extra_special_tokens": "<t>"}, "not a list of tokens"),
    ],
)
def test_tokens_that_are_none_are_told_in_one_line(config: dict[str, Any], said: str) -> None:
    with pytest.raises(Incompatible, match=said):
        small(config)


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(backend_json())
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.chat_templates == {"default": "plain", "tool_use": "tools"}
    elsewhere = Tokenizer.from_files(loaded.files)
    assert elsewhere.fingerprint == loaded.fingerprint
    assert elsewhere.render_chat([{"role": "user", "content": "a"}], [{"name": "f"}]) == "tools"


def test_texts_are_never_cut_or_padded() -> None:
    assert small(truncated=True).encode("a b c a b c") == [3, 4, 5, 3, 4, 5]


def test_tokens_listed_in_the_config_only_are_added() -> None:
    entry = {"content": "<tool>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = small({"added_tokens_decoder": {"6": entry}, "pad_token": "<pad>"})
    assert tokenizer.encode("a <tool>") == [3, 6]
    assert tokenizer.encode("<pad>") == [7]
    assert tokenizer.decode([6, 7]) == "<tool>"


def test_special_tokens_give_no_text_unless_asked() -> None:
    tokenizer = small()
    assert tokenizer.decode([1, 3, 2]) == "a"
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=False) == "<s> a </s>"


def test_ids_outside_the_vocabulary_give_no_text_and_impossible_ones_are_refused() -> None:
    fake = Tokenizer.fake()
    assert fake.decode([72, 4_000_000, 105]) == "Hi"
    with pytest.raises(InvalidRequest, match="0 to"):
        fake.decode([-1])


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        Tokenizer.fake().encode("\ud800")


def test_without_a_template_chats_are_refused() -> None:
    tokenizer = small()
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_several_templates_by_name() -> None:
    entries = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = small({"chat_template": entries})
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.render_chat(chat) == "plain"
    assert tokenizer.render_chat(chat, [{"name": "f"}]) == "tools"


@pytest.mark.parametrize(
    ("files", "error", "named"),
    [
        ({}, UnknownModel, r"tokenizer\.json"),
        ({"tokenizer.json": b"{"}, Incompatible, r"tokenizer\.json"),
        ({"tokenizer.json": backend_json(), "tokenizer_config.json": b"["}, Incompatible, "tokenizer_config"),
        (
            {"tokenizer.json": backend_json(), "generation_config.json": b"[]"},
            Incompatible,
            "generation_config",
        ),
        (
            {"tokenizer.json": backend_json(), "generation_config.json": b'{"eos_token_id": "x"}'},
            Incompatible,
            "eos_token_id",
        ),
    ],
)
def test_broken_files_are_one_clear_line(files: dict[str, bytes], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named) as refused:
        Tokenizer.from_files(files)
    assert "\n" not in str(refused.value)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def sentencepiece_like() -> Tokenizer:
    """Byte fallback, spaces as ▁, the first space stripped: as Llama 2's."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "é",
        "▁▁",
    ]
    backend = Backend(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer.from_files({"tokenizer.json": str(backend.to_str()).encode()})


def test_stream_of_another_kind_of_decoder() -> None:
    tokenizer = sentencepiece_like()
    emoji = [3 + byte for byte in "🌍".encode()]
    ids = [1, 260, 261, 259, *emoji, 262, 264, 260, 2, *[3 + byte for byte in "世界".encode()]]
    whole = tokenizer.decode(ids)
    assert whole == "aa 🌍b   a世界"
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown != whole
    for split in range(len(ids) + 1):
        stream = tokenizer.stream()
        assert stream.step(ids[:split]) + stream.step(ids[split:]) + stream.flush() == whole
        stream = tokenizer.stream(skip_special_tokens=False)
        assert stream.step(ids[:split]) + stream.step(ids[split:]) + stream.flush() == shown
    stream = tokenizer.stream()
    pieces = [stream.step([token_id]) for token_id in ids]
    assert "".join(pieces) + stream.flush() == whole
    assert pieces[4:8] == ["", "", "", "🌍"]


def test_an_unfinished_character_comes_with_the_flush() -> None:
    tokenizer = sentencepiece_like()
    stream = tokenizer.stream()
    assert stream.step([261, 3 + 0xE4]) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    tokenizer = sentencepiece_like()
    ids = [3 + 0xFF] * 40
    stream = tokenizer.stream()
    pieces = [stream.step([token_id]) for token_id in ids]
    assert len("".join(pieces)) >= 32
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
