"""Text of the command line."""

from __future__ import annotations

from pdserve.errors import InvalidRequest


def unicode_of(text: str, where: str) -> str:
    """Text of the command line that is not UTF-8 arrives with surrogates, which can't be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{where} is not valid UTF-8") from None
    return text
