"""llama.cpp's side, by its server's own figures of time. Runs in its environment. Arguments: model, threads."""

import json
import random
import sys

import xllamacpp as llama

VOCAB = 30_000  # ids below this are ordinary tokens of the models that are measured


def main() -> None:
    model, threads = sys.argv[1:]
    params = llama.CommonParams()
    params.model.path = model
    params.n_ctx = 4096
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = llama.Server(params)
    print(json.dumps({"about": f"xllamacpp {llama.BUILD_INFO}"}), flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        is_prefill = cell["cell"] == "prefill"
        length = cell["tokens"] if is_prefill else cell["context"]
        asked = {
            "prompt": random.Random(cell["seed"]).choices(range(100, VOCAB), k=length),
            "n_predict": 1 if is_prefill else cell["tokens"] + 1,
            "cache_prompt": False,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        timings = server.handle_completions(asked)["timings"]
        if is_prefill:
            taken_ms = timings["prompt_ms"]
        else:
            taken_ms = timings["predicted_ms"] / timings["predicted_n"] * cell["tokens"]
        print(json.dumps({"seconds": taken_ms / 1e3}), flush=True)


if __name__ == "__main__":
    main()
