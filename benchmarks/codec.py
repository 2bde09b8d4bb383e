"""`make bench-codec`: what messages between processes cost in Python: the most frequent ones of a session and a link.

Write: our message to bytes. Read: bytes to our message. The quietest of 15 rounds, in microseconds a message; one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kv_transfer import frames
from kv_transfer.framing import HEADER_BYTES, encode, parse_body, parse_header
from pdserve import messages as m
from pdserve.clock import SystemClock
from pdserve.ids import Epoch, WorkerRef
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.sampling import SampleKey, SamplingParams, TokenLogprobs

_ROUNDS = 15
_ROUND_S = 0.05

STEP = m.Step(tuple(m.StepTokens(2**63 + n, 500 + n, (1000 + n,)) for n in range(32)))
SCORED = m.Step(
    tuple(
        m.StepTokens(2**63 + n, 500 + n, (1000 + n,), (TokenLogprobs(-0.5, ((7, -0.5), (9, -2.0))),))
        for n in range(32)
    )
)
START = m.StartDecode(
    handle=2**63,
    token_ids=tuple(range(1000)),
    num_prompt_tokens=1000,
    key=SampleKey(
        params=SamplingParams(max_tokens=100), seed=1, choice=0, eos_token_ids=(2,), max_tokens=100
    ),
    deadline_left_s=60.0,
    num_strikes=0,
    source=WorkerRef("prefill-0", Epoch(1, 2)),
)
PROGRESS = m.Progress(2**63, m.Phase.RUNNING, 17)
PULL = frames.Pull(2**63, tuple(frames.PulledPiece(n, n, 0, 262_144) for n in range(64)))
READY = frames.Ready(2**63, 12)


def _per_call_us(call: Callable[[], object]) -> float:
    clock = SystemClock()
    num_calls = 1
    while True:
        began_s = clock.now_s()
        for _ in range(num_calls):
            call()
        took_s = clock.now_s() - began_s
        if took_s >= _ROUND_S:
            break
        num_calls *= 2
    rounds = []
    for _ in range(_ROUNDS):
        began_s = clock.now_s()
        for _ in range(num_calls):
            call()
        rounds.append((clock.now_s() - began_s) / num_calls)
    return min(rounds) * 1e6


def _session(
    name: str, kind: Any, write: Callable[[Any], Any], read: Callable[[Any], Any], message: Any
) -> str:
    octets = write(message).SerializeToString()
    assert read(kind.FromString(octets)) == message
    written = _per_call_us(lambda: write(message).SerializeToString())
    seen = _per_call_us(lambda: read(kind.FromString(octets)))
    return f"{name:<28} {len(octets):>7} {written:>9.1f} {seen:>9.1f}"


def _link(name: str, frame: frames.Frame) -> str:
    octets = encode(frame, 1)

    def read() -> frames.Frame | None:
        return parse_body(parse_header(octets[:HEADER_BYTES]), octets[HEADER_BYTES:])

    assert read() == frame
    return f"{name:<28} {len(octets):>7} {_per_call_us(lambda: encode(frame, 1)):>9.1f} {_per_call_us(read):>9.1f}"


def main() -> None:
    """Print the table."""
    lines = [f"{'message':<28} {'bytes':>7} {'write µs':>9} {'read µs':>9}"]
    for name, up in (
        ("Step, 32 sequences", STEP),
        ("the same with logprobs", SCORED),
        ("Progress", PROGRESS),
    ):
        lines.append(_session(name, pb.Up, convert.up_to_proto, convert.up_from_proto, up))
    lines.append(
        _session("StartDecode, 1000 ids", pb.Down, convert.down_to_proto, convert.down_from_proto, START)
    )
    lines += [_link("READY", READY), _link("PULL, 64 pieces", PULL)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
