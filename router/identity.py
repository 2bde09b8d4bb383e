"""What all workers of a cluster must agree on, and the check of a Hello against it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from http_door.tools.detect import parsers_of
from pdserve.errors import Incompatible
from pdserve.messages import Hello
from pdserve.status import ModelInfo
from pdserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that this router serves, as the first worker told it. Whether two workers' layouts and wire
    versions fit is found out by their link's handshake."""

    model: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    cache_seed: bytes
    tp_size: int

    @classmethod
    def of(cls, hello: Hello) -> Self:
        """The identity that this worker brings."""
        return cls(*(getattr(hello, field.name) for field in fields(cls)))

    def told(self, tokenizer: Tokenizer, window_tokens: int) -> ModelInfo:
        """What clients may know of it."""
        return ModelInfo(
            model=self.model,
            window_tokens=window_tokens,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            has_chat_template=tokenizer.has_chat_template,
            weights_fingerprint=self.weights_fingerprint,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            **parsers_of(tokenizer.chat_templates),
        )

    def check(self, hello: Hello) -> None:
        """Raises Incompatible naming the first field that differs and both values."""
        for name in (field.name for field in fields(self)):
            ours, theirs = getattr(self, name), getattr(hello, name)
            if ours != theirs:
                raise Incompatible(
                    f"worker's {name} differs from the cluster's",
                    field=name,
                    worker=hello.worker.id,
                    theirs=_shown(theirs),
                    ours=_shown(ours),
                )


def check_hello(hello: Hello) -> None:
    """Raises Incompatible for a Hello that no router could work with."""
    for name in ("block_size", "num_blocks", "window_tokens", "vocab_size", "tp_size"):
        value = getattr(hello, name)
        if value < 1:
            raise Incompatible(
                f"worker's {name} must be at least 1",
                field=name,
                worker=hello.worker.id,
                theirs=value,
                ours="at least 1",
            )


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
