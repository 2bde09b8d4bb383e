"""The settings of a router, a table of the configuration (config.py)."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.fields import plain_id, setting
from pdserve.service.address import verify_address, verify_address_or_none
from pdserve.service.settings import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The door, the queue and the attempts."""

    id: str = setting("", "name of this router in logs and sessions; empty = drawn at start", verify=plain_id)
    listen: str = setting(
        "127.0.0.1:50051", "address where clients reach it; port 0 = a free one", verify=verify_address
    )
    workers_listen: str = setting(
        "",
        "address where workers and operators reach it; empty = 127.0.0.1, at the port after the clients'",
        verify=verify_address_or_none,
    )
    keys_file: str = setting(
        "",
        "API keys (`pdserve keys`), one of which clients must have; empty = clients aren't asked who they are",
    )
    tenants_share_cache: bool = setting(
        False,
        "let tenants of the keys file hit each other's prefix cache entries, which tells what others have asked",
    )
    model: str = setting(
        "", "tokenizer of this alias, folder or .gguf file; empty = the first worker sends its own"
    )
    drain_delay_s: float = setting(
        0.0,
        "how long a router that was asked to stop still takes requests, while it says that it isn't ready: what "
        "balances load between routers learns of that late",
        unit="s",
        least=0.0,
        most=600.0,
    )
    max_queued_requests: int = setting(1024, "requests that may wait; any more are refused at once", least=1)
    max_attempts: int = setting(3, "attempts of a request that may end because of a fault", least=1, most=100)
    replays_per_prefill: int = setting(2, "replays at once per prefill worker", least=1)
    pairs_per_prefill: int = setting(8, "decode workers that each prefill worker is paired with", least=1)
    allow_local_prefill: bool = setting(
        False, "let decode workers prefill for themselves when that is faster, or when nobody else can"
    )
    remote_prefill_tokens: int = setting(
        2048,
        "prompts of this many uncached tokens always go to a prefill worker if there is one; 0 = the estimate decides",
        unit="tokens",
        least=0,
    )
    max_request_bytes: int = setting(
        4 << 20, "largest message of a client", unit="bytes", least=1 << 16, most=1 << 30
    )
    max_reading_bytes: int = setting(
        64 << 20,
        "bytes of requests parsed, rendered, tokenized, or waiting for it; above that a user has an even share",
        unit="bytes",
        least=1 << 20,
    )
    max_receiving_bytes: int = setting(
        256 << 20, "messages coming in at once; beyond, slow ones are refused", unit="bytes", least=1 << 20
    )
    max_shared_calls: int = setting(
        32, "GenerateMany calls at a time; each may hold a message of twice max_request_bytes", least=1
    )
    max_message_bytes: int = setting(
        64 << 20, "largest message between routers and workers", unit="bytes", least=1 << 16
    )

    def __post_init__(self) -> None:
        check_fields("router", self)
