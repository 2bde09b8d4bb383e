"""The cluster secret: read from a file, proven by HMAC over nonces of both sides, never sent."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from pdserve.ids import Random
from pdserve.service.settings import ConfigError

MIN_SECRET_BYTES = 32
NONCE_BYTES = 32


def read_secret(path: str) -> bytes | None:
    """The secret in `cluster.secret_file`; None if the path is empty. White space around it doesn't count.

    Raises ConfigError; blocks on a file read, so only at start.
    """
    if not path:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cluster.secret_file {path}: can't be read: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"cluster.secret_file {path}: must hold at least {MIN_SECRET_BYTES} bytes, got {len(secret)}"
        )
    return secret


def draw_nonce(source: Random) -> bytes:
    """32 random bytes."""
    return source.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")


def prove(secret: bytes, role: str, *parts: bytes | str) -> bytes:
    """HMAC-SHA256 over the role of the prover, both nonces, ids and epochs; each part behind its length.

    The role keeps a proof from being sent back to the side that made it.
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (role, *parts):
        octets = part.encode() if isinstance(part, str) else part
        mac.update(len(octets).to_bytes(4, "little") + octets)
    return mac.digest()


def proves(proof: bytes, secret: bytes, role: str, *parts: bytes | str) -> bool:
    """Whether `proof` is what `prove` makes; in constant time."""
    return hmac.compare_digest(proof, prove(secret, role, *parts))
