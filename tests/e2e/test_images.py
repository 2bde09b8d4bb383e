"""The images: their steps run in empty folders, and what comes out runs and drains as a container would."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import pytest

from deploy.command import environ_of
from deploy.local.ports import PortReservations
from deploy.local.probe import is_ready
from pdserve.client import AsyncClient
from pdserve.service.config import EngineConfig
from pdserve.tokenizer import Tokenizer
from tests.support.asking import Question, ask, at_rest
from tests.support.containers import PidOne, container
from tests.support.dockerfile import DOCKERFILE, Builder, Image, read_stages
from tests.support.waiting import until
from tests.unit.engine_torch.random_model import SMALL, write_random_model

SECRET = "for the processes of this test only, 32 bytes\n"
FAKE = ("--engine", "fake", "--engine.num-blocks", "512")
TINY = ("--model", "/etc/pdserve/model", "--engine.num-blocks", "128", "--threads", "1")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """What a container sees as /etc/pdserve; its user must be able to read it."""
    folder = tmp_path / "settings"
    folder.mkdir()
    (folder / "secret").write_text(SECRET)
    return folder


class Cluster:
    """A router, a prefill and a decode worker, each in a container of its own."""

    def __init__(self, folder: Path, settings: Path, image: Image, worker: tuple[str, ...]) -> None:
        self._stack = ExitStack()
        ports = self._stack.enter_context(PortReservations())
        self.address, operators = (f"127.0.0.1:{ports.reserve('127.0.0.1', 0)}" for _ in range(2))
        flags = {
            "router": ("--listen", self.address, "--workers-listen", operators),
            "prefill": ("--routers", operators, "--id", "p0", *worker),
            "decode": ("--routers", operators, "--id", "d0", *worker),
        }
        self.metrics = {role: f"127.0.0.1:{ports.reserve('127.0.0.1', 0)}" for role in flags}
        self.all: dict[str, PidOne] = {}
        for role, own in flags.items():
            common = ("--metrics.listen", self.metrics[role], "--cluster.secret-file", "/etc/pdserve/secret")
            started = container(image, folder / role, role, *own, *common, settings=settings)
            self.all[role] = self._stack.enter_context(started)

    def close(self) -> None:
        self._stack.close()

    def tails(self) -> str:
        return "\n".join(f"{role}: {each.tail()}" for role, each in self.all.items())


def run(image: Image, folder: Path, settings: Path, *arguments: str) -> tuple[int, str]:
    """One command, its exit code and output."""
    with container(image, folder, *arguments, settings=settings) as process:
        code = process.wait()
        return code, process.tail()


@pytest.fixture
def clusters() -> Iterator[list[Cluster]]:
    made: list[Cluster] = []
    yield made
    for cluster in made:
        cluster.close()


def test_every_target_is_there_and_begins_without_a_shell() -> None:
    arguments, stages = read_stages(DOCKERFILE.read_text(encoding="utf-8"))
    assert {"router", "worker-cpu", "worker-cuda", "operator", "ray-node"} <= set(stages)
    assert arguments["RUNTIME"].partition(":")[2] == arguments["BUILDER"].partition(":")[2]  # one Python
    steps = dict(stages["runtime"].steps)
    assert json.loads(steps["ENTRYPOINT"]) == ["python3", "-P", "-m", "pdserve.cli"]
    assert steps["USER"] == "65532:65532"
    finals = {"router", "worker-cpu", "worker-cuda", "operator", "worker", "runtime"}
    assert not [word for name in finals for word, _ in stages[name].steps if word == "RUN"]
    # The same environment as `pdserve up` gives a worker, whose weights are to lie on huge pages.
    given = environ_of("decode", EngineConfig(), {})
    [variables] = [rest for word, rest in stages["worker"].steps if word == "ENV"]
    assert variables == f"GLIBC_TUNABLES={given['GLIBC_TUNABLES']}"


def test_every_package_goes_into_the_wheel() -> None:
    """And what is copied isn't ignored."""
    _, stages = read_stages(DOCKERFILE.read_text(encoding="utf-8"))
    project = tomllib.loads((DOCKERFILE.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {
        each.removesuffix("*") for each in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert {rest.split()[0] for word, rest in stages["wheel"].steps if word == "COPY"} == packages
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copies = [rest for each in stages.values() for word, rest in each.steps if word == "COPY"]
    sources = {name for each in copies if not each.startswith("--from") for name in each.split()[:-1]}
    assert sources == {each.removeprefix("!") for each in ignored if each.startswith("!")}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_router_has_no_torch_and_all_drain_as_pid_one(
    builder: Builder, tmp_path: Path, settings: Path, clusters: list[Cluster]
) -> None:
    """Every container is told to end in the middle of a stream: the answer is whole, the exit codes are 0."""
    image = builder.image("router")
    packages = {path.name for path in (image.root / "opt" / "pdserve").iterdir()}
    assert {"pdserve", "router", "http_door", "uvicorn", "grpc", "pip"} <= packages
    assert not {"torch", "triton", "nvidia"} & packages
    cluster = Cluster(tmp_path, settings, image, FAKE)
    clusters.append(cluster)
    async with AsyncClient(cluster.address) as client:
        await at_rest(client, ["d0", "p0"])
        begun = asyncio.Event()
        question = Question.draw(Random(3), 100, 4_000)
        answer = asyncio.create_task(ask(client, question, lambda _: begun.set()))
        await begun.wait()
        for process in cluster.all.values():
            process.terminate()
        await answer
    codes = {role: await asyncio.to_thread(process.wait) for role, process in cluster.all.items()}
    assert codes == {"router": 0, "prefill": 0, "decode": 0}, cluster.tails()
    assert "drained" in cluster.all["decode"].tail()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_worker_serves_a_model_and_drains_as_pid_one(
    builder: Builder, tmp_path: Path, settings: Path, clusters: list[Cluster]
) -> None:
    folder = write_random_model(settings / "model")
    for name, content in Tokenizer.fake(SMALL["vocab_size"]).files.items():
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").chmod(0o644)  # the container's user isn't ours
    worker = builder.image("worker-cpu")
    code, said = run(worker, tmp_path / "version", settings, "version")
    assert code == 0, said
    assert "torch" in said
    assert [path.name for path in (worker.root / "opt" / "pdserve").glob("pdserve/engine/native/*.so")]
    cluster = Cluster(tmp_path, settings, worker, TINY)
    clusters.append(cluster)
    for role in ("prefill", "decode", "router"):
        ready = partial(is_ready, cluster.metrics[role])
        await until(f"{role} is ready", ready, limit_s=120, told=cluster.tails)
    async with AsyncClient(cluster.address) as client:
        await at_rest(client, ["d0", "p0"])
        assert (await client.generate_text("hello")).text is not None
    for process in cluster.all.values():
        process.terminate()
    codes = {role: await asyncio.to_thread(process.wait) for role, process in cluster.all.items()}
    assert codes == {"router": 0, "prefill": 0, "decode": 0}, cluster.tails()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_can_be_written_and_a_mistake_is_one_line(
    builder: Builder, tmp_path: Path, settings: Path
) -> None:
    image = builder.image("router")
    code, said = run(image, tmp_path / "no-model", settings, "decode")
    assert (code, said.count("\n")) == (2, 1), said
    code, said = run(image, tmp_path / "no-secret", settings, "router", "--cluster.secret-file", "/nowhere")
    assert code == 2, said
    code, said = run(
        image, tmp_path / "keys", settings, "keys", "add", "--file", "/opt/keys", "--tenant", "x"
    )
    assert code != 0, said
    assert "Read-only file system" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_operators_image_has_what_it_needs(builder: Builder, tmp_path: Path, settings: Path) -> None:
    image = builder.image("operator")
    packages = {path.name for path in (image.root / "opt" / "pdserve").iterdir()}
    assert {"kopf", "pdserve"} <= packages and "torch" not in packages
    code, said = run(image, tmp_path / "outside", settings, "operator")
    assert (code, said.count("\n")) == (2, 1), said  # no cluster around it


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_for_gpus_is_made_by_the_same_steps(
    builder: Builder, tmp_path: Path, settings: Path
) -> None:
    """With the torch that this machine's pip finds; that for CUDA is gigabytes."""
    image = builder.image("worker-cuda")
    assert image.environ["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert image.entrypoint == builder.image("router").entrypoint
    code, said = run(image, tmp_path / "version", settings, "version")
    assert code == 0, said
    assert "torch" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pdserve_goes_into_an_image_of_ray(builder: Builder) -> None:
    """Into the Python that is there; this machine stands for the image, which has Ray in the version of the tests."""
    arguments, _ = read_stages(DOCKERFILE.read_text(encoding="utf-8"))
    pinned = (DOCKERFILE.parents[2] / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={arguments['RAY'].partition(':')[2].partition('-')[0]}\n" in pinned
    image = builder.image("ray-node")
    installed = {path.parts[-2] for path in image.root.glob("**/site-packages/*/__init__.py")}
    assert {"pdserve", "deploy", "router", "http_door", "uvicorn", "torch", "grpc"} <= installed
