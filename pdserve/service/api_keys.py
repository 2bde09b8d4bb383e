"""API keys: drawn, kept as digests in a TOML file, recognised.

A key is "pdk_ID_SECRET". The file has a table for each, named by the id, with the SHA-256 of the whole key: it is 160
random bits, so a slow hash would add nothing, and the file tells nobody a key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.fields import plain_id, setting
from pdserve.ids import Random
from pdserve.service.settings import ConfigError, settings_of, shown

_KEY = re.compile(r"pdk_([0-9a-f]{12})_[0-9a-f]{40}")
_ID = re.compile(r"[0-9a-f]{12}")
_MAX_KEY_CHARACTERS = 200
_NO_DIGEST = "0" * 64


def _tenant(text: str) -> str:
    return plain_id(text) if text else "a name"


def _digest(text: str) -> str:
    return "" if re.fullmatch(r"[0-9a-f]{64}", text) else "64 hexadecimal digits"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What the file says of one key."""

    tenant: str = setting("", "whose it is: keys of one tenant see each other's requests", verify=_tenant)
    sha256: str = setting("", "digest of the key", verify=_digest)
    admin: bool = setting(False, "it sees and aborts the requests of all tenants, and may change workers")
    requests_per_minute: int = setting(0, "calls a minute, that many at once; 0 = any number", least=0)
    tokens_per_minute: int = setting(
        0, "tokens a minute, of prompts and answers, that many at once; 0 = any number", least=0
    )
    max_concurrent: int = setting(0, "generations at a time; 0 = any number", least=0)
    max_priority: int = setting(
        0, "the highest priority that its requests may ask for", least=-1000, most=1000
    )


SETTINGS = settings_of("keys", ApiKey)
LIMITS = tuple(key for key in SETTINGS if key.kind is int)


def draw_key(random: Random) -> tuple[str, str]:
    """A new one: its id, and the key itself, which nobody sees again."""
    key_id = f"{random.getrandbits(48):012x}"
    return key_id, f"pdk_{key_id}_{random.getrandbits(160):040x}"


def digest_of(key: str) -> str:
    """What the file keeps of it."""
    return hashlib.sha256(key.encode()).hexdigest()


def recognise(key: str, keys: Mapping[str, ApiKey]) -> str | None:
    """The id of a key that is in the file, or None; takes the same time whether its id, or its secret, is wrong."""
    found = _KEY.fullmatch(key[:_MAX_KEY_CHARACTERS])
    key_id = found[1] if found else ""
    known = keys.get(key_id)
    wanted = _NO_DIGEST if known is None else known.sha256
    return key_id if hmac.compare_digest(digest_of(key[:_MAX_KEY_CHARACTERS]), wanted) else None


def read_keys(file: Path) -> dict[str, ApiKey]:
    """All keys by id. Raises ConfigError; blocks on a file read."""
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"{file}: others may write it: chmod go-w {file}")
            tables = tomllib.load(opened)
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a TOML file: {error}") from error
    return {key_id: _read_key(key_id, table, str(file)) for key_id, table in tables.items()}


def _read_key(key_id: str, table: object, source: str) -> ApiKey:
    if not _ID.fullmatch(key_id) or not isinstance(table, dict):
        raise ConfigError(f"{source}: {key_id} must be a table named by 12 hexadecimal digits")
    where = f"{source}: [{key_id}]"
    known = {key.key: key for key in SETTINGS}
    for name in table:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name}; known are {', '.join(known)}")
    values = {name: key.check(table.get(name, key.default), where) for name, key in known.items()}
    return ApiKey(**values)  # type: ignore[arg-type]  # each was checked to be of its field's type


@contextlib.contextmanager
def changed_keys(file: Path) -> Iterator[dict[str, ApiKey]]:
    """The keys, to be changed in the block and written back in one step; one such block at a time.

    A file that isn't there has none. Raises ConfigError.
    """
    try:
        folder = os.open(file.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{file}: its folder can't be opened: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = read_keys(file) if file.exists() else {}
        yield keys
        _write(file, keys)
    finally:
        os.close(folder)


def _write(file: Path, keys: Mapping[str, ApiKey]) -> None:
    tables = []
    for key_id, key in keys.items():
        rows = [f"{name} = {shown(value)}" for name, value in dataclasses.asdict(key).items()]
        tables.append("\n".join((f'["{key_id}"]', *rows, "")))
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.unlink(missing_ok=True)
        with open(
            os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as opened:
            opened.write("\n".join(tables))
        scratch.replace(file)
    except OSError as error:
        raise ConfigError(f"{file}: can't be written: {error.strerror}") from error
