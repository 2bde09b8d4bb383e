"""Quantised folders that can't be read: one line that names what, before anything is loaded; never other numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.config_reader import load_config
from pdserve.engine.models import MODELS
from pdserve.engine.weights import Weights
from pdserve.errors import Incompatible
from pdserve.modelstore.model_facts import read_facts
from pdserve.modelstore.quantisation_config import read_quantisation
from tests.support.hf_quantised import FORMATS, quantisation_config, quantise
from tests.unit.engine_torch.random_model import write_random_model

DOWN = "model.layers.1.mlp.down_proj"


def ct(**weights: Any) -> dict[str, Any]:
    config = quantisation_config(FORMATS["ct w4a16 g32"])
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def ct_group(**changes: Any) -> dict[str, Any]:
    config = ct()
    config["config_groups"]["group_0"] |= changes
    return config


GPTQ, AWQ = quantisation_config(FORMATS["gptq int4 g32"]), quantisation_config(FORMATS["awq int4 g32"])


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("gptq", "needs an object here (key=quantization_config, got=gptq"),
        ({"bits": 4}, "quantisation=None, supported=compressed-tensors, gptq, awq, fp8, fbgemm_fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantisation=bitsandbytes"),
        ({"quant_method": "mxfp4"}, "quantisation=mxfp4"),
        ({"quant_method": ["gptq"]}, "quantisation=['gptq']"),
        (GPTQ | {"bits": 3}, "key=bits, got=3, supported=4, 8"),
        (GPTQ | {"bits": 2}, "key=bits, got=2, supported=4, 8"),
        (GPTQ | {"bits": True}, "key=bits, got=True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "key=checkpoint_format, got=marlin"),
        (GPTQ | {"group_size": 0}, "key=group_size, got=0"),
        (GPTQ | {"group_size": "all"}, "key=group_size, got=all"),
        (AWQ | {"version": "gemv"}, "key=version, got=gemv"),
        (AWQ | {"version": None}, "key=version, got=None"),
        (AWQ | {"zero_point": False}, "key=zero_point, got=False"),
        (AWQ | {"bits": 8}, "key=bits, got=8, supported=4"),
        (ct() | {"format": "marlin-24"}, "key=format, got=marlin-24"),
        (ct() | {"format": "nvfp4-pack-quantized"}, "key=format, got=nvfp4-pack-quantized"),
        (ct() | {"format": "sparse-24-bitmask"}, "key=format, got=sparse-24-bitmask"),
        (ct() | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse weights are not supported"),
        (ct() | {"transform_config": {"config_groups": {"u": {}}}}, "transforms of activations"),
        (ct() | {"config_groups": []} | {"config_groups": [1]}, "key=config_groups, got=[1]"),
        (ct() | {"config_groups": {"a": 1}}, "key=config_groups.a.weights"),
        (ct(num_bits=3), "key=num_bits, got=3"),
        (ct(type="nf"), "key=type, got=nf"),
        (ct(type="float"), "floats other than e4m3"),
        (ct(strategy="tensor_group"), "key=strategy, got=tensor_group"),
        (ct(strategy="block", block_structure=[128]), "key=block_structure, got=[128]"),
        (ct_group(format="mxfp4-pack-quantized"), "key=format, got=mxfp4-pack-quantized"),
        (
            ct_group(input_activations={"num_bits": 8, "dynamic": False}),
            "activations with scales of their own",
        ),
        (ct_group(output_activations={"num_bits": 8}), "quantised results of products"),
        (ct(group_size="x"), "key=group_size, got=x"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "key=fmt, got=e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "key=weight_block_size, got=[128, 0]"),
    ],
)
def test_what_a_config_may_not_say(section: Any, said: str) -> None:
    with pytest.raises(Incompatible) as caught:
        read_quantisation({"quantization_config": section})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("section", [None, {}])
def test_no_quantisation(section: Any) -> None:
    assert read_quantisation({"quantization_config": section}) is None


def test_what_is_said_of_a_folder(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, seed=2)
    quantise(folder, FORMATS["gptq int4 g32"], keep=lambda module: module == DOWN)
    facts = read_facts(folder)
    assert facts.tensor_types == {"int4 g32 (gptq)": 13, "F32": 7}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("ct w4a16 channel", "int4 channel (compressed-tensors)"),
        ("ct fp8 tensor", "fp8 tensor (compressed-tensors)"),
        ("fp8 blocks", "fp8 128x128 (fp8)"),
        ("awq int4 g32", "int4 g32 (awq)"),
    ],
)
def test_kinds_have_names(form: str, kind: str, tmp_path: Path) -> None:
    quantise(write_random_model(tmp_path, seed=2), FORMATS[form])
    assert kind in read_facts(tmp_path).tensor_types


def test_a_last_group_that_is_shorter(tmp_path: Path) -> None:
    """160 columns in groups of 128: two groups, but not of 80."""
    form = replace(FORMATS["gptq int4 g32 asym"], group=128)
    wanted = quantise(write_random_model(tmp_path, seed=2), form)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{DOWN}.g_idx"]
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, load_config(tmp_path, MODELS))
    got = weights.matrix(f"{DOWN}.weight", (96, 160))
    assert torch.equal(got.values(), wanted[f"{DOWN}.weight"])


def test_a_module_with_a_rule_of_its_own(tmp_path: Path) -> None:
    """GPTQ's `dynamic`: other bits and groups for some; the tensors say which."""
    folder = write_random_model(tmp_path / "m", seed=2)
    wanted = quantise(folder, FORMATS["gptq int4 g32"])
    other = quantise(write_random_model(tmp_path / "o", seed=2), replace(FORMATS["gptq int8 g32"], group=80))
    tensors = load_file(folder / "model.safetensors")
    own = load_file(tmp_path / "o" / "model.safetensors")
    tensors |= {name: tensor for name, tensor in own.items() if name.startswith(DOWN)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        Incompatible, match=rf"not stored as config.json says \(tensor={DOWN}.qweight, got=int8"
    ):
        read_facts(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r"+:.*\.1\.mlp\.down_proj": {"bits": 8, "group_size": 80}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = Weights(folder, load_config(folder, MODELS))
    assert torch.equal(weights.matrix(f"{DOWN}.weight", (96, 160)).values(), other[f"{DOWN}.weight"])
    up = DOWN.replace("down", "up") + ".weight"
    assert torch.equal(weights.matrix(up, (160, 96)).values(), wanted[up])


def broken(folder: Path, form: str, change: Callable[[dict[str, Tensor]], Any]) -> str:
    quantise(write_random_model(folder, seed=2), FORMATS[form])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(Incompatible) as caught:
        read_facts(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "part", "value", "said"),
    [
        ("ct w4a16 g32", "weight_scale", None, "lacks a tensor (tensor={}.weight_scale"),
        ("ct w4a16 g32", "weight_shape", None, "lacks a tensor (tensor={}.weight_shape"),
        ("ct w4a16 g32", "weight_shape", torch.tensor([96, -160]), "no shape of a matrix"),
        ("ct w4a16 g32", "weight_shape", torch.tensor([96, 168]), "don't fit their shape"),
        ("ct w4a16 g32", "weight_scale", torch.ones(96, 7), "scales don't fit a matrix"),
        ("ct w4a16 g32", "weight_global_scale", torch.ones(1), "floats of 4 bits"),
        ("ct w4a16 g32 asym", "weight_zero_point", torch.ones(3, 5, dtype=torch.int32), "don't fit together"),
        ("ct w4a16 g32", "weight_scale", torch.ones(96, 4), "scales don't fit a matrix"),
        ("ct w8a8", "weight", torch.ones(4, 4, 4, dtype=torch.int8), "must be matrices"),
        ("ct w8a8", "weight", torch.ones(96, 160).to(torch.float8_e4m3fn), "not stored as config.json says"),
        ("gptq int4 g32", "scales", torch.ones(5, 96, dtype=torch.int32), "isn't what its name says"),
        ("gptq int4 g32", "qzeros", torch.ones(5, 9, dtype=torch.int32), "don't fit together"),
        ("gptq int4 g32", "qzeros", torch.ones(5, 24, dtype=torch.int32), "not stored as config.json says"),
        ("gptq int4 g32", "g_idx", torch.ones(7, dtype=torch.int32), "don't fit together"),
        ("gptq int4 g32", "qweight", torch.ones(16, 96, dtype=torch.int32), "groups don't fit a matrix"),
        ("awq int4 g32", "qweight", torch.ones(160, 96, dtype=torch.int32), "don't fit together"),
        ("fp8 blocks", "weight_scale_inv", torch.ones(3, 3), "scales don't fit a matrix"),
        ("fp8 blocks", "weight_scale_inv", None, "lacks a tensor (tensor={}.weight_scale_inv"),
    ],
)
def test_tensors_that_do_not_fit(
    form: str, part: str, value: Tensor | None, said: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{DOWN}.{part}", None)
        if value is not None:
            tensors[f"{DOWN}.{part}"] = value

    assert said.format(DOWN) in broken(tmp_path, form, change)


def test_codes_that_nothing_explains(tmp_path: Path) -> None:
    """Without the section of config.json, they are no weights."""
    folder = write_random_model(tmp_path, seed=2)
    quantise(folder, FORMATS["gptq int4 g32"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Incompatible, match=r"this type are not supported \(tensor=.*got=I32"):
        read_facts(folder)


def test_a_column_of_no_group(tmp_path: Path) -> None:
    """Only the content says so: a line when it is loaded."""
    folder = write_random_model(tmp_path, seed=2)
    quantise(folder, FORMATS["gptq int4 g32"])
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.g_idx"][3] = 5
    save_file(tensors, folder / "model.safetensors")
    weights = Weights(folder, load_config(folder, MODELS))
    with pytest.raises(Incompatible, match=rf"a group that there isn't \(tensor={DOWN}.weight"):
        weights.matrix(f"{DOWN}.weight", (96, 160))


@pytest.mark.parametrize(
    "form", ["ct w4a16 g32 asym", "gptq int4 g32", "awq int4 g32", "fp8 blocks", "ct w8a8"]
)
def test_drawn_harm_is_one_line_or_harmless(form: str, tmp_path: Path) -> None:
    """Tensors of other types and shapes, and settings of other types: no traceback, here or when it is loaded."""
    source = random.Random(form)
    quantise(write_random_model(tmp_path, seed=2, num_hidden_layers=1), FORMATS[form])
    sound = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    dtypes = [torch.int32, torch.int8, torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn]
    own = [name for name in sound if "_proj." in name]
    refused: list[str] = []
    for _ in range(60):
        tensors, section = dict(sound), dict(config["quantization_config"])
        if source.random() < 0.7:
            name = source.choice(own)
            shape = list(sound[name].shape)
            for _ in range(source.randrange(3)):
                shape = source.choice(
                    [shape[:-1], [*shape, 1], shape[::-1], [size + 1 for size in shape], [0, *shape[1:]]]
                )
            tensors[name] = torch.ones(shape).to(source.choice(dtypes))
        else:
            key = source.choice(list(section))
            section[key] = source.choice([None, 3, -1, "x", [], {}, [128, 128], {"a": {}}, True, 1e300])
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
        try:
            read_facts(tmp_path)
            weights = Weights(tmp_path, load_config(tmp_path, MODELS))
            for name in weights.names():
                shape_of = weights.shape(name)
                if len(shape_of) == 2:
                    weights.matrix(name, (shape_of[0], shape_of[1])).values()
        except Incompatible as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert not any("\n" in line for line in refused)
