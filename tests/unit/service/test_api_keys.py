"""API keys in their file: drawn, recognised, changed, and what a broken file is told."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest

from pdserve.service.api_keys import ApiKey, changed_keys, digest_of, draw_key, read_keys, recognise
from pdserve.service.file_watch import FileWatch
from pdserve.service.settings import ConfigError

KEY = ApiKey(tenant="acme", sha256="0" * 64, max_concurrent=3, admin=True)


def test_a_key_is_recognised_by_all_of_it_and_by_nothing_else() -> None:
    key_id, key = draw_key(random.Random(1))
    keys = {key_id: ApiKey(tenant="acme", sha256=digest_of(key))}
    assert recognise(key, keys) == key_id
    last = "0" if key[-1] != "0" else "1"
    for wrong in (
        "",
        key[:-1] + last,
        key + "0",
        key.upper(),
        key[4:],
        f"pdk_{'0' * 12}_{'0' * 40}",
        "x" * 10_000,
    ):
        assert recognise(wrong, keys) is None
    assert recognise(key, {}) is None
    other, _ = draw_key(random.Random(2))
    assert recognise(key, {other: keys[key_id]}) is None


def test_the_file_holds_no_key_and_is_this_users_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key_id, key = draw_key(random.Random(1))
    made = ApiKey(tenant="acme", sha256=digest_of(key), requests_per_minute=60, max_priority=-3)
    with changed_keys(file) as keys:
        keys[key_id] = made
    assert read_keys(file) == {key_id: made}
    assert key not in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600
    with changed_keys(file) as keys:
        keys["0" * 12] = KEY
    assert read_keys(file) == {key_id: made, "0" * 12: KEY}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[x]", "x must be a table named by 12 hexadecimal digits"),
        ("a = ", "not a TOML file"),
        (f'["{"0" * 12}"]\ntenant = "a"\nsha256 = "{"0" * 63}"', "sha256 must be 64 hexadecimal digits"),
        (f'["{"0" * 12}"]\nsha256 = "{"0" * 64}"', "tenant must be a name"),
        (f'["{"0" * 12}"]\ntenant = "a b"\nsha256 = "{"0" * 64}"', "tenant must be at most 64 characters"),
        (f'["{"0" * 12}"]\ntenant = "a"\nsha256 = "{"0" * 64}"\nmax_concurrent = -1', "at least 0"),
        (f'["{"0" * 12}"]\ntenant = "a"\nsha256 = "{"0" * 64}"\nlimit = 1', "unknown key limit"),
    ],
)
def test_a_broken_file_is_told_where(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as refused:
        read_keys(file)
    assert said in str(refused.value) and str(file) in str(refused.value)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch()
    file.chmod(0o620)
    with pytest.raises(ConfigError, match="others may write it"):
        read_keys(file)
    with pytest.raises(ConfigError, match="can't be read"):
        read_keys(tmp_path / "none")


def test_a_watch_sees_each_change_once(tmp_path: Path) -> None:
    file = tmp_path / "f"
    watch = FileWatch([file])
    assert not watch.has_changed()
    file.write_text("a")
    assert watch.has_changed() and not watch.has_changed()
    (tmp_path / "new").write_text("b")
    (tmp_path / "new").replace(file)
    assert watch.has_changed() and not watch.has_changed()
    file.unlink()
    assert watch.has_changed() and not watch.has_changed()
