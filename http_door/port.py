"""What the HTTP door needs of whoever serves: a router's own app, or a client of several routers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from pdserve.request import Chat, Event, GenerateRequest
from pdserve.status import ClusterStatus, ModelInfo

T = TypeVar("T")

KEY_HEADER = "authorization"
METADATA = (KEY_HEADER, "traceparent", "tracestate")  # headers that go on as metadata of a call


class Purpose(Enum):
    """What a call is for, hence what of its key's limits it uses up, and whether it needs a place."""

    GENERATE = "generate"
    TEXT = "text"  # ids and texts, for which no worker is asked
    LOOK = "look"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, before anything of its body has been read.

    metadata  its headers of METADATA, names in small letters
    peer      the address that it came from
    """

    purpose: Purpose
    metadata: tuple[tuple[str, str], ...] = ()
    peer: str = ""


class Visit(Protocol):
    """What one call may ask for. Every method raises errors of pdserve.errors."""

    @property
    def asker(self) -> str:
        """Whose turn it takes where turns are taken."""
        ...

    async def read(self, work: Callable[[], T], num_bytes: int) -> T:
        """Do something that would hold up the loop, in this asker's turn, and beside the loop if it is much."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Events of one request, which is checked here. Closing the generator ends the request."""
        ...

    async def tokenize(self, source: str | Chat) -> tuple[int, ...]:
        """Ids of a text, or of a chat by the model's template."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ids."""
        ...

    async def token_bytes(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """What each of these ids adds to a text by itself; of a special token, how it is written."""
        ...

    async def model(self) -> ModelInfo:
        """The model that is served."""
        ...

    async def status(self, *, explain: bool = False) -> ClusterStatus:
        """Workers, pairs and queue, as far as the caller may see them."""
        ...


class Backend(Protocol):
    """Event-loop thread only."""

    def visit(self, call: Call) -> AbstractContextManager[Visit]:
        """For as long as the call lasts; raises Unauthenticated, Overloaded or Draining before its body is read."""
        ...

    def not_ready(self) -> Sequence[str]:
        """Why no request would be served now; nothing = one would be."""
        ...

    def metrics(self, call: Call) -> bytes:
        """All metrics of the process, as Prometheus reads them. Raises Unauthenticated, PermissionDenied."""
        ...
