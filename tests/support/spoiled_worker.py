"""`pdserve decode` in which something breaks in mid-stream: a process as any other, but for the core of its role.

python -m tests.support.spoiled_worker WHAT <flags of `pdserve decode`>
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable

from decode_worker.core import DecodeCore
from pdserve.cli.settings import WORKER, add_settings, read_settings
from pdserve.messages import Role
from pdserve.node.process import run_worker
from pdserve.worker.messages import ToSession
from pdserve.worker.role import CoreParts

NUM_STREAMS = 4  # that must be here
AFTER_TOKENS = 40


class SpoiledCore(DecodeCore):
    """Once all streams are here and so many tokens are out, and while somebody waits for more."""

    def __init__(self, parts: CoreParts, spoil: Callable[[SpoiledCore], None]) -> None:
        super().__init__(parts)
        self.parts = parts
        self._spoil: Callable[[SpoiledCore], None] | None = spoil

    def step(self) -> float | None:
        is_time = self._desk.num_generated_tokens >= AFTER_TOKENS and len(self.attempts) == NUM_STREAMS
        if self._spoil is not None and is_time and self.oldest_blocks:
            spoil, self._spoil = self._spoil, None
            spoil(self)
        return super().step()

    @property
    def oldest_blocks(self) -> list[int]:
        return next((attempt.seq.block_table for attempt in self.attempts if attempt.seq.block_table), [])

    @property
    def oldest_session(self) -> int:
        return self.attempts[0].session_id


def _block_of_two(core: SpoiledCore) -> None:
    core.parts.engine.pool._free.insert(
        0, core.oldest_blocks[0]
    )  # the last to be given: the check comes before


def _block_of_nobody(core: SpoiledCore) -> None:
    core.parts.engine.pool.grant(1)


def _engine_bug(core: SpoiledCore) -> None:
    raise RuntimeError("a bug in the engine's owner")


def _links_bug(core: SpoiledCore) -> None:
    core.parts.to_transfer("not a message")


def _session_bug(core: SpoiledCore) -> None:
    core.parts.to_loop(ToSession(core.oldest_session, "not a message"))  # type: ignore[arg-type]


def _loop_bug(core: SpoiledCore) -> None:
    core.parts.to_loop("not a message")


SPOILS = {
    "block-of-two": _block_of_two,
    "block-of-nobody": _block_of_nobody,
    "engine": _engine_bug,
    "links": _links_bug,
    "session": _session_bug,
    "loop": _loop_bug,
}


def main(words: list[str]) -> int:
    """Returns the worker's exit code."""
    spoil = SPOILS[words[0]]
    parser = argparse.ArgumentParser()
    add_settings(parser, WORKER)
    config = read_settings(parser.parse_args(words[1:]), WORKER)
    roles = {Role.DECODE: lambda parts: SpoiledCore(parts, spoil)}
    return asyncio.run(run_worker(config, Role.DECODE, roles)) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
