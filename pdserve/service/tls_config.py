"""The settings of TLS, a table of the configuration (config.py)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from pdserve.fields import setting
from pdserve.service.settings import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Certificates, in PEM files: of clients and sessions and, with transport.link_tls, of links over TCP."""

    cert_file: str = setting(
        "",
        "certificate of this process, with its chain; of a router, with which it serves TLS at both addresses",
    )
    key_file: str = setting("", "its key")
    ca_file: str = setting(
        "",
        "authorities of the cluster: workers believe routers and each other, and routers workers and operators, of "
        "these only",
    )
    client_ca_file: str = setting("", "authorities of clients; if set, these must show a certificate")
    server_name: str = setting(
        "", "name in the routers' certificates, which workers check; empty = the address that they dial"
    )

    worker_name: str = setting(
        "",
        "name in the workers' certificates, which both ends of a link check (transport.link_tls); empty = prefill "
        "workers check the address that they dial",
    )

    def __post_init__(self) -> None:
        check_fields("tls", self)

    def load_into(self, context: ssl.SSLContext) -> None:
        """The certificate and its key. Raises ssl.SSLError or OSError; a key with a passphrase can't be used."""
        context.load_cert_chain(
            self.cert_file, self.key_file, password=""
        )  # None asks for it on the terminal
