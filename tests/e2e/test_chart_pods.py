"""The pods of the chart, run as a kubelet would: a client with a key gets an answer over TLS, and all pods drain."""

from __future__ import annotations

import asyncio
import base64
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

ADDRESSES = dict(zip(COMPONENTS, ("127.0.0.2", "127.0.0.3", "127.0.0.4"), strict=True))
CLIENTS, WORKERS = "chat-pdserve.llm.svc", "chat-pdserve-routers.llm.svc"
TLS = {"routers": "router-tls", "authorities": "cluster-ca", "workers": "worker-tls", "workerName": "worker"}
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
    router, worker = authority.sign(CLIENTS), authority.sign("worker")
    keys = folder / "keys.toml"
    added = run_cli("keys", "add", "--file", str(keys), "--tenant", "acme")
    assert added.returncode == 0, added.stderr
    [own] = [each for each in manifests if each["kind"] == "Secret"]
    return {
        own["metadata"]["name"]: {key: base64.b64decode(text) for key, text in own["data"].items()},
        "keys": {"keys.toml": keys.read_bytes()},
        "cluster-ca": {"ca.crt": authority.cert.read_bytes()},
        "router-tls": {"tls.crt": router.cert.read_bytes(), "tls.key": router.key.read_bytes()},
        "worker-tls": {"tls.crt": worker.cert.read_bytes(), "tls.key": worker.key.read_bytes()},
    }, added.stdout.split()[-1]


async def test_the_pods_serve_and_drain(builder: Builder, tmp_path: Path) -> None:
    manifests = render({**SIMPLEST, **GUARDED, "tls": TLS, "config": CONFIG})
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

        for component in COMPONENTS:
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
        for pod in pods.values():
            pod.terminate()
        codes: dict[str, Any] = {name: await asyncio.to_thread(pod.wait) for name, pod in pods.items()}
        assert codes == dict.fromkeys(COMPONENTS, 0), tails()
