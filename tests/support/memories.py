"""KV memories for tests: one that the host can't see, and one that holds copies for a faulty link."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from pdserve.engine.fake_runner import FakeDevice
from pdserve.engine.port import Runner
from pdserve.errors import InvariantViolated
from pdserve.kv_memory import XXH3_64, ByteSpan, KvMemory

_MAX_STAGED = 64
_FAR = 1 << 48


class DeviceMemory:
    """Memory of a device. Only what runs there (the engine, copies, sends and receives) may use `bytes`; the links
    know spans. checksums: of the kinds that the device computes. device: "cpu" = what it is told to be, so that the
    stream is offered for it, which posted links take the place of."""

    def __init__(
        self, num_bytes: int, checksums: tuple[str, ...] = (XXH3_64,), device: str = "device:0"
    ) -> None:
        self.num_bytes = num_bytes
        self.device = device
        self.checksums = checksums
        self.bytes = memoryview(bytearray(num_bytes))

    def view(self, span: ByteSpan) -> memoryview:
        raise InvariantViolated("the host can't see the memory of a device", span=span)

    def address(self, span: ByteSpan) -> int:
        raise InvariantViolated("the host can't see the memory of a device", span=span)

    def checksum(self, kind: str, span: ByteSpan) -> int:
        if kind not in self.checksums:
            raise InvariantViolated("a checksum that this memory doesn't offer", kind=kind)
        return xxh3_64_intdigest(self.bytes[span.start : span.end])

    def populate(self, end: int) -> bool:
        return False

    def export(self, transport: str) -> int | None:
        return None


class StagedMemory:
    """Another memory, and far behind its end what a network holds of it: copies of pieces as they were when sent.

    `at` is the way of whatever moves bytes in a test's network, whichever device they lie on. seen: the memory as its
    links see it, if that isn't `inner` itself.
    """

    def __init__(self, inner: FakeDevice, seen: KvMemory | None = None) -> None:
        self._seen: KvMemory = seen or inner
        self.num_bytes = inner.num_bytes
        self.device = inner.device
        self.checksums = self._seen.checksums
        self._inner = inner
        self._staged: dict[int, memoryview] = {}
        self._end = _FAR

    def stage(self, payload: bytes) -> ByteSpan:
        """Keep a copy; the oldest of many is forgotten."""
        span = ByteSpan(self._end, len(payload))
        self._end = span.end
        self._staged[span.start] = memoryview(payload)
        if len(self._staged) > _MAX_STAGED:
            del self._staged[next(iter(self._staged))]
        return span

    def is_staged(self, span: ByteSpan) -> bool:
        return span.start >= _FAR

    def at(self, span: ByteSpan) -> memoryview:
        """The bytes, wherever they lie."""
        if span.start >= self.num_bytes:
            return self.view(span)
        return self._inner.bytes[span.start : span.end]

    def view(self, span: ByteSpan) -> memoryview:
        return self._staged[span.start] if self.is_staged(span) else self._seen.view(span)

    def address(self, span: ByteSpan) -> int:
        return self._seen.address(span)

    def checksum(self, kind: str, span: ByteSpan) -> int | None:
        return self._seen.checksum(kind, span)

    def populate(self, end: int) -> bool:
        return self._seen.populate(end)

    def export(self, transport: str) -> int | None:
        return self._seen.export(transport)


def pool_bytes(runner: Runner) -> memoryview:
    """All of a runner's pool, which the host must see."""
    return runner.pool.view(ByteSpan(0, runner.pool.num_bytes))
