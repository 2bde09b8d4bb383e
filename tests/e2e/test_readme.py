"""The commands of README and docs/api.md, run as they stand there; only the address and the program's path are put in.

`make test` is left out: it is what runs this.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.processes import LocalCluster
from tests.support.readme import ADDRESS, HTTP_ADDRESS, ROOT, Grpcurl, blocks, commands

pytestmark = pytest.mark.timeout(600)

UP = next(line for line in commands("pdserve") if shlex.split(line)[1] == "up")
OTHERS = [line for line in commands("pdserve") if line != UP]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The README's `pdserve up`, on a free port."""
    run_line(next(line for line in OTHERS if shlex.split(line)[1] == "fetch"), ADDRESS)
    words = shlex.split(UP)[2:]
    place = words.index("--listen")
    with LocalCluster(tmp_path_factory.mktemp("up"), *words[:place], *words[place + 2 :]) as running:
        yield running


def run_line(line: str, target: str) -> str:
    """One `pdserve` or `grpcurl` line with the cluster's address; its standard output."""
    words = [word.replace(ADDRESS, target) for word in shlex.split(line)]
    if words[0] == "pdserve":
        words[:1] = [sys.executable, "-m", "pdserve.cli"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_demo_says_where_the_time_went() -> None:
    """`make demo`, in an environment without a terminal."""
    (line,) = [line for line in commands("make") if line != "make test"]
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        shlex.split(line), cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for wanted in (
        "/v1/chat/completions -d ",
        "chat ",
        "completion ",
        "time to first token",
        "exposed transfer",
        "KV sent",
    ):
        assert wanted in done.stdout


@pytest.mark.parametrize("line", OTHERS)
def test_commands(cluster: LocalCluster, line: str) -> None:
    out = run_line(line, cluster.target)
    assert out.strip()
    if "--json" in shlex.split(line):
        assert json.loads(out)


@pytest.mark.parametrize("line", commands("curl"))
def test_curl(cluster: LocalCluster, line: str) -> None:
    words = [word.replace(f"http://{HTTP_ADDRESS}", cluster.http) for word in shlex.split(line)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    if "-sN" in words:
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("line", commands("grpcurl"))
@pytest.mark.skipif(
    shutil.which("grpcurl") is None, reason="grpcurl is not installed here; see the next test"
)
def test_grpcurl(cluster: LocalCluster, line: str) -> None:
    assert run_line(line, cluster.target).strip()


@pytest.mark.parametrize("line", commands("grpcurl"))
def test_the_same_calls_by_reflection(cluster: LocalCluster, line: str) -> None:
    """Without our generated code, as grpcurl does it."""
    call = Grpcurl.parse(line)
    with grpc.insecure_channel(cluster.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        if call.what == "list":
            assert "pdserve.rpc.v1.Inference" in database.get_services()
            return
        service, method_name = call.what.split("/")
        method = DescriptorPool(database).FindServiceByName(service).FindMethodByName(method_name)
        request = json_format.ParseDict(call.request, GetMessageClass(method.input_type)())
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        invoke = kind(
            f"/{call.what}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = invoke(request, timeout=120)
        messages: list[Any] = list(answer) if method.server_streaming else [answer]
    assert messages
    if method_name == "Generate":
        assert [message.WhichOneof("event") for message in (messages[0], messages[-1])] == [
            "started",
            "finished",
        ]
        assert "".join(message.tokens.text for message in messages).strip()


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples(cluster: LocalCluster, tmp_path: Path, number: int) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[number].replace(ADDRESS, cluster.target), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
