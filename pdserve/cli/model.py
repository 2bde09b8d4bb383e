"""`pdserve model inspect`: what is in a model."""

from __future__ import annotations

import argparse
import dataclasses
import json

DESCRIPTION = """\
Prints what a model is: architecture, size, weights' types, KV bytes a token, tokenizer, chat template. Nothing is
loaded, but the heads of all files are read and checked: what is missing, cut short, of another shape than the config
says, or asks for what the engine can't do, is reported in one line. A .gguf file is imported into the cache first, if
it isn't there yet.
"""
_BLOCK_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`inspect` is the only thing to do yet."""
    parser.add_argument("action", choices=["inspect"], help="what to do")
    parser.add_argument("model", metavar="M", help="fetched alias, Hugging Face folder, or .gguf file")
    parser.add_argument(
        "--memory-gib", type=float, default=1.0, metavar="N", help="KV memory to count blocks for (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    from pdserve.engine.config_reader import load_config
    from pdserve.engine.models import MODELS
    from pdserve.engine.parallel.shard import possible_sizes
    from pdserve.modelstore import resolve
    from pdserve.modelstore.model_facts import read_facts
    from pdserve.tokenizer import Tokenizer

    folder = resolve(arguments.model)
    facts = read_facts(folder)
    config = load_config(folder, MODELS)
    facts = dataclasses.replace(facts, window_tokens=config.max_positions, sliding_window=max(config.windows))
    tokenizer = Tokenizer.load(folder)
    memory_bytes = int(arguments.memory_gib * (1 << 30))
    report = {
        "folder": str(folder),
        **dataclasses.asdict(facts),
        "sliding_layers": [layer for layer, window in enumerate(config.windows) if window],
        "rope": config.rope.kind,
        "tensor_parallel": possible_sizes(config),
        "blocks_in_memory": {
            dtype: facts.num_blocks(memory_bytes, _BLOCK_SIZE, dtype) for dtype in facts.kv_bytes_per_token
        },
        "tokenizer_vocab_size": tokenizer.vocab_size,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "special_tokens": tokenizer.special_tokens,
        "has_chat_template": tokenizer.has_chat_template,
        "chat_templates": tokenizer.chat_templates,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    if arguments.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    sizes = {name: f"{len(source):,} characters" for name, source in tokenizer.chat_templates.items()}
    for name, value in {**report, "chat_templates": sizes}.items():
        print(f"{_label(name, arguments.memory_gib):<38} {_text(value)}")
    for name, source in tokenizer.chat_templates.items():
        print(f"\nchat template {name}:\n{source.rstrip()}")
    return 0


def _label(name: str, memory_gib: float) -> str:
    if name == "blocks_in_memory":
        return f"blocks of {_BLOCK_SIZE} tokens in {memory_gib:g} GiB"
    return name.replace("num_", "").replace("_", " ").replace("kv ", "KV ")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) or "–"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
