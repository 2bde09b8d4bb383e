"""What moving real blocks over one pair told: the answer of Admin.ProbePair, in and out of protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.rpc.codec import compile_converter
from pdserve.rpc.v1 import admin_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProbe:
    """One hand-off of a prompt that nobody has in a cache.

    transfer_s  in which its KV arrived
    ttft_s      received to first token, the prefill included
    """

    num_prompt_tokens: int
    num_kv_bytes: int
    transfer_s: float
    ttft_s: float
    transport: str


PAIR_PROBE = compile_converter(PairProbe, pb.ProbePairResponse)
