"""`pdserve keys`: the API keys of a router's `router.keys_file`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pdserve.service.api_keys import LIMITS, SETTINGS, ApiKey, changed_keys, digest_of, draw_key, read_keys
from pdserve.service.settings import ConfigError

DESCRIPTION = """\
Adds, lists and revokes API keys in a router's keys file (router.keys_file), which keeps their digests and limits,
never a key. A running router takes over what has changed within seconds. `add` prints the new key, which can't be
shown again; clients give it in PDSERVE_API_KEY. Keys of one tenant see and abort each other's requests, and nobody
else's; an admin's key those of all.
"""
_FILE_VARIABLE = "PDSERVE_ROUTER__KEYS_FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, in which file."""
    actions = parser.add_subparsers(dest="action", metavar="add|list|revoke", required=True)
    add = actions.add_parser("add", help="make a key, and print it once")
    by_name = {key.key: key for key in SETTINGS}
    add.add_argument("--tenant", required=True, metavar="T", help=by_name["tenant"].doc)
    add.add_argument("--admin", action="store_true", help=by_name["admin"].doc)
    for limit in LIMITS:
        flag = f"--{limit.key.replace('_', '-')}"
        add.add_argument(flag, dest=limit.key, metavar="N", help=f"{limit.doc} (default {limit.default})")
    revoke = actions.add_parser("revoke", help="no longer accept a key")
    revoke.add_argument("id", metavar="ID", help="as `pdserve keys list` shows it, or the key itself")
    for action in (add, actions.add_parser("list", help="ids, tenants and limits"), revoke):
        action.add_argument(
            "--file", type=Path, metavar="F.toml", help=f"the keys file (default: {_FILE_VARIABLE})"
        )


def run(arguments: argparse.Namespace) -> int:
    """Do it. Raises ConfigError."""
    file = arguments.file or Path(os.environ.get(_FILE_VARIABLE, ""))
    if file == Path():
        raise ConfigError(f"which keys file? give --file F.toml, or set {_FILE_VARIABLE}")
    match arguments.action:
        case "add":
            _add(file, arguments)
        case "revoke":
            _revoke(file, arguments.id)
        case _:
            _list(file)
    return 0


def _add(file: Path, arguments: argparse.Namespace) -> None:
    from pdserve.ids import system_random

    by_name = {key.key: key for key in SETTINGS}
    tenant = by_name["tenant"].check(arguments.tenant, "command line")
    texts = {limit.key: getattr(arguments, limit.key) for limit in LIMITS}
    limits = {
        name: by_name[name].read(text, "command line") for name, text in texts.items() if text is not None
    }
    key_id, key = draw_key(system_random())
    made = ApiKey(tenant=tenant, sha256=digest_of(key), admin=arguments.admin, **limits)  # type: ignore[arg-type]
    with changed_keys(file) as keys:
        keys[key_id] = made
    print(key)


def _revoke(file: Path, given: str) -> None:
    key_id = given.split("_")[1] if given.count("_") == 2 else given
    with changed_keys(file) as keys:
        if key_id not in keys:
            raise ConfigError(f"{file}: no key has the id {key_id}; `pdserve keys list` shows them")
        revoked = keys.pop(key_id)
    print(f"{key_id} of {revoked.tenant} is revoked")


def _list(file: Path) -> None:
    for key_id, key in read_keys(file).items():
        limits = [f"{limit.key}={value}" for limit in LIMITS if (value := getattr(key, limit.key))]
        print("  ".join((key_id, key.tenant, *(["admin"] if key.admin else []), *limits)))
