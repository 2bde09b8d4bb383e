"""The settings of the HTTP door, a table of the configuration (config.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from pdserve.fields import setting
from pdserve.service.address import verify_address_or_none
from pdserve.service.settings import ConfigError, check_fields

_LIBRARIES = ("starlette", "uvicorn", "httptools")

TOOL_PARSERS = ("gemma", "hermes", "llama3_json", "mistral", "phi4", "pythonic")
REASONING_PARSERS = ("mistral", "think")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """HTTP for clients that speak OpenAI's way: of a router, or of a gateway."""

    listen: str = setting(
        "",
        "address where HTTP clients reach it; port 0 = a free one; empty = no HTTP, but for `up` and `gateway`",
        verify=verify_address_or_none,
    )
    max_body_bytes: int = setting(
        4 << 20, "largest body of a request", unit="bytes", least=1 << 16, most=1 << 30
    )
    unknown_fields: str = setting(
        "ignore", "what happens to fields of a request that nobody knows", choices=("ignore", "refuse")
    )

    tool_parser: str = setting(
        "auto",
        "how the model writes tool calls; auto = by its chat template",
        choices=("auto", "none", *TOOL_PARSERS),
    )
    reasoning_parser: str = setting(
        "auto",
        "how it writes to itself before it answers; auto = by its chat template",
        choices=("auto", "none", *REASONING_PARSERS),
    )

    def __post_init__(self) -> None:
        check_fields("http", self)


def has_http() -> bool:
    """Whether the libraries of the HTTP door are installed: they are an extra."""
    return all(find_spec(name) is not None for name in _LIBRARIES)


@contextlib.contextmanager
def http_extra(who: str) -> Iterator[None]:
    """For the import of the HTTP door. Raises ConfigError where its libraries aren't installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES:
            raise
        raise ConfigError(f"{who} needs the extra http: pip install 'pdserve[http]'") from error
