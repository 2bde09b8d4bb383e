"""A random Llama with a tokenizer of bytes: nothing is fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

_SEED = 1
_WINDOW = 16_384


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Of a Llama, with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def num_weights(self) -> int:
        """That a token is multiplied with."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden


LARGE = LlamaShape(hidden=2048, layers=12, heads=32, kv_heads=8, inner=8192, vocab=32_000)
SMALL = LlamaShape(hidden=64, layers=2, heads=4, kv_heads=2, inner=128, vocab=512)


def random_llama(folder: Path, shape: LlamaShape) -> Path:
    """Writes it, unless an earlier step has. Weights are bfloat16."""
    made = folder / f"llama-{shape.hidden}"
    if (made / "done").exists():
        return made
    made.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.inner, "vocab_size": shape.vocab,
        "max_position_embeddings": _WINDOW, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    save_file(_weights(shape), made / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(made, shape.vocab)
    (made / "done").touch()
    return made


def _weights(shape: LlamaShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(_SEED)

    def matrix(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return drawn.mul_(columns**-0.5).to(torch.bfloat16)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    found = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", queries, shape.hidden),
            ("self_attn.k_proj", keys, shape.hidden),
            ("self_attn.v_proj", keys, shape.hidden),
            ("self_attn.o_proj", shape.hidden, queries),
            ("mlp.gate_proj", shape.inner, shape.hidden),
            ("mlp.up_proj", shape.inner, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.inner),
        ):
            found[f"{at}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = ones.clone()
    return found


def _save_tokenizer(folder: Path, vocab: int) -> None:
    """Bytes, two special tokens, and names for the rest."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += ["<s>", "</s>"] + [f"<{number}>" for number in range(258, vocab)]
    tokenizer = Tokenizer(BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
