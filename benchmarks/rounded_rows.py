"""What it costs that a product meets few numbers of rows: as many as there are, against as many as are computed.

    python -m benchmarks.rounded_rows [--threads 1] [--rounds 400]

Up to 16 rows none is added; above that an eighth at most (pdserve/engine/kernel_caches.py). The products are those of a
layer of SmolLM2-135M, packed for oneDNN, padding included. A B A B …; the least of all rounds, in microseconds.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.clock import SystemClock
from pdserve.engine.kernel_caches import rounded_rows
from pdserve.engine.layers import Linear, OneDnnLinear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # [out, in]
ROWS = (1, 3, 5, 13, 17, 33, 65, 129, 257)


class _AsManyRows(OneDnnLinear):
    """Without rounding."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=400)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = SystemClock()
    torch.manual_seed(1)
    weights = [torch.randn(shape).to(torch.bfloat16) for shape in SHAPES]
    plain: list[Linear] = [_AsManyRows(weight, None) for weight in weights]
    rounded: list[Linear] = [OneDnnLinear(weight, None) for weight in weights]
    print("| rows | computed | as many as there are, µs | rounded, µs | ratio |")
    print("|---|---|---|---|---|")
    for num_rows in ROWS:
        inputs = [
            functional.normalize(torch.randn(num_rows, shape[1])).to(torch.bfloat16) for shape in SHAPES
        ]
        least_s = [float("inf")] * 2
        for _ in range(asked.rounds):
            for way, linears in enumerate((plain, rounded)):
                begun_s = clock.now_s()
                for linear, x in zip(linears, inputs, strict=True):
                    linear(x)
                least_s[way] = min(least_s[way], clock.now_s() - begun_s)
        ratio = least_s[1] / least_s[0]
        print(
            f"| {num_rows} | {rounded_rows(num_rows)} | {least_s[0] * 1e6:.0f} | {least_s[1] * 1e6:.0f} | {ratio:.2f} |"
        )


if __name__ == "__main__":
    main()
