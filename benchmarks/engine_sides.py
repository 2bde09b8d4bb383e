"""The two sides of the engine benchmark: our runner and transformers' model, with the same few operations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.config_reader import load_config
from pdserve.engine.model_config import ModelConfig
from pdserve.engine.models import MODELS
from pdserve.engine.numerics import Precision
from pdserve.engine.port import Row, SampleSpec
from pdserve.engine.torch_runner import TorchRunner
from pdserve.engine.weights import Weights
from pdserve.kv_memory import ByteSpan
from pdserve.sampling import SampleKey, SamplingParams

GREEDY = SampleKey(
    params=SamplingParams(temperature=0), seed=0, choice=0, eos_token_ids=(), max_tokens=1 << 30
)
BLOCK_SIZE = 16


class Side(Protocol):
    """What is timed. `prefill` and `decode` do all the work of a step, the choice of the greedy token included."""

    def prefill(self, ids: Sequence[int]) -> int:
        """Compute a prompt from nothing; the first token."""
        ...

    def begin(self, batch: int, context: int) -> None:
        """Prepare `batch` sequences of `context` tokens, their KV filled with noise (its values cost nothing)."""
        ...

    def decode(self) -> None:
        """One token more for each of them."""
        ...


class Ours:
    """The engine's runner, prompts cut into chunks as the scheduler cuts them."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        num_threads: int,
        num_blocks: int,
        chunk_tokens: int,
        *,
        deterministic: bool = False,
        precision: Precision | None = None,
    ) -> None:
        self._chunk = chunk_tokens
        self.runner = TorchRunner(
            folder,
            dtype=dtype,
            deterministic=deterministic,
            num_threads=num_threads,
            num_blocks=num_blocks,
            kv_memory_bytes=0,
            block_size=BLOCK_SIZE,
            precision=precision,
        )
        self._ids: list[list[int]] = []
        self._tables: list[range] = []

    def prefill(self, ids: Sequence[int]) -> int:
        table = range(self.runner.layout.blocks_for(len(ids)))
        for start in range(0, len(ids), self._chunk):
            stop = min(start + self._chunk, len(ids))
            spec = SampleSpec(GREEDY, ids, len(ids)) if stop == len(ids) else None
            (output,) = self.runner.run([Row(ids[start:stop], start, table, spec)])
        assert output.token_id is not None
        return output.token_id

    def begin(self, batch: int, context: int) -> None:
        blocks_each = self.runner.layout.blocks_for(context) + 8
        self._tables = [range(index * blocks_each, (index + 1) * blocks_each) for index in range(batch)]
        self._ids = [[7] * (context + 1) for _ in range(batch)]
        used = self.runner.pool.view(ByteSpan(0, batch * blocks_each * self.runner.layout.block_bytes))
        dtype = torch.bfloat16 if self.runner.layout.dtype == "bfloat16" else torch.float32
        values = torch.frombuffer(used, dtype=dtype)
        values.normal_(generator=torch.Generator().manual_seed(1))

    def decode(self) -> None:
        rows = [
            Row(ids[-1:], len(ids) - 1, table, SampleSpec(GREEDY, ids, len(ids)))
            for ids, table in zip(self._ids, self._tables, strict=True)
        ]
        for ids, output in zip(self._ids, self.runner.run(rows), strict=True):
            assert output.token_id is not None
            ids.append(output.token_id)


class Theirs:
    """transformers' model with its default attention and growing cache, in a bare loop (less work than `generate`)."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._num_threads = num_threads
        self._dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        models: Any = AutoModelForCausalLM
        self._config: Any = AutoConfig.from_pretrained(str(folder))
        self._model = models.from_config(self._config, dtype=torch.float32)
        self._model.load_state_dict(_state(folder, load_config(folder, MODELS)), strict=False)
        self._model.to(self._dtype)
        self._model.tie_weights()
        self._model.eval()
        self._cache: Any = None
        self._last = torch.zeros(1, 1, dtype=torch.int64)

    def prefill(self, ids: Sequence[int]) -> int:
        return int(self._forward(torch.tensor([list(ids)]), self._new_cache())[0])

    def begin(self, batch: int, context: int) -> None:
        generator = torch.Generator().manual_seed(1)
        head_dim = self._config.hidden_size // self._config.num_attention_heads
        shape = (batch, self._config.num_key_value_heads, context, head_dim)
        self._cache = self._new_cache()
        for layer in range(self._config.num_hidden_layers):
            keys, values = (torch.randn(shape, generator=generator).to(self._dtype) for _ in range(2))
            self._cache.update(keys, values, layer)
        self._last = torch.full((batch, 1), 7)

    def decode(self) -> None:
        self._last = self._forward(self._last, self._cache).view(-1, 1)

    def _forward(self, ids: Tensor, cache: Any) -> Tensor:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            given = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            best: Tensor = given.logits[:, -1].argmax(dim=-1)
        return best

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._config)


def _state(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """All weights under their Hugging Face names, float32."""
    weights = Weights(folder, config)
    return {name: weights.load(name, weights.shape(name)).to(torch.float32) for name in weights.names()}


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids that no cache has seen."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, length)]
