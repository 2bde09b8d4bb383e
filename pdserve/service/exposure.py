"""Which listeners strangers can reach, and what a process must have before it opens one."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.service.address import is_loopback, join_address, split_address
from pdserve.service.config import Config
from pdserve.service.router_config import RouterConfig
from pdserve.service.settings import ConfigError

_LOOPBACK = "127.0.0.1"
_SET_KEYS = "set router.keys_file, tls.cert_file and tls.key_file"
_SET_TLS = "set tls.cert_file and tls.key_file, and let the routers ask for keys"
_SET_SECRET = "set cluster.secret_file"
_SET_LINKS = "set cluster.secret_file or transport.link_tls"


def workers_listen(router: RouterConfig) -> str:
    """Where workers and operators reach a router: as set, else on loopback at the port after the clients'.

    A free one if the clients' is. Raises ConfigError if there is no port after it.
    """
    if router.workers_listen:
        return router.workers_listen
    _, port = split_address(router.listen)
    if port == 65535:
        raise ConfigError("router.listen: there is no port after 65535: set router.workers_listen as well")
    return join_address(_LOOPBACK, port and port + 1)


def check_router(config: Config, *, has_secret: bool) -> list[str]:
    """The settings by which strangers reach a router that doesn't ask who they are: for a warning.

    Raises ConfigError if there are any and `cluster.insecure` isn't set.
    """
    asks_clients = bool(config.router.keys_file) and bool(config.tls.cert_file)
    http = (
        [_Listener("http.listen", config.http.listen, asks_clients, _SET_KEYS)] if config.http.listen else []
    )
    return _check(
        config,
        _Listener("router.listen", config.router.listen, asks_clients, _SET_KEYS),
        *http,
        _Listener("router.workers_listen", workers_listen(config.router), has_secret, _SET_SECRET),
    )


def check_gateway(config: Config) -> list[str]:
    """As check_router, of a gateway: it must have TLS. Whether its routers ask for keys it finds out as it runs."""
    has_tls = bool(config.tls.cert_file)
    return _check(config, _Listener("http.listen", config.http.listen, has_tls, _SET_TLS))


def check_worker(config: Config, *, has_secret: bool) -> list[str]:
    """As check_router, of a worker's listener for links."""
    is_guarded = has_secret or config.transport.link_tls
    return _check(config, _Listener("worker.kv_listen", config.worker.kv_listen, is_guarded, _SET_LINKS))


@dataclass(frozen=True, slots=True)
class _Listener:
    """remedy: what would guard it."""

    setting: str
    address: str
    is_guarded: bool
    remedy: str


def _check(config: Config, *listeners: _Listener) -> list[str]:
    found = [each for each in listeners if not each.is_guarded and not is_loopback(each.address)]
    for each in found:
        if not config.cluster.insecure:
            raise ConfigError(
                f"{each.setting} {each.address}: strangers could reach it: {each.remedy}, or give --insecure"
            )
    return [each.setting for each in found]
