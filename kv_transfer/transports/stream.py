"""The stream network: Unix and TCP sockets on one selector, for any hosts."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Sequence

import structlog

from kv_transfer.transports.cuda_ipc import IpcDevice
from kv_transfer.transports.selector_waiter import SelectorWaiter
from kv_transfer.transports.stream_channel import StreamChannel
from kv_transfer.transports.stream_dial import TCP_SCHEME, StreamOpening, greeting, tune
from kv_transfer.transports.stream_tls import TLS_SCHEME, LinkTls, TlsAccepting
from kv_transfer.transports.unix_listener import UnixListener
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest
from pdserve.ids import Random
from pdserve.kv_memory import KvMemory
from pdserve.service.address import join_address, split_address

_BACKLOG = 64
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.5  # of a listener for whose connections nothing is left

log = structlog.get_logger()


class StreamNetwork:
    """The transfer owner's thread only, after construction; but `waiter().wake` may be called by any.

    memory       of the pool that pieces leave and reach; the host must see it
    kv_listen    "host:port" with a numeric host; port 0 = a free one
    kv_announce  the numeric host that others are told; "" = the one bound (which then must not be 0.0.0.0 or ::)
    unix_dir     folder for the socket file; "" = a private one; None = no Unix socket
    tls          of TCP connections, all of them; None = without
    ipc          passes the memory over Unix connections, on a device; None = by its memfd
    Raises InvalidRequest if it can't listen.
    """

    def __init__(
        self,
        *,
        memory: KvMemory,
        kv_listen: str,
        unix_dir: str | None,
        prefer_unix: bool,
        strict: bool,
        clock: Clock,
        random: Random,
        kv_announce: str = "",
        tls: LinkTls | None = None,
        ipc: IpcDevice | None = None,
    ) -> None:
        self._memory = memory
        self._ipc = ipc
        self._prefer_unix = prefer_unix
        self._strict = strict
        self._tls = tls
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._waiter = SelectorWaiter(self._selector)
        self._openings: dict[StreamChannel, StreamOpening] = {}
        self._accepted: list[StreamChannel] = []
        self._paused: dict[socket.socket, float] = {}  # listeners, and when they are looked at again
        self._tcp = _listen_tcp(kv_listen)
        self._selector.register(self._tcp, selectors.EVENT_READ, self._tcp)
        self._unix = UnixListener.open(unix_dir, random) if unix_dir is not None and prefer_unix else None
        self._addresses: tuple[str, ...] = (self._scheme + _announced(self._tcp, kv_announce),)
        if self._unix is not None:
            self._selector.register(self._unix.sock, selectors.EVENT_READ, self._unix.sock)
            self._addresses = (self._unix.address, *self._addresses)

    @property
    def _scheme(self) -> str:
        """Says before any connection whether this end speaks TLS: no worker dials one that is as it isn't itself."""
        return TCP_SCHEME if self._tls is None else TLS_SCHEME

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def waiter(self) -> SelectorWaiter:
        """What a ThreadDriver waits on between turns."""
        return self._waiter

    def dial(self, addresses: Sequence[str]) -> StreamChannel:
        channel = self._channel()
        opening = StreamOpening(
            addresses,
            prefer_unix=self._prefer_unix,
            strict=self._strict,
            clock=self._clock,
            watch=lambda sock, wanted: self.want_write(channel, sock, wanted=wanted),
            drop=self.drop,
            tls=self._tls,
        )
        channel.open_by(opening)
        self._openings[channel] = opening
        return channel

    def _channel(self) -> StreamChannel:
        return StreamChannel(self, self._memory, None if self._ipc is None else self._ipc.share)

    def accept(self) -> list[StreamChannel]:
        accepted, self._accepted = self._accepted, []
        return accepted

    def poll(self) -> None:
        """Raises InvariantViolated when a device can't be trusted with memory any longer."""
        now_s = self._clock.now_s()
        if self._ipc is not None:
            self._ipc.poll()
        for listener in [each for each, again_s in self._paused.items() if again_s <= now_s]:
            del self._paused[listener]
            self._selector.register(listener, selectors.EVENT_READ, listener)
        for key, events in self._selector.select(0):
            if isinstance(key.data, StreamChannel):
                key.data.is_readable = key.data.is_readable or bool(events & selectors.EVENT_READ)
                key.data.is_writable = key.data.is_writable or bool(events & selectors.EVENT_WRITE)
            elif isinstance(key.data, socket.socket):
                self._accept_from(key.data)

    def next_due_s(self) -> float | None:
        """While a connection opens, a listener pauses, or a device copies, when the next wait ends."""
        self._openings = {
            channel: opening
            for channel, opening in self._openings.items()
            if not channel.transport and channel.closed_reason is None
        }
        dues = [opening.next_due_s() for opening in self._openings.values()]
        if self._ipc is not None:
            dues.append(self._ipc.next_due_s())
        return min((due_s for due_s in (*dues, *self._paused.values()) if due_s is not None), default=None)

    def close(self) -> None:
        self._tcp.close()
        if self._unix is not None:
            self._unix.close()
        self._selector.close()
        self._waiter.close()

    # --- what channels tell the selector

    def want_write(self, channel: StreamChannel, sock: socket.socket, *, wanted: bool) -> None:
        """Watch for room to write only while something waits to be written."""
        self._watch(channel, sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0))

    def drop(self, sock: socket.socket) -> None:
        """The socket is about to be closed."""
        if self._selector.get_map() and sock in self._selector.get_map():
            self._selector.unregister(sock)

    def _watch(self, channel: StreamChannel, sock: socket.socket, events: int) -> None:
        key = self._selector.get_map().get(sock)
        if key is None:
            self._selector.register(sock, events, channel)
        elif key.events != events:
            self._selector.modify(sock, events, channel)

    def _accept_from(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _address = listener.accept()
                tune(sock)
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("link.accept_failed", error=error.strerror)
                if error.errno in _OUT_OF:
                    # The connection stays in the backlog, so the selector would wake the owner again and again.
                    self._selector.unregister(listener)
                    self._paused[listener] = self._clock.now_s() + _PAUSE_S
                return
            channel = self._channel()
            if sock.family == socket.AF_UNIX:
                assert self._unix is not None
                channel.start(sock, "stream-unix", self._unix.address)
                channel.send(greeting(self._unix.nonce))
            elif self._tls is None:
                channel.start(sock, "stream-tcp", TCP_SCHEME + _peer_name(sock))
            else:
                accepting = TlsAccepting(self._tls, sock, self._scheme + _peer_name(sock), self.drop)
                channel.open_by(accepting, accepting.transport)
                sock = accepting.sock
            self._watch(channel, sock, selectors.EVENT_READ)
            channel.flush()
            self._accepted.append(channel)


def _listen_tcp(kv_listen: str) -> socket.socket:
    host, port = split_address(kv_listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise InvalidRequest(
            "can't listen for links", kv_listen=kv_listen, error=error.strerror or error
        ) from error
    return sock


def _announced(sock: socket.socket, kv_announce: str) -> str:
    host, port = sock.getsockname()[:2]
    if not kv_announce and host in ("0.0.0.0", "::"):
        raise InvalidRequest("kv_listen must name one address of this host", kv_listen=host)
    return join_address(kv_announce or host, port)


def _peer_name(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "gone"
    return join_address(host, port)
