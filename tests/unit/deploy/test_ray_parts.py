"""What is shipped to Ray's nodes, and what a process gets there."""

from __future__ import annotations

import asyncio
import os
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.ray.host import node_environ, until_orphaned
from deploy.ray.node_folder import NodeFolder
from deploy.ray.scaling import targets_of
from deploy.ray.spec import (
    PairPlace,
    RayCluster,
    decode,
    encode,
    read_range,
    read_resources,
    shipped_settings,
    shortages,
)
from deploy.scaling.targets import Range
from pdserve.service.config import Config, EngineConfig, TimeoutsConfig, load
from pdserve.service.settings import ConfigError
from tests.support.virtual_loop import run_virtual

CONFIG = Config(engine=EngineConfig(kind="fake", threads=3), timeouts=TimeoutsConfig(drain_s=7.5))
CLUSTER = RayCluster(
    name="c",
    members={"router": [0], "prefill": [0, 1], "decode": [0]},
    ranges={"router": (1, 1), "prefill": (2, 2), "decode": (1, 1)},
    settings=shipped_settings(CONFIG),
    resources={"router": {"CPU": 1}, "prefill": {"CPU": 2, "prefill": 1}, "decode": {}},
    files={"cluster.secret_file": b"\x00secret\xff" * 8},
)


def test_a_cluster_is_kept_as_it_is() -> None:
    assert decode(encode(CLUSTER)) == CLUSTER
    assert CLUSTER.processes() == ["router-0", "prefill-0", "prefill-1", "decode-0"]
    assert replace(CLUSTER, is_ending=True).processes() == []
    assert "secret" not in repr(CLUSTER).replace("secret_file", "")


