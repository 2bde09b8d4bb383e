"""The ways of serving that must make no difference in deterministic mode, and how their answers are compared."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from pdserve.messages import Role
from pdserve.service.config import Config, EngineConfig
from tests.support.conversations import Script
from tests.support.torch_cluster import BLOCK_SIZE, Record, Shape, Shelf, play

AGGREGATED = (("b0", Role.BOTH),)
ONE_PAIR = (("p0", Role.PREFILL), ("d0", Role.DECODE))
NUM_BLOCKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to serve: tokens of a step, prefix cache, sequences of a step."""

    chunk: int
    hits: bool
    batch: int

    def shape(self, workers: tuple[tuple[str, Role], ...], **small_pools: int) -> Shape:
        """A cluster that serves so. small_pools: num_blocks of single workers."""
        engine = EngineConfig(
            deterministic=True, max_step_tokens=self.chunk, max_batch=self.batch, prefix_cache=self.hits
        )
        return Shape(
            config=Config(engine=engine), workers=workers, num_blocks=NUM_BLOCKS, small_pools=small_pools
        )

    def __str__(self) -> str:
        return f"chunks of {self.chunk}, {'hits' if self.hits else 'no hits'}, batch {self.batch}"


CELLS = [
    Cell(chunk=chunk, hits=hits, batch=batch)
    for chunk, hits, batch in product((64, 512), (False, True), (1, 16))
]


def serve(shelf: Shelf, shape: Shape, script: Script, at_once: int) -> Record:
    """Play a script; every answer must be whole."""
    record = play(shelf, shape, lambda cluster: script.play(cluster, at_once))
    assert [len(answer.token_ids) for answer in record.answers] == [script.max_tokens] * script.num_prompts
    assert record.num_conflicts == 0
    return record


def check(shelf: Shelf, cell: Cell, script: Script) -> None:
    """Disaggregated and aggregated clusters give equal tokens and bits, and are what the cell says."""
    aggregated = serve(shelf, cell.shape(AGGREGATED), script, cell.batch)
    disaggregated = serve(shelf, cell.shape(ONE_PAIR), script, cell.batch)
    assert_equal(disaggregated, aggregated)
    _assert_served_as_asked(cell, aggregated, disaggregated)


def assert_equal(got: Record, want: Record) -> None:
    """Equal tokens, sampled from equal bits."""
    assert got.tokens == want.tokens
    assert len(want.bits) > 0
    differing = [key for key in {**got.bits, **want.bits} if got.bits.get(key) != want.bits.get(key)]
    assert not differing, f"{len(differing)} of {len(want.bits)} rows of logits differ"


def _assert_served_as_asked(cell: Cell, aggregated: Record, disaggregated: Record) -> None:
    for largest in (aggregated.largest_batch["b0"], disaggregated.largest_batch["d0"]):
        assert cell.batch // 2 < largest <= cell.batch
    for longest in (aggregated.longest_row["b0"], disaggregated.longest_row["p0"]):
        assert cell.chunk // 2 < longest <= cell.chunk
    num_blocks = sum(-(-len(answer.prompt_ids) // BLOCK_SIZE) for answer in disaggregated.answers)
    if cell.hits:
        for record in (aggregated, disaggregated):
            assert sum(answer.num_cached for answer in record.answers) > 0
        assert 0 < disaggregated.received_blocks < num_blocks
    else:
        assert disaggregated.received_blocks == num_blocks
