"""What the tokenizer files of a model folder say, in all the ways in which folders say it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pdserve.errors import Incompatible, UnknownModel

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that a tokenizer is made of. Raises UnknownModel if there are none, OSError."""
    paths = [folder / name for name in FILES]
    paths += sorted((folder / TEMPLATES).glob("*.jinja"))
    # A link to nowhere is not the absence of a file: without its template a chat would be another text.
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths if os.path.lexists(path)}
    if not files:
        raise UnknownModel("model folder has no tokenizer.json", folder=folder)
    # config.json matters for the end-of-sequence ids only, where generation_config.json doesn't say them.
    silent = not json_of(files, "generation_config.json").get("eos_token_id")
    if silent and (folder / "config.json").is_file():
        files["config.json"] = (folder / "config.json").read_bytes()
    return files


def json_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file. Raises Incompatible naming the file."""
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise Incompatible(f"{name} is not JSON", why=error) from error
    if not isinstance(content, dict):
        raise Incompatible(f"{name} is not a JSON object")
    return content


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """The tokens that templates call by name, e.g. bos_token."""
    return {name: str(token.content) for name, token in _named(files).items()}


def load_backend(files: Mapping[str, bytes]) -> Backend:
    """The tokenizer with all that the other files add: tokens and special tokens.

    What stands around a text (begin, end) is tokenizer.json's own rule; `add_bos_token` in tokenizer_config.json is for
    folders without that file, and transformers ignores it, too.
    Raises UnknownModel without a tokenizer.json, Incompatible naming what can't be read or doesn't fit.
    """
    if "tokenizer.json" not in files:
        raise UnknownModel("no tokenizer.json among the model's files")
    try:
        backend = Backend.from_buffer(files["tokenizer.json"])
    except Exception as error:  # the package raises plain Exception for anything it can't read
        raise Incompatible("tokenizer.json can't be read", why=" ".join(str(error).split())[:200]) from error
    _add_listed(backend, json_of(files, "tokenizer_config.json").get("added_tokens_decoder"))
    _add_special(backend, files)
    backend.no_truncation()
    backend.no_padding()
    return backend


def eos_token_ids(files: Mapping[str, bytes], backend: Backend) -> tuple[int, ...]:
    """The ids that end a text: those of generation_config.json, else of config.json, and the named token's."""
    ends: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        ends = ends or dict.fromkeys(_ends_in(files, name))
    named_id = backend.token_to_id(named_tokens(files).get("eos_token", ""))
    if named_id is not None:
        ends[named_id] = None
    return tuple(ends)


def _ends_in(files: Mapping[str, bytes], name: str) -> tuple[int, ...]:
    content = json_of(files, name)
    ids = content.get("eos_token_id")
    if ids is None and isinstance(content.get("text_config"), dict):  # a model that sees images, too
        ids = content["text_config"].get("eos_token_id")
    found = () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(type(token_id) is int and token_id >= 0 for token_id in found):
        raise Incompatible("not a token id, nor a list of them", file=name, key="eos_token_id", value=ids)
    return found


def template_sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Chat templates by name; the usual one is `default`."""
    source = json_of(files, "tokenizer_config.json").get("chat_template")
    source = source or json_of(files, "chat_template.json").get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(source, str):
        sources["default"] = source
    elif isinstance(source, list):  # several, by name
        try:
            sources.update({str(entry["name"]): str(entry["template"]) for entry in source})
        except (KeyError, TypeError) as error:
            raise Incompatible("chat_template is not a list of names and templates") from error
    for name, content in files.items():
        if name == "chat_template.jinja":
            sources["default"] = content.decode("utf-8", "replace")
        elif name.startswith(f"{TEMPLATES}/"):
            sources[Path(name).stem] = content.decode("utf-8", "replace")
    return sources


def _named(files: Mapping[str, bytes]) -> dict[str, AddedToken]:
    config, token_map = json_of(files, "tokenizer_config.json"), json_of(files, "special_tokens_map.json")
    found = {name: _special(config.get(name) or token_map.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in found.items() if token is not None}


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8; JSON may hold halves of surrogate pairs."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _special(entry: Any) -> AddedToken | None:
    """A special token as files write it: its text, or an object with flags."""
    content = entry.get("content") if isinstance(entry, Mapping) else entry
    if not isinstance(content, str) or not content or not _is_unicode(content):
        return None
    flags = {key: bool(entry[key]) for key in _FLAGS if key in entry} if isinstance(entry, Mapping) else {}
    return AddedToken(content, special=True, **{"normalized": False, **flags})


def _add_listed(backend: Backend, listed: Any) -> None:
    """Tokens that tokenizer_config.json lists by id and tokenizer.json lacks."""
    known = backend.get_added_tokens_decoder()
    for token_id, entry in _listed(listed):
        if token_id in known:
            continue
        flags = {key: bool(entry.get(key)) for key in _FLAGS}
        token = AddedToken(str(entry["content"]), special=bool(entry.get("special")), **flags)
        backend.add_tokens([token])
        got = backend.token_to_id(token.content)
        if got != token_id:
            raise Incompatible(
                "added token doesn't get the id that tokenizer_config.json lists",
                token=token.content,
                listed=token_id,
                got=got,
            )


def _listed(listed: Any) -> list[tuple[int, Mapping[str, Any]]]:
    """By id. Raises Incompatible for an entry that is not a token."""
    if not isinstance(listed, Mapping):
        return []
    found = []
    for token_id, entry in listed.items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not token_id.isdecimal() or not isinstance(content, str) or not _is_unicode(content):
            raise Incompatible(
                "tokenizer_config.json lists an added token without an id or a text",
                key="added_tokens_decoder",
                id=token_id,
                entry=str(entry)[:80].encode("ascii", "backslashreplace").decode(),
            )
        found.append((int(token_id), entry))
    return sorted(found, key=lambda item: item[0])


def _add_special(backend: Backend, files: Mapping[str, bytes]) -> None:
    """Named tokens and the further special ones stay whole and are special, also those of the plain vocabulary."""
    tokens = list(_named(files).values())
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = json_of(files, name)
        more = content.get("extra_special_tokens") or content.get("additional_special_tokens") or []
        entries = more.values() if isinstance(more, Mapping) else more
        if not isinstance(entries, Iterable) or isinstance(entries, str):
            raise Incompatible(
                "additional_special_tokens are not a list of tokens", file=name, got=str(more)[:80]
            )
        tokens += [token for token in map(_special, entries) if token is not None]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([token for token in tokens if token.content not in known])
