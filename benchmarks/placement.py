"""What it costs the router's thread to place one request: microseconds of CPU, by the size of the cluster.

    python -m benchmarks.placement [--placements 300]

Every worker has another load and holds another part of an 8,000-token prompt; or all of them hold the whole of it, the
dearest case, because the prefix of each candidate is walked through.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import cast

from pdserve.block_messages import BlockCounts
from pdserve.blockhash import hash_blocks
from pdserve.clock import SystemClock, thread_cpu_s
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import Down, Hello, Load, Role, Up
from pdserve.session import Session
from router.attempt_need import Need
from router.identity import ModelIdentity
from router.liveness import Liveness
from router.member import Member, PairRecord
from router.placement import NotNow, Placer
from router.topology import Topology

SIZES = ((1, 1), (4, 4), (8, 8), (16, 16), (50, 50))
BLOCK_SIZE = 16
NUM_TOKENS = 8_000


class Silent:
    """A session on which nothing is said."""

    peer = "nobody"


def member(name: str, role: Role, number: int, drawn: random.Random) -> Member:
    hello = Hello(
        worker=WorkerRef(name, Epoch(1, number)),
        role=role,
        role_generation=0,
        model="m",
        kv_addresses=(),
        transports=("stream",),
        metrics_address="",
        kv_layout_json="{}",
        block_size=BLOCK_SIZE,
        num_blocks=4_000,
        window_tokens=16_384,
        weights_fingerprint="w",
        tokenizer_fingerprint="t",
        numerics="n",
        deterministic=False,
        cache_seed=b"seed",
        eos_token_ids=(0,),
        vocab_size=32_000,
        host_id=f"h{number % 8}",
    )
    made = Member(cast("Session[Down, Up]", Silent()), hello, Liveness(0.0, 1e9, 1e9), joined_s=0.0)
    made.credit.balance = 1 << 20
    made.accounting.load = Load(
        blocks=BlockCounts(3_000, 1_000, 0, 0, 0),
        num_running=drawn.randrange(16),
        num_waiting=0,
        num_queued_tokens=drawn.randrange(4_000),
        num_queued_short_tokens=0,
        chunk_tokens=512,
        num_cache_hit_tokens=0,
        num_cache_query_tokens=0,
        prefill_tokens_per_s=2_000.0 + drawn.randrange(500),
        step_s=0.02,
        slowest_step_s=0.05,
        draining=False,
    )
    return made


def cluster(num_prefills: int, num_decodes: int, hashes: Sequence[bytes], everywhere: bool) -> Topology:
    """All pairs up."""
    drawn = random.Random(1)
    prefills = [member(f"p{n}", Role.PREFILL, n, drawn) for n in range(num_prefills)]
    decodes = [member(f"d{n}", Role.DECODE, n, drawn) for n in range(num_decodes)]
    for each in (*prefills, *decodes):
        each.cache.sent(hashes[: len(hashes) if everywhere else drawn.randrange(len(hashes) // 8)])
    for prefill in prefills:
        prefill.pairs.update({d.id: PairRecord(d.ref, up=True, transport="stream") for d in decodes})
    return Topology({each.id: each for each in (*prefills, *decodes)}, allow_local_prefill=False)


def needs(identity: ModelIdentity, num: int) -> Iterator[Need]:
    for _ in range(num):
        yield Need(identity=identity, token_ids=TOKEN_IDS, max_total_tokens=NUM_TOKENS + 100)


TOKEN_IDS = tuple(random.Random(2).choices(range(1, 32_000), k=NUM_TOKENS))


def measure(num_prefills: int, num_decodes: int, everywhere: bool, num_placements: int) -> list[float]:
    """CPU microseconds of each placement, the prompt's hashes computed before."""
    hashes = hash_blocks(TOKEN_IDS, BLOCK_SIZE, seed=b"seed", salt="")
    topology = cluster(num_prefills, num_decodes, hashes, everywhere)
    placer = Placer(topology, SystemClock(), random.Random(3))
    first = topology.members[0]
    taken = []
    for need in needs(ModelIdentity.of(first.hello), num_placements):
        need.hashes(first)
        begin_s = thread_cpu_s()
        placed = placer.place(need)
        taken.append((thread_cpu_s() - begin_s) * 1e6)
        assert not isinstance(placed, NotNow)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--placements", type=int, default=300, help="of each size (default 300)")
    arguments = parser.parse_args()
    print(f"{'workers':12}{'prefix':14}{'median µs':>10}{'p90':>8}{'max':>8}")
    for (num_prefills, num_decodes), everywhere in [(s, e) for s in SIZES for e in (False, True)]:
        taken = sorted(measure(num_prefills, num_decodes, everywhere, arguments.placements))
        print(
            f"{f'{num_prefills}P × {num_decodes}D':12}{'everywhere' if everywhere else 'in part':14}"
            f"{statistics.median(taken):10.0f}{taken[int(len(taken) * 0.9)]:8.0f}{taken[-1]:8.0f}"
        )


if __name__ == "__main__":
    main()
