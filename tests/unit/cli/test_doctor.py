"""`pdserve doctor`: what it makes of a router's status and of the blocks that it has moved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pdserve.block_messages import BlockCounts
from pdserve.cli.doctor import compare
from pdserve.cli.main import main
from pdserve.errors import KvCorrupt
from pdserve.rpc.v1 import admin_pb2
from pdserve.service.config import TimeoutsConfig
from pdserve.status import ClusterStatus, QueueStatus, WorkerStatus
from tests.unit.cli.scripted_router import ScriptedRouter

OWN = TimeoutsConfig().seconds


def worker(name: str, role: str, timeouts: Mapping[str, float] = OWN, wire: str = "1.2") -> WorkerStatus:
    return WorkerStatus(
        id=name,
        role=role,
        epoch="1",
        role_generation=1,
        state="up",
        blocks=BlockCounts(10, 0, 0, 0, 0),
        num_running=0,
        num_waiting=0,
        num_queued_tokens=0,
        num_cache_hit_tokens=0,
        num_cache_query_tokens=0,
        metrics_address="",
        numerics="float32",
        num_steps=1,
        wire=wire,
        timeouts=timeouts,
    )


SOUND = ClusterStatus(
    router_id="r",
    draining=False,
    workers=(worker("p0", "prefill"), worker("d0", "decode")),
    pairs=(),
    queue=QueueStatus(num_waiting=0, num_waiting_tokens=0, num_running=0, limit=8),
    timeouts=OWN,
)


def lines(status: ClusterStatus) -> list[str]:
    return [f"{each.verdict} {each.subject}: {each.said}" for each in compare(status)]


def test_a_sound_cluster() -> None:
    assert lines(SOUND) == [
        "ok p0: prefill, up",
        "ok d0: decode, up",
        "ok wire version: 1.2 everywhere",
        "ok numerics: float32 everywhere",
        "ok time-outs of links: keepalive_s 1, link_s 4, lease_s 5 everywhere",
        "ok time-outs: in order across router and workers",
    ]


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (replace(SOUND, draining=True), "FAIL router r: it drains"),
        (replace(SOUND, workers=SOUND.workers[:1]), "FAIL router r: no worker that decodes has joined"),
        (replace(SOUND, workers=()), "FAIL router r: no worker that prefills has joined"),
        (
            replace(SOUND, workers=(replace(SOUND.workers[0], state="hung"), SOUND.workers[1])),
            "FAIL p0: prefill, hung",
        ),
        (
            replace(SOUND, workers=(replace(SOUND.workers[0], blocks=BlockCounts(1, 0, 0, 0, 3)),)),
            "note p0: 3 blocks are quarantined",
        ),
        (
            replace(SOUND, workers=(SOUND.workers[0], worker("d0", "decode", wire="1.1"))),
            "note wire version: 1.1 on d0; 1.2 on p0",
        ),
        (
            replace(SOUND, workers=(SOUND.workers[0], worker("d0", "decode", {**OWN, "lease_s": 7.0}))),
            "FAIL time-outs: d0's links and the router's requests must keep the order 2*keepalive_s < link_s < lease_s "
            "< handoff_s < token_gap_s, got 2*1, 4, 7, 6, 10",
        ),
        (
            replace(SOUND, workers=(SOUND.workers[0], worker("d0", "decode", {**OWN, "lease_s": 5.5}))),
            "note time-outs of links: keepalive_s 1, link_s 4, lease_s 5 on p0; "
            "keepalive_s 1, link_s 4, lease_s 5.5 on d0",
        ),
        (
            replace(SOUND, workers=tuple(replace(each, timeouts={}) for each in SOUND.workers)),
            "note time-outs: an older version doesn't tell them",
        ),
    ],
)
def test_what_is_wrong_or_worth_knowing(status: ClusterStatus, wanted: str) -> None:
    assert wanted in lines(status)


def test_blocks_are_moved_over_every_pair_that_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedRouter() as router:
        assert main(["doctor", "--target", router.target, "--tokens", "40"], {}) == 1
        assert [(each.prefill_worker, each.num_tokens) for each in _probes(router)] == [
            ("prefill-0", 1),
            ("prefill-0", 40),
        ]
    said = capsys.readouterr().out
    assert (
        "ok   prefill-0 > decode-0: 1,000 bytes in 0.50 ms, 40,000 in 20.00 ms, 2 MB/s over memfd; first token of 40 "
        "tokens after 250 ms\n"
    ) in said
    assert "down: full [x]" in said and "no worker that prefills has joined" in said


def test_a_pair_that_moves_wrong_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedRouter() as router:
        router.refuse = KvCorrupt("a checksum was wrong", block=3)
        assert main(["doctor", "--target", router.target, "--json"], {}) == 1
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    pair = next(each for each in findings if each["subject"] == "prefill-0 > decode-0")
    assert pair["verdict"] == "FAIL" and "a checksum was wrong" in pair["said"]


@pytest.mark.parametrize("flags", [("--tokens", "0"), ("--deadline-s", "0"), ("--deadline-s", "nan")])
def test_sizes_that_are_refused(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags], {}) == 1
    assert f"error: {flags[0]} must be" in capsys.readouterr().err


def _probes(router: ScriptedRouter) -> list[admin_pb2.ProbePairRequest]:
    return [each for each in router.orders if isinstance(each, admin_pb2.ProbePairRequest)]


def test_nccl_is_named_with_its_file_and_several_in_one_process_are_wrong() -> None:
    first, second = SOUND.workers
    one = "NCCL 2.27.3 (/venv/nvidia/nccl/lib/libnccl.so.2)"
    alike = replace(SOUND, workers=(replace(first, nccl_library=one), replace(second, nccl_library=one)))
    assert f"ok NCCL: {one} everywhere" in lines(alike)
    both = replace(first, nccl_library="several: /a/libnccl.so.2, /b/libnccl.so.2")
    [wrong] = [line for line in lines(replace(SOUND, workers=(both, second))) if line.startswith("FAIL")]
    assert "p0: more than one NCCL library" in wrong and "/a/libnccl.so.2, /b/libnccl.so.2" in wrong
    assert not [line for line in lines(SOUND) if "NCCL" in line]
