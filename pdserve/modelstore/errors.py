"""What can go wrong while a model is fetched."""

from __future__ import annotations

from pdserve.errors import Code, PdserveError


class FetchFailed(PdserveError):
    """A model couldn't be fetched: network, package index, checksum or disk. The sentence says what to do."""

    code = Code.UNAVAILABLE
