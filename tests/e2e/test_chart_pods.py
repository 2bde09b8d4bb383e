"""The pods of the chart, run as a kubelet would: clients with a key get answers over TLS, by gRPC and by HTTP through a
gateway; and all pods drain.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.test_chart_meaning import COMPONENTS, environ_of, pod_of
from tests.k8s.value_sets import GUARDED
from tests.support.certificates import Authority, needs_openssl
from tests.support.containers import Network, PidOne, container
from tests.support.dockerfile import Builder
from tests.support.helm import SIMPLEST, Manifest, render
from tests.support.processes import run_cli
from tests.support.waiting import until

pytestmark = [needs_openssl, pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESSES = {component: f"127.0.0.{number}" for number, component in enumerate((*COMPONENTS, "gateway"), 2)}
GATEWAY = "chat-pdserve-gateway.llm.svc"
CLIENTS, WORKERS = "chat-pdserve.llm.svc", "chat-pdserve-routers.llm.svc"
TLS = {
    "routers": "router-tls",
    "authorities": "cluster-ca",
    "workers": "worker-tls",
    "workerName": "worker",
    "gateways": "gateway-tls",
}
CONFIG = {**SIMPLEST["config"], "transport": {"link_tls": True}}

Secrets = dict[str, dict[str, bytes]]


def lay_out(manifests: list[Manifest], secrets: Secrets, component: str, folder: Path) -> Path:
    """What the pod sees as /etc/pdserve."""
    spec = pod_of(manifests, component)["spec"]
    config_maps = {
        each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"
    }
    for mount in spec["containers"][0]["volumeMounts"]:
        [volume] = [each for each in spec["volumes"] if each["name"] == mount["name"]]
        if "configMap" in volume:
            source = volume["configMap"]
            files = {key: text.encode() for key, text in config_maps[source["name"]].items()}
        elif "secret" in volume:
            source = volume["secret"]
            files = secrets[source["secretName"]]
        else:
            continue
        into = folder / Path(mount["mountPath"]).relative_to("/etc/pdserve")
        into.mkdir(parents=True)
        for item in source.get("items") or [{"key": key, "path": key} for key in files]:
            (into / item["path"]).write_bytes(files[item["key"]])
    return folder


def make_secrets(manifests: list[Manifest], folder: Path) -> tuple[Secrets, str]:
    """The chart's own, and those that its user makes; and an API key."""
    authority = Authority(folder, "cluster")
    router, worker, gateway = (authority.sign(name) for name in (CLIENTS, "worker", GATEWAY))
    keys = folder / "keys.toml"
    added = run_cli("keys", "add", "--file", str(keys), "--tenant", "acme")
    assert added.returncode == 0, added.stderr
    [own] = [each for each in manifests if each["kind"] == "Secret"]
    return {
        own["metadata"]["name"]: {key: base64.b64decode(text) for key, text in own["data"].items()},
        "keys": {"keys.toml": keys.read_bytes()},
        "cluster-ca": {"ca.crt": authority.cert.read_bytes()},
        "router-tls": {"tls.crt": router.cert.read_bytes(), "tls.key": router.key.read_bytes()},
        "gateway-tls": {"tls.crt": gateway.cert.read_bytes(), "tls.key": gateway.key.read_bytes()},
        "worker-tls": {"tls.crt": worker.cert.read_bytes(), "tls.key": worker.key.read_bytes()},
    }, added.stdout.split()[-1]


def ask_gateway(network: Network, ca: Path, key: str) -> tuple[int, Any]:
    """One completion, as a client of OpenAI asks for it: its status and JSON."""
    script = """
import http.client, socket, ssl, sys
address, name, ca, key = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
connection = http.client.HTTPConnection(name)
connection.sock = context.wrap_socket(socket.create_connection((address, 8000), 30), server_hostname=name)
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
connection.request("POST", "/v1/completions", '{"prompt": "hello", "max_tokens": 16}', headers)
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""
    command = [*network.enter, sys.executable, "-c", script, ADDRESSES["gateway"], GATEWAY, str(ca), key]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, _, text = done.stdout.partition(" ")
    return int(status), json.loads(text)


async def test_the_pods_serve_and_drain(builder: Builder, tmp_path: Path) -> None:
    manifests = render({**SIMPLEST, **GUARDED, "tls": TLS, "config": CONFIG, "gateway": {"replicas": 1}})
    image = builder.image("router")  # the fake engine needs no torch
    secrets, key = make_secrets(manifests, tmp_path)
    hosts = "".join(f"{ADDRESSES['router']} {name}\n" for name in (CLIENTS, WORKERS))
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts))
        pods: dict[str, PidOne] = {}
        for component, address in ADDRESSES.items():
            [spec] = pod_of(manifests, component)["spec"]["containers"]
            fields = {"status.podIP": address, "metadata.name": f"chat-pdserve-{component}-0"}
            pods[component] = stack.enter_context(
                container(
                    image,
                    tmp_path / component,
                    *spec["args"],
                    settings=lay_out(manifests, secrets, component, tmp_path / f"{component}-settings"),
                    environ=environ_of(spec, fields),
                    network=network,
                )
            )

        def tails() -> str:
            return "\n".join(f"{name}: {pod.tail()}" for name, pod in pods.items())

        for component in ADDRESSES:
            [spec] = pod_of(manifests, component)["spec"]["containers"]
            path = spec["readinessProbe"]["httpGet"]["path"]
            url = f"http://{ADDRESSES[component]}:9400{path}"
            ready = partial(asyncio.to_thread, network.answers, url)
            await until(f"{component} is ready", ready, limit_s=120, told=tails)

        def asked(name: str, *flags: str) -> tuple[int, str]:
            (tmp_path / name).mkdir()
            (tmp_path / name / "ca.crt").write_bytes(secrets["cluster-ca"]["ca.crt"])
            target = ("--target", f"{CLIENTS}:50051", "--tls-ca", "/etc/pdserve/ca.crt")
            words = ("generate", *target, "--max-tokens", "16", *flags, "hello")
            client = container(
                image, tmp_path / f"{name}-root", *words, settings=tmp_path / name, network=network
            )
            with client as process:
                return process.wait(), process.tail()

        code, said = await asyncio.to_thread(asked, "client", "--api-key", key)
        assert code == 0, f"{said}\n{tails()}"
        assert '"transport": "stream-tls"' in pods["router"].tail()
        code, said = await asyncio.to_thread(asked, "stranger")
        assert code != 0
        assert "API key" in said
        ca = tmp_path / "client" / "ca.crt"
        status, answer = await asyncio.to_thread(ask_gateway, network, ca, key)
        assert status == 200, f"{answer}\n{tails()}"
        assert answer["usage"]["completion_tokens"] == 16
        status, answer = await asyncio.to_thread(ask_gateway, network, ca, "pdk_of-nobody")
        assert status == 401, answer
        for pod in pods.values():
            pod.terminate()
        codes: dict[str, Any] = {name: await asyncio.to_thread(pod.wait) for name, pod in pods.items()}
        assert codes == dict.fromkeys(ADDRESSES, 0), tails()
