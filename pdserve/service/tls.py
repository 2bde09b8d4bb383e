"""TLS for gRPC: whose certificates are shown, whose are believed, and files that are read again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from pdserve.service.file_watch import FileWatch
from pdserve.service.settings import ConfigError
from pdserve.service.tls_config import TlsConfig

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """How a client, or a worker, speaks to routers. The files are read again for each connection.

    ca           PEM file of the authorities that are believed; "" = those of the system
    cert, key    PEM files that are shown to routers that ask who it is
    server_name  that the router's certificate must be for; "" = the host that is dialled
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError for what can't be read; blocks on file reads."""
        if bool(self.cert) != bool(self.key):
            raise ConfigError("a certificate and its key belong together: give both or neither")
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca) if self.ca else None,
            private_key=_read(self.key) if self.key else None,
            certificate_chain=_read(self.cert) if self.cert else None,
        )

    def options(self) -> list[tuple[str, str]]:
        """Of the channel: the name is checked although an address is dialled."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def worker_tls(tls: TlsConfig) -> ClientTls | None:
    """How a worker speaks to its routers; None: without TLS. Raises ConfigError for files that can't be used."""
    if not tls.ca_file:
        return None
    made = ClientTls(ca=tls.ca_file, cert=tls.cert_file, key=tls.key_file, server_name=tls.server_name)
    _check_pair(tls)
    made.credentials()
    return made


def server_credentials(tls: TlsConfig, ca_file: str) -> grpc.ServerCredentials | None:
    """Of a listener; None: without TLS. ca_file: whoever comes must show a certificate of these authorities; "" = none.

    Changed files count from the next connection on; ones that can't be used change nothing, and are told once.
    Raises ConfigError for files that can't be used; blocks on file reads.
    """
    if not tls.cert_file and not tls.key_file:
        if ca_file:
            raise ConfigError("tls.ca_file and tls.client_ca_file need tls.cert_file and tls.key_file")
        return None
    watch = FileWatch([Path(file) for file in (tls.cert_file, tls.key_file, ca_file) if file])

    def renewed() -> grpc.ServerCertificateConfiguration | None:  # on a thread of gRPC's
        if not watch.has_changed():
            return None
        try:
            configuration = _configuration(tls, ca_file)
        except ConfigError as error:
            log.error("certificates.unusable", error=str(error))
            return None
        log.info("certificates.changed", cert_file=tls.cert_file)
        return configuration

    fetch: Any = renewed  # None = no change, which the stubs don't know
    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls, ca_file), fetch, require_client_authentication=bool(ca_file)
    )


def server_context(tls: TlsConfig, ca_file: str) -> ssl.SSLContext | None:
    """The same for a listener of HTTP. Event-loop thread only, and blocks on file reads."""
    if not tls.cert_file and not tls.key_file:
        return None
    _check_pair(tls)
    watch = FileWatch([Path(file) for file in (tls.cert_file, tls.key_file, ca_file) if file])
    current = _context(tls, ca_file)

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
        nonlocal current
        if watch.has_changed():
            try:
                _check_pair(tls)
                current = _context(tls, ca_file)
                log.info("certificates.changed", cert_file=tls.cert_file)
            except ConfigError as error:
                log.error("certificates.unusable", error=str(error))
        connection.context = current

    listening = _context(tls, ca_file)
    listening.sni_callback = renew
    return listening


def _context(tls: TlsConfig, ca_file: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.load_into(context)
    if ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(ca_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{ca_file}: can't be used: {error}") from error
    return context


def _configuration(tls: TlsConfig, ca_file: str) -> grpc.ServerCertificateConfiguration:
    _check_pair(tls)
    pairs = [(_read(tls.key_file), _read(tls.cert_file))]
    return grpc.ssl_server_certificate_configuration(pairs, _read(ca_file) if ca_file else None)


def _check_pair(tls: TlsConfig) -> None:
    """gRPC says of a key that isn't the certificate's nothing but that a handshake failed."""
    if bool(tls.cert_file) != bool(tls.key_file):
        raise ConfigError("tls.cert_file and tls.key_file belong together: set both or neither")
    if not tls.cert_file:
        return
    _read(tls.cert_file), _read(tls.key_file)
    try:
        tls.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"tls.cert_file {tls.cert_file} and tls.key_file {tls.key_file} can't be used: {error}"
        ) from error


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from error
