"""transformers' models of the packaged GGUF files, and what must be equal to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

NUM_POSITIONS = 48
LOGITS_WITHIN = 1e-3
MARGIN = 1e-3
"""Where the two best logits are closer, rounding may choose either: tokens are compared elsewhere."""


def load_reference(folder: Path) -> Any:
    """The model in float32, its weights from the GGUF file as the `gguf` package decodes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder))
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(reference_state(folder, config), strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    model.eval()
    return model


def reference_state(folder: Path, config: Any) -> dict[str, Tensor]:
    """The file's tensors under transformers' names, as they were before llama.cpp: Llama's rows, Gemma's norms."""
    is_gemma = config.model_type == "gemma3_text"
    heads = {} if is_gemma else {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    index = json.loads((folder / "tensors.json").read_text())
    raw = np.memmap(folder / index["file"], dtype=np.uint8, mode="r")
    state: dict[str, Tensor] = {}
    for name, entry in index["tensors"].items():
        stored = raw[entry["offset"] : entry["offset"] + entry["nbytes"]]
        kind = gguf.GGMLQuantizationType[entry["type"]]
        rows = stored.reshape(-1, stored.size // prod(entry["shape"][:-1]))
        values = np.array(gguf.dequantize(rows, kind), dtype=np.float32).reshape(entry["shape"])
        for part, count in heads.items():
            if name.endswith(f"{part}_proj.weight"):
                values = values.reshape(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if is_gemma and "norm" in name:
            values = values - np.float32(1.0)
        state[name] = torch.from_numpy(np.ascontiguousarray(values))
    return state


def reference_logits(model: Any, ids: Sequence[int], num_positions: int = NUM_POSITIONS) -> Tensor:
    """What the last tokens of `ids` were to be sampled from, by one pass: [num_positions, vocabulary] float32."""
    with torch.inference_mode():
        given: Tensor = model(torch.tensor([ids[:-1]]), logits_to_keep=num_positions).logits
    return given[0].to(torch.float32)
