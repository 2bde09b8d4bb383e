"""OpenVINO GenAI's side, by its own figures of time. Runs in its environment. Arguments: model, threads."""

import json
import random
import sys
import time  # noqa: TID251 - it runs where there is no pdserve

import numpy as np
import openvino as ov
import openvino_genai as genai

VOCAB = 30_000  # ids below this are ordinary tokens of the models that are measured


def main() -> None:
    model, threads = sys.argv[1:]
    hints = {"INFERENCE_NUM_THREADS": int(threads), "INFERENCE_PRECISION_HINT": "bf16"}
    pipe = genai.LLMPipeline(model, "CPU", **hints)
    about = f"openvino-genai {genai.__version__}, {json.dumps(hints)}"
    print(json.dumps({"about": about}), flush=True)

    def generate(batch: int, length: int, num_tokens: int, seed: int) -> tuple[float, genai.PerfMetrics]:
        drawn = random.Random(seed)
        prompts = [drawn.choices(range(100, VOCAB), k=length) for _ in range(batch)]
        ids = np.array(prompts, dtype=np.int64)
        given = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        config = genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        begin_s = time.monotonic()
        metrics = pipe.generate(given, config).perf_metrics
        return time.monotonic() - begin_s, metrics

    for line in sys.stdin:
        cell = json.loads(line)
        seed = cell["seed"]
        if cell["cell"] == "prefill":
            seconds = generate(1, cell["tokens"], 1, seed)[1].get_ttft().mean / 1e3
        elif cell["cell"] == "decode":
            metrics = generate(1, cell["context"], cell["tokens"] + 1, seed)[1]
            seconds = metrics.get_tpot().mean / 1e3 * cell["tokens"]
        else:  # the whole, less one that ends with the first tokens
            asked = cell["batch"], cell["context"]
            seconds = generate(*asked, cell["tokens"] + 1, seed)[0] - generate(*asked, 1, seed)[0]
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
