"""Network addresses as users write them: HOST:PORT, IPv6 hosts in brackets."""

from __future__ import annotations

from pdserve.errors import InvalidRequest


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:50051" or "[::1]:0". Raises InvalidRequest naming the text."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or (":" in host and not bracketed):
        raise InvalidRequest("an address must be HOST:PORT", address=text)
    if int(port) > 65535:
        raise InvalidRequest("a port must be at most 65535", address=text)
    return (host[1:-1] if bracketed else host), int(port)


def join_address(host: str, port: int) -> str:
    """The text form; puts IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
