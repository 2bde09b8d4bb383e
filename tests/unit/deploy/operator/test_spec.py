"""The spec of a DisaggregatedService: its defaults are the kind's, mistakes are named, sets differ rightly."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from deploy.k8s.operator.spec import InvalidSpec, read_spec
from pdserve.service.lifecycle import longest_drain_s
from tests.support.crd_schemas import problems
from tests.support.readme import ROOT
from tests.unit.deploy.operator.services import raw, spec
from tools.chart_schema import DECIDED

SCHEMA = yaml.safe_load((ROOT / "deploy/k8s/operator-chart/crds/disaggregatedservices.yaml").read_text())[
    "spec"
]["versions"][0]["schema"]["openAPIV3Schema"]


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    """As an API server fills it in."""
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {name: each["default"] for name, each in properties.items() if "default" in each} | value
    return {name: defaulted(properties.get(name, {}), each) for name, each in filled.items()}


@pytest.mark.parametrize("given", [{}, {"pools": {"decode": {"min": 1, "max": 3}}}, {"upgrade": {}}])
def test_the_defaults_are_those_of_the_kind(given: dict[str, Any]) -> None:
    before = raw(**given)
    assert read_spec(defaulted(SCHEMA["properties"]["spec"], before)) == read_spec(before)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"access": {}}, "spec.access"),
        ({"pools": {"decode": {"replicas": 1, "min": 1, "max": 2}}}, "spec.pools.decode: give either"),
        ({"pools": {"prefill": {"min": 1}}}, "spec.pools.prefill: min and max"),
        ({"pools": {"prefill": {"min": 3, "max": 2}}}, "min 3 is above max 2"),
        ({"config": {"engine": {"blok_size": 16}}}, "engine.block_size"),
        ({"config": {"engine": {"block_size": 17}}}, "power of two"),
        ({"config": {"engine": 3}}, "spec.config.engine"),
        ({"config": {"router": {"listen": "0.0.0.0:1"}}}, "spec.config.router.listen: the operator"),
        ({"transport": {"kinds": ["pigeon"]}}, "transport.kinds"),
        ({"config": {"timeouts": {"link_s": 9}}}, "timeouts"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        spec(**given)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sets_differ_by_what_two_workers_must_have_in_common() -> None:
    first = spec().set_id
    assert spec(images={"router": "r2", "worker": "w2"}).set_id == first
    assert spec(config={"engine": {"max_batch": 8}}).set_id == first
    others = [
        spec(model="m2").set_id,
        spec(config={"engine": {"dtype": "float32"}}).set_id,
        spec(config={"engine": {"block_size": 32}}).set_id,
        spec(config={"engine": {"kv_dtype": "fp8"}}).set_id,
        spec(config={"engine": {"long_context": True}}).set_id,
        spec(upgrade={"strategy": "NewSet"}).set_id,
        spec(upgrade={"strategy": "NewSet"}, images={"router": "r2", "worker": "w2"}).set_id,
    ]
    assert len({first, *others}) == 8


def test_a_pod_has_as_long_as_its_drain_may_take() -> None:
    for seconds in (1, 20.5, 600):
        made = spec(drain={"seconds": seconds})
        assert made.config.timeouts.drain_s == seconds
        assert made.grace_s("decode") >= longest_drain_s(made.config.timeouts) + 5
        assert made.grace_s("router") == made.grace_s("decode") + 5  # nodes learn late that a pod ends


def test_links_and_pairs_suffice_for_the_largest_pools() -> None:
    made = spec(pools={"prefill": {"min": 1, "max": 20}, "decode": {"min": 1, "max": 40}})
    assert made.config.router.pairs_per_prefill > 40
    assert made.config.worker.max_links > 40


def test_the_kind_refuses_what_it_doesnt_know() -> None:
    whole = {
        "apiVersion": "pdserve.dev/v1alpha1",
        "kind": "DisaggregatedService",
        "metadata": {"name": "one"},
    }
    assert problems(SCHEMA, {**whole, "spec": raw(pools={"decode": {"min": 1, "max": 2}})}) == []
    assert problems(SCHEMA, {**whole, "spec": raw(decoed=1)}) == ["spec.decoed: unknown field"]
    assert problems(SCHEMA, {**whole, "spec": raw(routers={"replicas": 0})})


# The same for all pods, and so the spec's own to say.
_ALLOWED = {"tls.server_name", "tls.worker_name", "tls.client_ca_file", "router.model"}


@pytest.mark.parametrize("name", sorted(DECIDED - _ALLOWED))
def test_what_the_chart_decides_is_not_the_specs_either(name: str) -> None:
    """Addresses, names and files inside of pods."""
    table, _, key = name.partition(".")
    with pytest.raises(InvalidSpec, match=name):
        spec(config={table: {key: "x"}})
