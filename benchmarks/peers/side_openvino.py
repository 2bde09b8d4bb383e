"""OpenVINO GenAI's side, by its own figures of time. Runs in its environment. Arguments: model, threads."""

import json
import random
import sys

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
    for line in sys.stdin:
        cell = json.loads(line)
        is_prefill = cell["cell"] == "prefill"
        length = cell["tokens"] if is_prefill else cell["context"]
        ids = np.array([random.Random(cell["seed"]).choices(range(100, VOCAB), k=length)], dtype=np.int64)
        given = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        config = genai.GenerationConfig(
            max_new_tokens=1 if is_prefill else cell["tokens"] + 1, ignore_eos=True, do_sample=False
        )
        metrics = pipe.generate(given, config).perf_metrics
        taken_ms = metrics.get_ttft().mean if is_prefill else metrics.get_tpot().mean * cell["tokens"]
        print(json.dumps({"seconds": taken_ms / 1e3}), flush=True)


if __name__ == "__main__":
    main()
