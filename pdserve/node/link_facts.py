"""What a worker tells of itself in the handshake of a link."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.link_facts import STREAM, LinkFacts
from kv_transfer.transports.cuda_ipc_port import CUDA_IPC
from kv_transfer.transports.nccl_port import NCCL
from kv_transfer.transports.staging import StagedPool
from pdserve.kv_memory import KvMemory
from pdserve.node.ports import WorkerSetup
from pdserve.wire_version import announced


def link_facts(setup: WorkerSetup, pool: KvMemory, role_generation: int) -> LinkFacts:
    """Of a worker in this role generation. pool: as its links see it. Transports: those of the configuration that it
    can go over; a process whose device can't be used by them doesn't start. Memory is passed in one way only."""
    runner = setup.model.runner
    card = runner.card
    wire = announced(setup.config.cluster.wire_minor)
    kinds = setup.config.transport.kinds
    transports = tuple(kind for kind in kinds if _may_go_over(kind, kinds, pool))
    return LinkFacts(
        layout_json=runner.layout.wire_json(),
        weights_fingerprint=card.weights_fingerprint,
        tokenizer_fingerprint=setup.model.tokenizer_fingerprint,
        numerics=card.numerics,
        checksum=next(iter(pool.checksums), "none"),
        checksums=pool.checksums if wire >= (1, 1) else None,
        transports=transports if wire >= (1, 1) else None,
        deterministic=card.deterministic,
        wire=wire,
        role_generation=role_generation,
    )


def _may_go_over(kind: str, kinds: Sequence[str], pool: KvMemory) -> bool:
    if kind == STREAM:
        return pool.device == "cpu" or isinstance(
            pool, StagedPool
        )  # its bytes go through sockets of the host
    if kind in (NCCL, CUDA_IPC):
        return True
    return CUDA_IPC not in kinds and pool.export(kind) is not None
