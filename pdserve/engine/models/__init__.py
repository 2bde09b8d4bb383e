"""The models that are built in, by the names that config.json calls them."""

from __future__ import annotations

from pdserve.engine.models.family import Family
from pdserve.engine.models.gemma3 import GEMMA3
from pdserve.engine.models.llama import LLAMA
from pdserve.engine.models.mistral import MISTRAL
from pdserve.engine.models.mixtral import MIXTRAL
from pdserve.engine.models.phi3 import PHI3
from pdserve.engine.models.qwen2 import QWEN2
from pdserve.engine.models.qwen3 import QWEN3
from pdserve.engine.models.qwen3_moe import QWEN3_MOE

MODELS: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Phi3ForCausalLM": PHI3,
}
