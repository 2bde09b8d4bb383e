"""Values that can't be right: helm refuses them, and says which key to change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.helm import SIMPLEST, refusal

pytestmark = pytest.mark.slow

BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"replica": 2}, "additional properties 'replica' not allowed"),
    ({"http": {"enabled": True}}, "additional properties 'http' not allowed"),
    ({"router": {"replicas": 0}}, "'/router/replicas': minimum: got 0, want 1"),
    ({"router": {"replicas": "two"}}, "'/router/replicas': got string, want integer"),
    ({"router": {"service": {"port": 70000}}}, "'/router/service/port': maximum"),
    ({"router": {"service": {"type": "Ingress"}}}, "'/router/service/type'"),
    ({"decode": {"replicas": -1}}, "'/decode/replicas'"),
    ({"prefill": {"maxReplicas": "many"}}, "'/prefill/maxReplicas'"),
    ({"prefill": {"startupSeconds": 0}}, "'/prefill/startupSeconds'"),
    ({"prefill": {"rollingUpdate": {"maxSurge": "half"}}}, "'/prefill/rollingUpdate/maxSurge'"),
    ({"decode": {"resources": {"limit": {}}}}, "'/decode/resources': additional properties 'limit'"),
    ({"decode": {"resources": {"limits": {"memory": "4 GB"}}}}, "'/decode/resources/limits/memory'"),
    ({"decode": {"image": {"name": "x"}}}, "'/decode/image': additional properties 'name'"),
    ({"ipFamily": "IPv5"}, "'/ipFamily'"),
    ({"image": {"pullPolicy": "always"}}, "'/image/pullPolicy'"),
    ({"clusterSecret": {"existingSecret": "Not A Name"}}, "'/clusterSecret/existingSecret'"),
    ({"serviceMonitor": {"interval": "often"}}, "'/serviceMonitor/interval'"),
    ({"networkPolicy": {"clients": "everybody"}}, "'/networkPolicy/clients'"),
    # Settings of pdserve, as it would refuse them itself.
    ({"config": {"timeout": {}}}, "'/config': additional properties 'timeout'"),
    ({"config": {"timeouts": {"drain": 3}}}, "'/config/timeouts': additional properties 'drain'"),
    ({"config": {"timeouts": {"drain_s": 0}}}, "'/config/timeouts/drain_s': minimum"),
    ({"config": {"engine": {"kind": "vllm"}}}, "'/config/engine/kind'"),
    ({"config": {"engine": {"max_batch": 1.5}}}, "'/config/engine/max_batch'"),
    ({"config": {"transport": {"kinds": ["ucx"]}}}, "'/config/transport/kinds/0'"),
    # What the chart decides, and what another component would have to know as well.
    ({"config": {"router": {"listen": "0.0.0.0:1"}}}, "'/config/router': additional properties 'listen'"),
    ({"config": {"worker": {"id": "me"}}}, "'/config/worker': additional properties 'id'"),
    ({"decode": {"config": {"timeouts": {}}}}, "'/decode/config': additional properties 'timeouts'"),
    ({"router": {"config": {"engine": {}}}}, "'/router/config': additional properties 'engine'"),
    (
        {"router": {"config": {"http": {"listen": ""}}}},
        "'/router/config/http': additional properties 'listen'",
    ),
    ({"router": {"http": "yes"}}, "'/router/http': got string, want boolean"),
    ({"gateway": {"replicas": -1}}, "'/gateway/replicas': minimum"),
    ({"gateway": {"config": {"timeouts": {}}}}, "'/gateway/config': additional properties 'timeouts'"),
    ({"gateway": {"service": {"httpPort": 1}}}, "'/gateway/service': additional properties 'httpPort'"),
]

TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"insecure": False}, "apiKeys.existingSecret is empty"),
    ({"insecure": False, "apiKeys": {"existingSecret": "keys"}}, "tls.routers is empty"),
    ({"tls": {"workers": "w"}}, "tls.workers is set, but tls.routers"),
    ({"tls": {"authorities": "w"}}, "tls.authorities is set, but tls.routers"),
    ({"tls": {"clientAuthorities": "w"}}, "tls.clientAuthorities is set, but tls.routers"),
    ({"tls": {"serverName": "w"}}, "tls.serverName is set, but tls.routers"),
    ({"tls": {"workerName": "w"}}, "tls.workerName is set, but tls.routers"),
    ({"tls": {"routers": "r"}}, "tls.authorities is empty"),
    ({"config": {"transport": {"link_tls": True}}}, "tls.workers is empty: transport.link_tls needs"),
    (
        {
            "config": {"transport": {"link_tls": True}},
            "tls": {"routers": "r", "authorities": "a", "workers": "w"},
        },
        "tls.workerName is empty: transport.link_tls needs",
    ),
    (
        {
            "decode": {"config": {"transport": {"link_tls": True}}},
            "tls": {"routers": "r", "authorities": "a", "workers": "w", "workerName": "worker"},
        },
        "prefill.config.transport.link_tls is false and decode.config.transport.link_tls true",
    ),
    ({"config": {}}, "model.name is empty"),
    ({"decode": {"config": {"engine": {"kind": "torch"}}}}, "model.name is empty"),
    ({"model": {"name": "/models/x"}}, "model.volume is empty"),
    (
        {"model": {"name": "/models/x", "fetch": True, "volume": {"emptyDir": {}}}},
        "model.fetch fetches aliases",
    ),
    ({"prefill": {"replicas": 0}}, "prefill.replicas is 0"),
    ({"decode": {"replicas": 0}}, "decode.replicas is 0"),
    ({"decode": {"replicas": None}}, "decode.maxReplicas is 0"),
    (
        {"prefill": {"replicas": 3, "maxReplicas": 2}},
        "prefill.maxReplicas is 2, less than prefill.replicas=3",
    ),
    (
        {"decode": {"terminationGracePeriodSeconds": 74}},
        "decode.terminationGracePeriodSeconds is 74: a drain may take 75",
    ),
    (
        {"router": {"terminationGracePeriodSeconds": 75}, "config": {"timeouts": {"drain_s": 60.5}}},
        "router.terminationGracePeriodSeconds is 75: a drain may take 81",
    ),
    (
        {"prefill": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}},
        "prefill.rollingUpdate.maxUnavailable and maxSurge are both 0",
    ),
    ({"serviceMonitor": {"enabled": True}}, "networkPolicy.monitoring is empty"),
    (
        {
            "insecure": False,
            "apiKeys": {"existingSecret": "keys"},
            "tls": {"routers": "r", "authorities": "a"},
            "gateway": {"replicas": 1},
        },
        "tls.gateways is empty: clients would send their API keys",
    ),
    (
        {"tls": {"routers": "r", "authorities": "a", "clientAuthorities": "c"}, "gateway": {"replicas": 1}},
        "tls.gateways is empty: with tls.clientAuthorities",
    ),
    (
        {"gateway": {"replicas": 1, "terminationGracePeriodSeconds": 79}},
        "gateway.terminationGracePeriodSeconds is 79: a drain may take 80 (timeouts.drain_s + timeouts.lease_s + "
        "router.drain_delay_s",
    ),
    (
        {"gateway": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0"}}},
        "'/gateway/rollingUpdate/maxUnavailable'",
    ),
]


def _over_simplest(values: dict[str, Any]) -> dict[str, Any]:
    config = {**SIMPLEST["config"], **values.get("config", {})} if values.get("config") != {} else {}
    return {**SIMPLEST, **values, "config": config}


@pytest.mark.parametrize(("values", "said"), BY_SCHEMA, ids=lambda each: str(each)[:60])
def test_the_schema_names_the_key(values: dict[str, Any], said: str) -> None:
    assert said in refusal(_over_simplest(values))


@pytest.mark.parametrize(("values", "said"), TOGETHER, ids=lambda each: str(each)[:60])
def test_values_that_do_not_fit_together_are_named(values: dict[str, Any], said: str) -> None:
    assert said in refusal(_over_simplest(values))
