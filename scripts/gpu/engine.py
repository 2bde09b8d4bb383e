"""The engine on the device: the CPU's logits and tokens, and how near its speed is to what the device allows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pdserve.clock import SystemClock
from pdserve.engine.device.devices import CpuDevice, CudaDevice, Device
from pdserve.engine.device.runner import DeviceRunner, device_precision
from pdserve.engine.port import Row, SampleSpec
from pdserve.engine.torch_runner import TorchRunner
from pdserve.sampling import SampleKey, SamplingParams
from scripts.gpu.model import LARGE, SMALL, LlamaShape, random_llama
from scripts.gpu.place import GpuPlace
from scripts.gpu.tokens import check_tokens

_CLOCK = SystemClock()
_BLOCK = 16
_GREEDY = SampleKey(
    params=SamplingParams(temperature=0), seed=0, choice=0, eos_token_ids=(), max_tokens=1 << 30
)
_WITHIN = 2e-2  # of float32 logits around 1, over a dozen layers that sum in another order
_NEAR_TIE = 5e-2  # greedy may choose otherwise between two logits as near as this


def check_engine(place: GpuPlace) -> dict[str, Any]:
    """Raises AssertionError where logits differ, a greedy token that isn't a near tie, or sampled ones."""
    shape = _shape(place)
    folder = random_llama(place.folder, shape)
    here = _runner(place, shape, "float32", num_blocks=256)
    reference = TorchRunner(
        folder, dtype="float32", deterministic=False, num_threads=len(os.sched_getaffinity(0)), num_blocks=256,
        kv_memory_bytes=0, block_size=_BLOCK,
    )  # fmt: skip
    source = random.Random(1)
    worst, num_tokens, num_ties = 0.0, 0, 0
    for length in (3, 40, 100):
        ids = [source.randrange(256) for _ in range(length)]
        table = tuple(range(here.layout.blocks_for(length + 8)))
        start = 0
        for _ in range(8):
            row = Row(tuple(ids[start:]), start, table, SampleSpec(_GREEDY, tuple(ids), length))
            want, got = reference.logits([row])[0].clone(), here.logits([row])[0].cpu()
            worst = max(worst, float((got - want).abs().max()))
            assert worst <= _WITHIN, f"logits differ by {worst} after {len(ids)} tokens"
            chosen, wanted = int(got.argmax()), int(want.argmax())
            if chosen != wanted:
                num_ties += 1
                assert float(want[wanted] - want[chosen]) < _NEAR_TIE, f"token {chosen} instead of {wanted}"
            start = len(ids)
            ids.append(wanted)
            num_tokens += 1
    return {
        "worst_logit_error": worst,
        "tokens": num_tokens,
        "near_ties": num_ties,
        **check_tokens(here, reference),
        "numerics": here.card.numerics,
    }


def measure_speed(place: GpuPlace) -> dict[str, Any]:
    """Decode steps beside a copy on the device, prefill beside a product of matrices; seconds are medians."""
    shape = _shape(place)
    context, chunk, batches = (64, 64, (1, 8)) if place.is_dry else (512, 2048, (1, 8, 64, 256))
    blocks = -(-(context + 64) // _BLOCK) * max(batches)
    runner = _runner(place, shape, "bfloat16", num_blocks=max(blocks, -(-chunk // _BLOCK)))
    device = torch.device(place.device(place.decode))
    copy, product = _copy_gb_per_s(device, place), _tflops_of_product(device, place)
    weight_bytes = 2 * shape.num_weights
    kv_bytes = runner.layout.block_bytes // _BLOCK
    decode = {}
    for batch in batches:
        took_s = _median_s(lambda batch=batch: runner.run(_singles(batch, context)), place)  # type: ignore[misc]
        read = (weight_bytes + batch * context * kv_bytes) / took_s / 1e9
        decode[str(batch)] = {
            "step_ms": took_s * 1e3,
            "tokens_per_s": batch / took_s,
            "gb_per_s": read,
            "of_copy": read / copy,
        }
    ids = tuple(number % 256 for number in range(chunk))
    table = tuple(range(-(-chunk // _BLOCK)))
    took_s = _median_s(lambda: runner.run([Row(ids, 0, table, SampleSpec(_GREEDY, ids, chunk))]), place)
    tflops = 2 * shape.num_weights * chunk / took_s / 1e12
    return {
        "copy_gb_per_s": copy,
        "product_tflops": product,
        "decode": decode,
        "prefill": {"tokens": chunk, "s": took_s, "tflops": tflops, "of_product": tflops / product},
    }


def _shape(place: GpuPlace) -> LlamaShape:
    return SMALL if place.is_dry else LARGE


def _runner(place: GpuPlace, shape: LlamaShape, dtype: str, num_blocks: int) -> DeviceRunner:
    device: Device = CpuDevice() if place.is_dry else CudaDevice(place.decode)
    return DeviceRunner(
        random_llama(place.folder, shape), device, precision=device_precision(dtype, "auto", device),
        num_blocks=num_blocks, utilization=0.8, block_size=_BLOCK, max_step_tokens=64 if place.is_dry else 2048,
        max_batch=8 if place.is_dry else 256,
    )  # fmt: skip


def _singles(batch: int, context: int) -> Sequence[Row]:
    """Each sequence in blocks of its own; what lies in them costs the same whatever it is."""
    width = -(-(context + 1) // _BLOCK)
    ids = tuple(number % 256 for number in range(context + 1))
    spec = SampleSpec(_GREEDY, ids, context)
    return [
        Row(ids[-1:], context, tuple(range(row * width, (row + 1) * width)), spec) for row in range(batch)
    ]


def _copy_gb_per_s(device: torch.device, place: GpuPlace) -> float:
    """Read and written, as decoding reads only: twice the bytes of a copy."""
    num_bytes = 1 << 24 if place.is_dry else 1 << 31
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_s(lambda: target.copy_(source), place) / 1e9


def _tflops_of_product(device: torch.device, place: GpuPlace) -> float:
    size = 256 if place.is_dry else 8192
    one = torch.zeros(size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / _median_s(lambda: one @ one, place) / 1e12


def _median_s(call: Callable[[], object], place: GpuPlace) -> float:
    """Until the device is done; the first two don't count."""
    times: list[float] = []
    for _ in range(4 if place.is_dry else 22):
        began_s = _CLOCK.now_s()
        call()
        if not place.is_dry:
            torch.cuda.synchronize()
        times.append(_CLOCK.now_s() - began_s)
    kept = sorted(times[2:])
    return kept[len(kept) // 2]
