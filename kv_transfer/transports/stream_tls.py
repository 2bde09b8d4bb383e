"""TLS of links over TCP: both ends show a certificate of the cluster's authorities, and believe only such.

The handshake is an Opening of the channel (stream_channel.py), so no frame passes before it is over. Afterwards the
socket is used like a plain one: it encrypts record by record (16 KiB) out of the pool, and decrypts into it.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog

from pdserve.errors import Unauthenticated
from pdserve.service.file_watch import FileWatch
from pdserve.service.settings import ConfigError
from pdserve.service.tls_config import TlsConfig

TLS_SCHEME = "tls://"
STREAM_TLS = "stream-tls"

log = structlog.get_logger()


class TlsSocket(ssl.SSLSocket):
    """A non-blocking TLS connection with the two gathered calls that a channel makes of a socket.

    A write that couldn't be finished must be repeated with the same bytes, at whatever address they lie then: the
    record that it became is encrypted already. A channel repeats its oldest segment, or a copy of it.
    """

    def sendmsg(self, buffers: Iterable[Any], *_beside: object) -> int:  # type: ignore[override]
        num_sent = 0
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                try:
                    sent = self.send(view)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if num_sent:
                        return num_sent
                    raise BlockingIOError from None
                except ssl.SSLError as error:
                    raise OSError(errno.EPROTO, reason_of(error)) from error
                num_sent += sent
                view = view[sent:]
        return num_sent

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Iterable[Any], _ancillary_bytes: int = 0, _flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        """Reads less than there is room for only if nothing more has come, as a plain socket does."""
        num_read = 0
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                try:
                    read = self.recv_into(view)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if num_read:
                        return num_read, [], 0, None
                    raise BlockingIOError from None
                except ssl.SSLError as error:
                    raise OSError(errno.EPROTO, reason_of(error)) from error
                if not read:
                    return num_read, [], 0, None
                num_read += read
                view = view[read:]
        return num_read, [], 0, None

    def shakes_hands(self) -> bool:
        """A step of the handshake; False once it is over. Raises SSLWant…, other SSLErrors, OSError."""
        try:
            self.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        return False


class LinkTls:
    """What this worker shows and believes; files that change count for the next connection.

    Transfer owner only, after construction. Looks at the files, and blocks on that, when a connection begins.
    Raises ConfigError if they aren't set or can't be used.
    """

    def __init__(self, tls: TlsConfig) -> None:
        if not (tls.cert_file and tls.key_file and tls.ca_file):
            raise ConfigError("transport.link_tls needs tls.cert_file, tls.key_file and tls.ca_file")
        self._tls = tls
        self._watch = FileWatch([Path(file) for file in (tls.cert_file, tls.key_file, tls.ca_file)])
        self._contexts = self._read()

    def dialled(self, sock: socket.socket, host: str) -> TlsSocket:
        """P: over a connection to this numeric host, whose certificate must be for the worker's name, or for it."""
        context = self._newest()[0]
        return _wrapped(context, sock, server_hostname=self._tls.worker_name or host)

    def accepted(self, sock: socket.socket) -> TlsSocket:
        return _wrapped(self._newest()[1], sock, server_side=True)

    def check_name(self, sock: TlsSocket) -> None:
        """D: OpenSSL compares names for diallers only. Raises Unauthenticated."""
        want = self._tls.worker_name.casefold()
        shown: dict[str, Any] = sock.getpeercert() or {}
        names = [str(name) for kind, name in shown.get("subjectAltName", ()) if kind == "DNS"]
        if want and want not in [name.casefold() for name in names]:
            raise refusal(f"its certificate is for {', '.join(names) or 'no name'}, not for {want}")

    def _newest(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        if self._watch.has_changed():
            try:
                self._contexts = self._read()
            except ConfigError as error:
                log.error("certificates.unusable", error=str(error))
            else:
                log.info("certificates.changed", cert_file=self._tls.cert_file)
        return self._contexts

    def _read(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return _context(self._tls, ssl.PROTOCOL_TLS_CLIENT), _context(self._tls, ssl.PROTOCOL_TLS_SERVER)


def _context(tls: TlsConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # no renegotiation: a write never waits for a read
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes
    try:
        tls.load_into(context)
        context.load_verify_locations(tls.ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"tls.cert_file {tls.cert_file}, tls.key_file {tls.key_file} and tls.ca_file {tls.ca_file} "
            f"can't be used: {error}"
        ) from error
    return context


def _wrapped(context: ssl.SSLContext, sock: socket.socket, **how: Any) -> TlsSocket:
    wrapped = context.wrap_socket(sock, do_handshake_on_connect=False, **how)
    assert isinstance(wrapped, TlsSocket)
    return wrapped


class TlsAccepting:
    """The handshake of a connection that somebody opened here, as an Opening of its channel.

    sock   plain and connected; this one's from now on
    drop   the socket is about to be closed
    """

    transport = STREAM_TLS

    def __init__(
        self, tls: LinkTls, sock: socket.socket, address: str, drop: Callable[[socket.socket], None]
    ) -> None:
        self.address = address
        self.sock = tls.accepted(sock)
        self._tls = tls
        self._drop = drop

    def turn(self) -> TlsSocket | str | None:
        """Raises Unauthenticated, with what is wrong; the other side hears only what TLS itself says."""
        try:
            if self.sock.shakes_hands():
                return None
            self._tls.check_name(self.sock)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return self._over("the peer closed before the end of the TLS handshake")
        except ssl.SSLError as error:
            raise self._refused(refusal(reason_of(error))) from error
        except Unauthenticated as error:
            raise self._refused(error) from None
        except OSError as error:
            return self._over(f"the TLS handshake failed: {error.strerror or error}")
        return self.sock

    def _over(self, reason: str) -> str:
        self.close()
        return reason

    def _refused(self, error: Unauthenticated) -> Unauthenticated:
        log.warning("link.tls_refused", address=self.address, reason=str(error))
        self.close()
        return error

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self._drop(self.sock)
            self.sock.close()


def refusal(reason: str) -> Unauthenticated:
    return Unauthenticated("the other worker can't be believed", field="tls.ca_file", reason=reason)


def reason_of(error: ssl.SSLError) -> str:
    """In words, without OpenSSL's file and line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't believed here: {error.verify_message}"
    words = str(error.reason or error).lower().replace("_", " ")
    if " alert " in words:
        return f"it refuses the TLS handshake: {words.rpartition(' alert ')[2]}"
    if words in ("wrong version number", "http request"):
        return "it doesn't speak TLS"
    return f"TLS: {words}"
