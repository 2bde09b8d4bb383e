"""The file of API keys while the router runs: what it says counts from a few seconds after it was changed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import structlog

from pdserve.service.api_keys import ApiKey, read_keys
from pdserve.service.file_watch import LOOK_EVERY_S, FileWatch
from pdserve.service.settings import ConfigError
from router.callers import Callers

log = structlog.get_logger()


class KeysFollower:
    """Made before the loop runs: reads the file. Raises ConfigError."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._watch = FileWatch([file])
        self.keys: Mapping[str, ApiKey] = read_keys(file)

    async def run(self, callers: Callers) -> None:
        """Until cancelled. A file that can't be read changes nothing, and is told once."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                keys = await asyncio.to_thread(self._read_if_changed)
            except ConfigError as error:
                log.error("keys.unreadable", error=str(error))
                continue
            if keys is not None:
                self.keys = keys
                callers.replace(keys)
                log.info("keys.changed", num_keys=len(keys))

    def _read_if_changed(self) -> Mapping[str, ApiKey] | None:
        return read_keys(self._file) if self._watch.has_changed() else None
