"""llama.cpp's side, by its server's own figures of time. Runs in its environment. Arguments: model, threads."""

import functools
import json
import random
import sys
import time  # noqa: TID251 - it runs where there is no pdserve
from concurrent.futures import ThreadPoolExecutor

import xllamacpp as llama

VOCAB = 30_000  # ids below this are ordinary tokens of the models that are measured


def main() -> None:
    model, threads = sys.argv[1:]

    @functools.cache
    def server(batch: int) -> llama.Server:
        """With a slot for each of so many sequences."""
        params = llama.CommonParams()
        params.model.path = model
        params.n_ctx = 8_192 if batch == 1 else batch * 256
        params.n_parallel = batch
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
        return llama.Server(params)

    def complete(batch: int, length: int, num_tokens: int, seed: int) -> dict[str, float]:
        asked = {
            "prompt": random.Random(seed).choices(range(100, VOCAB), k=length),
            "n_predict": num_tokens,
            "cache_prompt": False,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        timings: dict[str, float] = server(batch).handle_completions(asked)["timings"]
        return timings

    def together(batch: int, length: int, num_tokens: int, seed: int) -> float:
        """Seconds until all of them have ended."""
        server(batch)
        begin_s = time.monotonic()
        with ThreadPoolExecutor(batch) as pool:
            calls = [
                pool.submit(complete, batch, length, num_tokens, seed * 100 + number)
                for number in range(batch)
            ]
        for call in calls:
            call.result()
        return time.monotonic() - begin_s

    server(1)
    print(json.dumps({"about": f"xllamacpp {llama.BUILD_INFO}"}), flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        seed = cell["seed"]
        if cell["cell"] == "prefill":
            seconds = complete(1, cell["tokens"], 1, seed)["prompt_ms"] / 1e3
        elif cell["cell"] == "decode":
            timings = complete(1, cell["context"], cell["tokens"] + 1, seed)
            seconds = timings["predicted_ms"] / 1e3 / timings["predicted_n"] * cell["tokens"]
        else:  # the whole, less one that ends with the first tokens
            asked = cell["batch"], cell["context"]
            seconds = together(*asked, cell["tokens"] + 1, seed) - together(*asked, 1, seed)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
