"""Text and chats ↔ token ids, from the files of a model folder (no torch, no transformers)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pdserve.chat_template import ChatTemplate
from pdserve.clock import Clock, SystemClock
from pdserve.detokenizer import ByteStream, ByteTable, TextStream, WindowStream, byte_spelling
from pdserve.errors import Incompatible, InvalidRequest, UnknownModel

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FAKE_EOS = 256
_FAKE_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Tokenizer:
    """The tokenizer of one model. Immutable after loading; any thread may call (streams have one owner each).

    files        what it was made of, by name: a worker sends them to a router that has no model folder
    fingerprint  BLAKE2b-128 over the files, hex: equal on both sides of a pair
    """

    def __init__(self, files: Mapping[str, bytes], clock: Clock) -> None:
        self.files: dict[str, bytes] = {name: files[name] for name in sorted(files)}
        self.fingerprint = _fingerprint(self.files)
        self._config = _json_of(files, "tokenizer_config.json")
        if "tokenizer.json" not in files:
            raise UnknownModel("no tokenizer.json among the model's files")
        self._backend = _load_backend(files["tokenizer.json"], self._config)
        self._named = self._named_tokens(_json_of(files, "special_tokens_map.json"))
        self._finish_backend()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = self._find_eos()
        self._templates = {
            name: ChatTemplate(source, self._named, clock)
            for name, source in self._template_sources().items()
        }
        is_byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        self._byte_table = ByteTable(self._backend, self._special_ids) if is_byte_level else None

    @classmethod
    def load(cls, folder: Path, clock: Clock | None = None) -> Self:
        """Read a model folder. Raises UnknownModel or Incompatible, naming the file."""
        files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
        if not files:
            raise UnknownModel("model folder has no tokenizer.json", folder=folder)
        # config.json matters for the end-of-sequence ids only, where generation_config.json doesn't say them.
        if (folder / "config.json").is_file() and not _json_of(files, "generation_config.json").get(
            "eos_token_id"
        ):
            files["config.json"] = (folder / "config.json").read_bytes()
        return cls(files, clock or SystemClock())

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], clock: Clock | None = None) -> Self:
        """From the files that a worker sent. Raises as `load`."""
        return cls(files, clock or SystemClock())

    @classmethod
    def fake(cls, vocab_size: int = 260, clock: Clock | None = None) -> Self:
        """For the fake engine: ids 0–255 are the bytes, 256 is `<|eos|>`, further ones read `<257>` and so on."""
        return cls.from_files(_fake_files(vocab_size), clock)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._templates)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named tokens of the model, e.g. bos_token, as templates see them."""
        return dict(self._named)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; by default with what the model puts around texts (begin of sequence, mostly).

        Special tokens written out in the text become their ids, as everywhere in the field.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("text is not valid Unicode") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a chat by the model's own template. Raises InvalidRequest saying what is wrong."""
        if not self._templates:
            raise InvalidRequest("this model has no chat template: send text or token ids")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest(
                "this model has no default chat template", templates=", ".join(self._templates)
            )
        return template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of a chat. The template writes the special tokens itself, so none are put around."""
        text = self.render_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, all at once; ids outside the vocabulary give no text."""
        try:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("token ids are integers from 0 to 2^32 - 1") from error

    def stream(self) -> TextStream:
        """A new incremental detokenizer; special tokens give no text."""
        if self._byte_table is not None:
            return ByteStream(self._byte_table)
        return WindowStream(self.decode, lambda token_id: token_id not in self._special_ids)

    def _named_tokens(self, token_map: dict[str, Any]) -> dict[str, str]:
        named: dict[str, str] = {}
        for name in _NAMED_TOKENS:
            token = self._config.get(name) or token_map.get(name)
            if isinstance(token, Mapping):
                token = token.get("content")
            if isinstance(token, str) and token:
                named[name] = token
        return named

    def _finish_backend(self) -> None:
        """What tokenizer_config.json adds to tokenizer.json: tokens, and begin and end of text if it says so."""
        missing = [token for token in self._named.values() if self._backend.token_to_id(token) is None]
        self._backend.add_special_tokens(
            [AddedToken(token, normalized=False, special=True) for token in missing]
        )
        self._backend.no_truncation()
        self._backend.no_padding()
        if "add_bos_token" not in self._config and "add_eos_token" not in self._config:
            return
        bos = self._named.get("bos_token") if self._config.get("add_bos_token") else None
        eos = self._named.get("eos_token") if self._config.get("add_eos_token") else None
        around = dict.fromkeys(token for token in (bos, eos) if token is not None)
        self._backend.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, self._backend.token_to_id(token)) for token in around],
        )

    def _find_eos(self) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            ids = _json_of(self.files, name).get("eos_token_id")
            if ids is None or ids == []:
                continue
            found = tuple(ids) if isinstance(ids, list) else (ids,)
            if not all(isinstance(token_id, int) and token_id >= 0 for token_id in found):
                raise Incompatible("eos_token_id is not an id or a list of them", file=name, got=ids)
            return found
        token_id = self._backend.token_to_id(self._named.get("eos_token", ""))
        return () if token_id is None else (token_id,)

    def _template_sources(self) -> dict[str, str]:
        if "chat_template.jinja" in self.files:
            return {"default": self.files["chat_template.jinja"].decode("utf-8", "replace")}
        source = self._config.get("chat_template") or _json_of(self.files, "chat_template.json").get(
            "chat_template"
        )
        if isinstance(source, str):
            return {"default": source}
        if isinstance(source, list):  # several, by name
            return {str(entry["name"]): str(entry["template"]) for entry in source}
        return {}


def _load_backend(content: bytes, config: Mapping[str, Any]) -> Backend:
    try:
        backend = Backend.from_buffer(content)
    except Exception as error:  # the package raises plain Exception for anything it can't read
        raise Incompatible("tokenizer.json can't be read", why=" ".join(str(error).split())[:200]) from error
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        known = backend.get_added_tokens_decoder()
        for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
            if int(token_id) not in known and isinstance(entry, Mapping):
                flags = {
                    key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized")
                }
                token = AddedToken(str(entry["content"]), special=bool(entry.get("special")), **flags)
                backend.add_tokens([token])
    return backend


def _json_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise Incompatible(f"{name} is not JSON", why=error) from error
    if not isinstance(content, dict):
        raise Incompatible(f"{name} is not a JSON object")
    return content


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, content in files.items():
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _fake_files(vocab_size: int) -> dict[str, bytes]:
    if vocab_size <= _FAKE_EOS:
        raise ValueError(f"a fake tokenizer needs a vocabulary of at least {_FAKE_EOS + 1}, got {vocab_size}")
    vocab = {spelled: byte for byte, spelled in enumerate(byte_spelling())}
    vocab["<|eos|>"] = _FAKE_EOS
    vocab.update({f"<{token_id}>": token_id for token_id in range(_FAKE_EOS + 1, vocab_size)})
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|eos|>", normalized=False, special=True)])
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|eos|>"}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [_FAKE_EOS]}).encode(),
        "chat_template.jinja": _FAKE_TEMPLATE.encode(),
    }
