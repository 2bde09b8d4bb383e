"""Addresses as users write them: HOST:PORT, IPv6 hosts in brackets; or a file that names some."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach HOST:PORT. Of names only "localhost" is known to be so."""
    host, _ = split_address(address)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def file_of(text: str) -> Path | None:
    """The file that "file:///etc/routers" names; None for anything else. Raises InvalidRequest for half such a URL."""
    if not text.startswith("file:"):
        return None
    url = urlsplit(text)
    path = Path(unquote(url.path))
    if not text.startswith("file://") or url.netloc or url.query or url.fragment or not path.name:
        raise InvalidRequest("a file must be file:///PATH", url=text)
    return path


def verify_address(text: str) -> str:
    """For settings: what it should be, or "" if it is a HOST:PORT."""
    try:
        split_address(text)
    except InvalidRequest:
        return "HOST:PORT"
    return ""


def verify_address_or_none(text: str) -> str:
    """The same for one that may be left out."""
    return verify_address(text) if text else ""