def test_its_settings_make_the_same_configuration_on_a_node(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    odd = 'a "quoted" \\ path, ünï\x7f'
    config = replace(CONFIG, worker=replace(CONFIG.worker, model=odd, routers=("a:1", "b:2")))
    cluster = replace(CLUSTER, settings=shipped_settings(config))
    file.write_text(cluster.toml(), encoding="utf-8")
    assert tomllib.loads(file.read_text())["worker"]["model"] == odd
    assert load(file) == config


def test_files_of_this_machine_are_not_named_on_others() -> None:
    config = replace(CONFIG, cluster=replace(CONFIG.cluster, secret_file="/here/secret"))
    assert shipped_settings(config)["cluster.secret_file"] == ""


def test_a_drain_may_take_what_the_process_itself_allows() -> None:
    assert CLUSTER.drain_s == 7.5 + CONFIG.timeouts.lease_s + 1 + 5


def test_settings_and_threads_of_the_node_do_not_reach_the_process() -> None:
    kept = {"PATH": "/bin", "PDSERVE_CACHE_DIR": "/models", "CUDA_VISIBLE_DEVICES": "1"}
    dropped = {"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1", "PDSERVE_ENGINE__THREADS": "9"}
    assert node_environ({**kept, **dropped}) == kept


def test_resources_as_a_flag() -> None:
    assert read_resources("CPU=4, GPU=0.5", "--x") == {"CPU": 4.0, "GPU": 0.5}
    for wrong in ("CPU", "CPU=", "=1", "CPU=-1", "CPU=inf", "CPU=nan", ""):
        with pytest.raises(ConfigError, match=r"--x: want NAME=NUMBER.*as in CPU=4,GPU=1"):
            read_resources(wrong, "--x")


def test_a_shortage_says_what_is_short() -> None:
    nodes = {"a": {"CPU": 1.0}, "b": {"CPU": 3.0, "GPU": 1.0}}
    assert list(shortages({"decode-0": {"CPU": 3, "GPU": 1}}, nodes)) == []
    assert list(shortages({"decode-0": {"CPU": 4, "prefill": 1}}, nodes)) == [
        "decode-0 takes CPU 4, prefill 1, and no node has it (the most on one: CPU 3, prefill 0)"
    ]


def test_those_that_may_go_go_first_and_free_numbers_are_taken_again() -> None:
    cluster = CLUSTER.scaled({"decode": 4}, {})
    assert cluster.members["decode"] == [0, 1, 2, 3]
    cluster = cluster.scaled({"decode": 2}, {"decode": ["decode-1", "elsewhere", "decode-0"]})
    assert cluster.members["decode"] == [2, 3]
    cluster = cluster.scaled({"decode": 3, "prefill": 1}, {})
    assert cluster.members == {"router": [0], "prefill": [0], "decode": [0, 2, 3]}


def test_a_range_keeps_the_number_that_there_is_within_it() -> None:
    cluster = CLUSTER.asked({"prefill": (1, 3), "decode": (3, 5)})
    assert cluster.counts == {"router": 1, "prefill": 2, "decode": 3} and cluster.is_scaled
    assert not cluster.asked({"prefill": (3, 3), "decode": (3, 3)}).is_scaled
    assert not replace(cluster, is_ending=True).is_scaled
    assert targets_of(cluster).decode == Range(3, 5) and not targets_of(cluster).how.change_roles


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({"decode": (0, 2)}, "give --decode or --both at least 1"),
        ({"prefill": (-1, -1)}, "--prefill must not be negative"),
        ({"router": (1, 2)}, "--routers: want a number"),
        ({"both": (1, 2)}, "--both: want a number"),
        ({"both": (1, 1), "decode": (1, 2)}, "--both can't stand beside a range"),
        ({"router": (0, 0)}, "give --routers at least 1"),
        ({"prefill": (0, 0)}, "give --prefill or --both at least 1"),
    ],
)
def test_numbers_that_could_not_serve_are_refused(ranges: dict[str, tuple[int, int]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CLUSTER.asked(ranges)


def test_workers_that_do_both_serve_alone() -> None:
    alone = CLUSTER.asked({"prefill": (0, 0), "decode": (0, 0), "both": (2, 2)})
    assert alone.processes() == ["router-0", "both-0", "both-1"]
    assert alone.serves_alone and not CLUSTER.serves_alone


def test_numbers_as_flags() -> None:
    assert read_range("3", "--decode") == (3, 3) and read_range("1..3", "--decode") == (1, 3)
    for wrong in ("", "x", "3..1", "1..", "1...3", "٣", "1..1025"):
        with pytest.raises(ConfigError, match="--decode: "):
            read_range(wrong, "--decode")


def test_workers_that_share_memory_are_pairs() -> None:
    cluster = replace(CLUSTER, resources={**CLUSTER.resources, "decode": {"CPU": 1}})
    assert cluster.pair_of("prefill-0") == PairPlace(0, 0, "decode-0")
    assert cluster.pair_of("decode-0") == PairPlace(0, 1, "prefill-0")
    assert cluster.pair_of("prefill-1") is None  # there is no decode-1
    assert cluster.pair_of("router-0") is None
    assert CLUSTER.pair_of("prefill-0") is None  # nothing is set aside for decode workers
    apart = replace(cluster, settings={**cluster.settings, "transport.kinds": ["stream"]})
    assert apart.pair_of("prefill-0") is None


def test_a_pair_that_must_lie_on_one_node_needs_the_sum() -> None:
    cluster = replace(
        CLUSTER,
        resources={**CLUSTER.resources, "decode": {"CPU": 1}},
        settings={**CLUSTER.settings, "transport.strict": True},
    )
    assert cluster.needs(["prefill-0", "decode-0", "prefill-1"]) == {
        "prefill-0 with decode-0": {"CPU": 3, "prefill": 1},
        "prefill-1": {"CPU": 2, "prefill": 1},
    }


def test_an_orphan_notices_it() -> None:
    parents = [7, 7, 7, 1]

    async def run() -> None:
        await until_orphaned(lambda: parents.pop(0))
        assert asyncio.get_running_loop().time() == pytest.approx(1_000.5)

    run_virtual(run())


def test_files_on_a_node_are_for_this_user_only_and_those_of_dead_hosts_go(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = NodeFolder(tmp_path, "c.decode-0.1")
    secret = folder.write("cluster.secret_file", b"x")
    routers = folder.write_routers(["10.0.0.1:2"])
    assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(secret.parent).st_mode) == 0o700
    folder.write_routers(["10.0.0.2:2", "[::1]:3"])
    assert routers.read_text() == "10.0.0.2:2\n[::1]:3\n"
    stale = secret.parent.with_name("ray.c.decode-1.2")
    stale.mkdir(mode=0o700)
    (stale / "lock").touch()
    other = NodeFolder(tmp_path, "c.decode-2.3")
    assert not stale.exists() and secret.exists()
    for each in (folder, other):
        each.remove()
        each.remove()
    assert not secret.parent.exists()
