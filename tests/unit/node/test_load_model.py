"""What a worker makes of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.errors import Incompatible
from pdserve.node.load import LoadProgress, load_model, verify_for_gpu
from pdserve.node.ranks import verify_for_ranks
from pdserve.service.config import load
from pdserve.service.settings import ConfigError
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "m")
    for name, content in Tokenizer.fake().files.items():
        (folder / name).write_bytes(content)
    clock = VirtualClock()
    settings = load(flags={"worker.model": str(folder), "engine.device": "cuda:1"})
    with pytest.raises(Incompatible, match=r"names a GPU that isn't there .*device=cuda:1"):
        load_model(settings, LoadProgress(clock, lambda state: None, None), clock)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine.deterministic": True}, "deterministic"),
        ({"engine.linear": "onednn"}, "linear=onednn"),
        ({"engine.kernels": "native"}, "kernels=native"),
        ({"engine.kernel_variant": "avx2"}, "kernel_variant=avx2"),
        ({"worker.role": "prefill", "transport.kinds": "memfd"}, "add one to transport.kinds.*kinds=memfd"),
    ],
)
def test_settings_of_cpus_are_refused_on_a_gpu(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Incompatible, match=words):
        verify_for_gpu(load(flags=settings))


def test_8_bits_need_a_gpu(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "m")
    for name, content in Tokenizer.fake().files.items():
        (folder / name).write_bytes(content)
    clock = VirtualClock()
    settings = load(flags={"worker.model": str(folder), "engine.device": "cpu", "engine.kv_dtype": "fp8"})
    with pytest.raises(Incompatible, match="kv_dtype needs a GPU"):
        load_model(settings, LoadProgress(clock, lambda state: None, None), clock)


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:1,cuda:2", ""])
def test_devices_have_names(text: str) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, or cuda:N"):
        load(flags={"engine.device": text})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine.kind": "fake"}, "the fake engine has none"),
    ],
)
def test_settings_that_several_ranks_cannot_keep(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Incompatible, match=words):
        verify_for_ranks(load(flags={"engine.tensor_parallel": 2, **settings}))


@pytest.mark.parametrize("kinds", ["cuda_ipc,stream", "nccl,stream", "nccl"])
def test_pools_of_several_gpus_go_through_the_host(kinds: str) -> None:
    with pytest.raises(Incompatible, match=r"stream alone.*tensor_parallel=2"):
        verify_for_gpu(load(flags={"engine.tensor_parallel": 2, "transport.kinds": kinds}))
    verify_for_gpu(load(flags={"engine.tensor_parallel": 2, "transport.kinds": "stream,memfd"}))
