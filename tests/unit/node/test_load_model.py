"""What a worker makes of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.node.load import LoadProgress, load_model
from pdserve.service.config import load
from pdserve.tokenizer import Tokenizer
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_torch.random_model import write_random_model


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({"eos_token_id": 7}, '{"eos_token_id": [5, 6]}', (5, 6, 256)),
        ({"eos_token_id": 7}, '{"temperature": 0.6, "top_p": 0.9}', (7, 256)),
        ({"eos_token_id": None}, None, (256,)),
    ],  # 256 is the token that tokenizer_config.json names
)
def test_texts_end_as_the_tokenizer_of_the_folder_says(
    config: dict[str, Any], generation: str | None, want: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_random_model(tmp_path / "m", **config)
    for name, content in Tokenizer.fake().files.items():
        (folder / name).write_bytes(content)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    clock = VirtualClock()
    settings = load(flags={"worker.model": str(folder), "engine.num_blocks": 4, "engine.dtype": "float32"})
    model = load_model(settings, LoadProgress(clock, lambda state: None, None), clock)
    assert model.eos_token_ids == Tokenizer.load(folder).eos_token_ids == want
