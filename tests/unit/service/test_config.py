"""Where each value comes from, and what a wrong one is answered."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Code
from pdserve.service.config import (
    SETTINGS,
    Config,
    EngineConfig,
    TimeoutsConfig,
    TransportConfig,
    add_flags,
    flags_of,
    load,
)
from pdserve.service.settings import ConfigError, Setting, shown
from tests.support.readme import markdown_table


def write(folder: Path, text: str) -> Path:
    path = folder / "pdserve.toml"
    path.write_text(text)
    return path


def test_defaults_are_valid_and_complete() -> None:
    effective = Config().effective()
    assert list(effective) == [key.name for key in SETTINGS]
    assert effective["timeouts.link_s"] == 4.0
    assert effective["transport.kinds"] == ["memfd", "stream"]
    assert load() == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[timeouts]\nlink_s = 4.1\nlease_s = 5.1\nhandoff_s = 6.1\n[worker]\nrouters = ["a:1"]\n'
    )
    environ = {"PDSERVE_TIMEOUTS__LEASE_S": "5.2", "PDSERVE_TIMEOUTS__HANDOFF_S": "6.2", "HOME": "/root"}
    config = load(file, environ, {"timeouts.handoff-s": "6.3", "engine.threads": 2, "worker.id": "w0"})
    assert (config.timeouts.link_s, config.timeouts.lease_s, config.timeouts.handoff_s) == (4.1, 5.2, 6.3)
    assert config.worker.routers == ("a:1",)
    assert (config.engine.threads, config.worker.id) == (2, "w0")


def test_an_integer_will_do_for_seconds(tmp_path: Path) -> None:
    config = load(write(tmp_path, "[timeouts]\nrequest_s = 60\n"))
    assert config.timeouts.request_s == 60.0
    assert isinstance(config.timeouts.request_s, float)


FILES = [
    ("[timeout]\nlink_s = 4\n", r"unknown table \[timeout\]; the nearest known one is timeouts"),
    ("[timeouts]\nlnk_s = 4\n", r"unknown key timeouts.lnk_s; the nearest known one is timeouts.link_s"),
    ("timeouts = 4\n", "timeouts must be a table"),
    ("[timeouts]\nlink_s = '4'\n", "timeouts.link_s must be a number, got '4'"),
    ("[timeouts]\nlink_s = nan\n", "timeouts.link_s must be a number, got nan"),
    ("[timeouts]\nlink_s = -1\n", "timeouts.link_s must be 0.001 to 86400, got -1.0"),
    ("[timeouts]\nlink_s = 1\n", r"2\*keepalive_s < link_s"),
    ("[engine]\nthreads = true\n", "engine.threads must be a whole number, got True"),
    ("[engine]\nthreads = 1.5\n", "engine.threads must be a whole number, got 1.5"),
    ("[engine]\nblock_size = 12\n", "engine.block_size must be a power of two, got 12"),
    ("[engine]\nkind = 'cuda'\n", "engine.kind must be one of torch, fake, got 'cuda'"),
    ("[engine]\nprefix_cache = 1\n", "engine.prefix_cache must be true or false, got 1"),
    ("[worker]\nrouters = 'a:1'\n", "worker.routers must be a list of texts"),
    ("[worker]\nrouters = [1]\n", "worker.routers must be a list of texts"),
    ("[worker]\nrouters = ['a']\n", r"worker.routers must be HOST:PORT or file:///PATH each, got \('a',\)"),
    ("[worker]\nid = 'a b'\n", "worker.id must be at most 64 characters"),
    ("[router]\nlisten = '1.2.3.4:x'\n", "router.listen must be HOST:PORT"),
    ("[transport]\nkinds = []\n", "at least one transport"),
    ("[transport]\npull_window_bytes = 4096\n", "piece_bytes .* must not exceed"),
    ("[router\n", "not a TOML file"),
]


@pytest.mark.parametrize(("text", "said"), FILES, ids=[said for _, said in FILES])
def test_a_wrong_file_is_answered_with_where_and_what(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(write(tmp_path, text))
    assert "\n" not in str(caught.value).replace("\\n", "") or "TOML" in str(caught.value)
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: can't be read: No such file"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PDSERVE_LINK_S": "4"}, "unknown variable PDSERVE_LINK_S; .*PDSERVE_TIMEOUTS__LINK_S"),
        ({"PDSERVE_TIMEOUTS__LINK": "4"}, "nearest known one is PDSERVE_TIMEOUTS__LINK_S"),
        (
            {"PDSERVE_ENGINE__THREADS": "two"},
            "PDSERVE_ENGINE__THREADS: engine.threads must be a whole number, got 'two'",
        ),
        ({"PDSERVE_ENGINE__DETERMINISTIC": "yes"}, "must be true or false, got 'yes'"),
    ],
)
def test_a_wrong_variable(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, environ)


def test_the_model_store_keeps_its_variable() -> None:
    assert load(None, {"PDSERVE_CACHE_DIR": "/x"}) == Config()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"engine.treads": 1}, "unknown setting engine.treads; the nearest known one is engine.threads"),
        ({"engine.threads": "x"}, "flag --engine.threads: engine.threads must be a whole number"),
        ({"engine.threads": 1.5}, "must be a whole number, got 1.5"),
    ],
)
def test_a_wrong_flag(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, None, flags)


def test_flags_are_made_for_every_key() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given_flags = [
        "--timeouts.link-s",
        "4.5",
        "--worker.routers",
        "a:1, b:2",
        "--engine.deterministic",
        "true",
    ]
    config = load(None, None, flags_of(parser.parse_args(given_flags)))
    assert config.timeouts.link_s == 4.5
    assert config.worker.routers == ("a:1", "b:2")
    assert config.engine.deterministic is True
    for key in SETTINGS:
        assert key.flag in parser.format_help()


def test_components_built_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"engine.threads must be at least 0"):
        EngineConfig(threads=-1)
    with pytest.raises(ConfigError, match="order"):
        TimeoutsConfig(link_s=5.5)
    with pytest.raises(ConfigError, match="one of cuda_ipc, memfd, nccl, stream"):
        TransportConfig(kinds=("carrier_pigeon",))


def test_the_documentation_table_has_every_key() -> None:
    table = markdown_table()
    for key in SETTINGS:
        assert f"| `{key.name}` | `{shown(key.default)}` |" in table
        assert key.spec.doc


def _texts(key: Setting) -> st.SearchStrategy[Any]:
    kinds: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-10, 1 << 33),
        float: st.floats(),
        str: st.text(max_size=8),
        tuple: st.lists(st.text(max_size=8), max_size=2).map(tuple),
    }
    return st.one_of(*kinds.values())


@given(st.data())
def test_any_value_is_taken_or_refused_by_name(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(SETTINGS))
    value = data.draw(_texts(key))
    said = ""
    try:
        taken = key.check(value, "test")
    except ConfigError as error:
        said = str(error)
    assert key.name in said or type(taken) is key.kind
