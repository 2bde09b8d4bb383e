"""`pdserve gateway`: what is settled before gRPC is there."""

from __future__ import annotations

import subprocess
import sys

from pdserve.cli.gateway import read_sockets_at_once


def test_how_grpc_reads_is_settled_before_it_is_imported() -> None:
    code = "import sys, pdserve.cli.gateway; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    drawn: dict[str, str] = {}
    read_sockets_at_once(drawn)
    assert drawn == {"GRPC_EXPERIMENTS": "-event_engine_client"}
    set_by_hand = {"GRPC_EXPERIMENTS": "tcp_frame_size_tuning"}
    read_sockets_at_once(set_by_hand)
    assert set_by_hand == {"GRPC_EXPERIMENTS": "tcp_frame_size_tuning"}
