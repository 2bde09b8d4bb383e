"""The packaged model and its reference, loaded once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.reference.llama_reference import load_reference
from tests.support.packaged import packaged


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the packaged model."""
    return packaged("smollm2-135m")


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Any:
    """transformers' model in float32."""
    return load_reference(smollm2)


@pytest.fixture(scope="session")
def reference_tokenizer(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' tokenizer of the same GGUF file, with the words of the model's own tokenizer.json."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    alone = tmp_path_factory.mktemp("gguf")  # apart from our tokenizer.json
    os.symlink(smollm2 / "weights.gguf", alone / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(str(alone), gguf_file="model.gguf")
    # Its import of GGUF files doesn't know that SmolLM2's digits are words of their own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer
