"""What can go wrong with a model while it is fetched or read."""

from __future__ import annotations

from pdserve.errors import Code, Incompatible, PdserveError


class FetchFailed(PdserveError):
    """A model couldn't be fetched: network, package index, checksum or disk. The sentence says what to do."""

    code = Code.UNAVAILABLE


class BadModel(Incompatible):
    """A model folder that can't be served: the message names the file, tensor or key, and what was expected."""
