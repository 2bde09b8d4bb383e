"""`pdserve operator` for tests: the same, but it reaches pods where the stand-in for the kubelet runs them.

python -m tests.support.kube.operator_process NAMESPACE
"""

from __future__ import annotations

import asyncio
import sys

from deploy.k8s.operator.manifests import Manifest
from deploy.k8s.operator.process import OperatorOptions, run_operator
from deploy.k8s.operator.routers import pod_ip
from pdserve.service.config import LogConfig
from tests.support.kube.pod_process import reached


def ip_of(pod: Manifest) -> str:
    """On loopback."""
    return reached(ip) if (ip := pod_ip(pod)) else ""


if __name__ == "__main__":
    options = OperatorOptions(
        namespace=sys.argv[1],
        lease_namespace=sys.argv[1],
        metrics="127.0.0.1:0",
        resync_s=5.0,
        log=LogConfig(format="json"),
    )
    sys.exit(asyncio.run(run_operator(options, ip_of)))
