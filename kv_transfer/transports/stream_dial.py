"""Opens a stream connection: the Unix socket if both are really on one host, else TCP.

Whether a path is shared can't be guessed from host names. So the file's name holds a nonce that its owner drew at
start, and on each connection the owner says the nonce first: a path that leads to somebody else (another pod's
volume, a leftover file) is found out, and TCP is tried.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from kv_transfer.transports.stream_tls import STREAM_TLS, TLS_SCHEME, LinkTls, TlsSocket, reason_of, refusal
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest
from pdserve.service.address import split_address

UNIX_SCHEME = "unix://"
TCP_SCHEME = "tcp://"
NONCE_CHARS = 16
GREETING_BYTES = 4 + NONCE_CHARS
_GREETING_WAIT_S = 1.0
_SOCKET_BUFFER_BYTES = 4 << 20

log = structlog.get_logger()


def greeting(nonce: str) -> bytes:
    """What the accepting side says first on a Unix socket."""
    return b"PDKV" + nonce.encode()


def nonce_of(path: str) -> str:
    """The nonce in a socket file's name, "….<nonce>.sock"."""
    return os.path.basename(path).removesuffix(".sock").rpartition(".")[2]


def tune(sock: socket.socket) -> None:
    """Non-blocking, large buffers (as far as the system lets), no delay for small frames."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One address to try."""

    address: str
    transport: str
    family: socket.AddressFamily
    target: str | tuple[str, int]


class StreamOpening:
    """Tries the addresses in order, without waiting; `turn` is called when the socket is ready.

    tls          with it, of TCP only addresses that speak TLS are tried; without, only those that don't
    watch, drop  make the network's poll look at a socket that is connecting (True: also for room to write)
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        prefer_unix: bool,
        strict: bool,
        clock: Clock,
        watch: Callable[[socket.socket, bool], None],
        drop: Callable[[socket.socket], None],
        tls: LinkTls | None = None,
    ) -> None:
        self.transport = ""
        self.address = addresses[0] if addresses else ""
        self._clock = clock
        self._watch = watch
        self._drop = drop
        self._tls = tls
        self._candidates, self._failures = _candidates(
            addresses, prefer_unix=prefer_unix, has_tls=tls is not None
        )
        if strict:
            del self._candidates[1:]
        self._sock: socket.socket | None = None
        self._is_connected = False
        self._greeting = b""
        self._greeting_by_s = 0.0

    def turn(self) -> socket.socket | str | None:
        """The connected socket; why none could be had; None: not yet. Raises Unauthenticated if TLS refused it."""
        while True:
            if not self._candidates:
                return "; ".join(self._failures) or "no address that this transport knows"
            try:
                if self._sock is None:
                    self._begin(self._candidates[0])
                if not (self._is_connected or self._connect()):
                    return None
                if not (self._greet() and self._secure()):
                    return None
            except ssl.SSLError as error:
                self._fail(reason_of(error))
                if not self._candidates:
                    raise refusal("; ".join(self._failures)) from error
                continue
            except OSError as error:
                self._fail(error.strerror or str(error))
                continue
            return self._opened()

    def next_due_s(self) -> float | None:
        """When the wait for a greeting ends. (Of a TLS handshake, the link says when it has taken too long.)"""
        is_awaited = self._sock is not None and self._is_connected and self.transport != STREAM_TLS
        return self._greeting_by_s if is_awaited else None

    def close(self) -> None:
        """Give up."""
        self._candidates.clear()
        self._let_go()

    def _begin(self, candidate: _Candidate) -> None:
        self.address, self.transport = candidate.address, candidate.transport
        self._is_connected, self._greeting = False, b""
        self._sock = socket.socket(candidate.family, socket.SOCK_STREAM)
        tune(self._sock)
        self._watch(self._sock, True)

    def _connect(self) -> bool:
        assert self._sock is not None
        code = self._sock.connect_ex(self._candidates[0].target)
        if code in (errno.EINPROGRESS, errno.EALREADY, errno.EINTR):
            return False
        if code not in (0, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        self._is_connected = True
        self._watch(self._sock, False)
        self._greeting_by_s = self._clock.now_s() + _GREETING_WAIT_S
        return True

    def _greet(self) -> bool:
        """Unix sockets: wait for the nonce. Raises OSError if it is another's."""
        assert self._sock is not None
        candidate = self._candidates[0]
        if candidate.family != socket.AF_UNIX:
            return True
        while len(self._greeting) < GREETING_BYTES:
            try:
                read = self._sock.recv(GREETING_BYTES - len(self._greeting))
            except BlockingIOError:
                if self._clock.now_s() >= self._greeting_by_s:
                    raise OSError("the path isn't shared: nobody greets there") from None
                return False
            if not read:
                raise OSError("the path isn't shared: closed before a greeting")
            self._greeting += read
        assert isinstance(candidate.target, str)
        if self._greeting != greeting(nonce_of(candidate.target)):
            raise OSError("the path isn't shared: another one answers there")
        return True

    def _secure(self) -> bool:
        """TLS: the handshake. Raises SSLError if the other side can't be believed, or doesn't believe this one."""
        if self.transport != STREAM_TLS:
            return True
        assert self._sock is not None and self._tls is not None
        if not isinstance(self._sock, TlsSocket):
            self._sock = self._tls.dialled(self._sock, self._candidates[0].target[0])
        return not self._sock.shakes_hands()

    def _opened(self) -> socket.socket:
        assert self._sock is not None
        sock, self._sock = self._sock, None
        if self._failures:
            log.info("link.fell_back", transport=self.transport, because="; ".join(self._failures))
        return sock

    def _fail(self, reason: str) -> None:
        candidate = self._candidates.pop(0)
        self._failures.append(f"{candidate.address}: {reason}")
        self._let_go()

    def _let_go(self) -> None:
        if self._sock is not None:
            self._drop(self._sock)
            self._sock.close()
            self._sock = None


def _candidates(
    addresses: Sequence[str], *, prefer_unix: bool, has_tls: bool
) -> tuple[list[_Candidate], list[str]]:
    """What of the addresses can be tried from here, the preferred first, and why others can't.

    A path that isn't here is no failure.
    """
    unix: list[_Candidate] = []
    tcp: list[_Candidate] = []
    failures: list[str] = []
    for address in addresses:
        if address.startswith(UNIX_SCHEME):
            path = address.removeprefix(UNIX_SCHEME)
            if prefer_unix and os.path.exists(path):
                unix.append(_Candidate(address, "stream-unix", socket.AF_UNIX, path))
        elif address.startswith((TCP_SCHEME, TLS_SCHEME)):
            candidate = _tcp_candidate(address)
            if candidate is None:
                continue
            if has_tls == (candidate.transport == STREAM_TLS):
                tcp.append(candidate)
            else:
                here, there = ("set", "not set") if has_tls else ("not set", "set")
                failures.append(f"{address}: transport.link_tls is {here} here and {there} there")
    return unix + tcp, failures


def _tcp_candidate(address: str) -> _Candidate | None:
    """Numeric hosts only: a name would have to be looked up, and that waits."""
    transport = STREAM_TLS if address.startswith(TLS_SCHEME) else "stream-tcp"
    try:
        host, port = split_address(address.removeprefix(TCP_SCHEME).removeprefix(TLS_SCHEME))
    except InvalidRequest:
        return None
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return _Candidate(address, transport, family, (host, port))
    return None
