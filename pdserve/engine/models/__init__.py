"""The models that are built in, by the names that config.json calls them."""

from __future__ import annotations

from pdserve.engine.models.decoder import ModelClass
from pdserve.engine.models.llama import LlamaModel

MODELS: dict[str, ModelClass] = {"LlamaForCausalLM": LlamaModel}
