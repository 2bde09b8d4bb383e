"""What clients ask in tests of determinism: first turns, many of which begin alike, and second ones to some of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.sampling import SamplingParams
from tests.support.torch_cluster import Answer, Job, TorchCluster

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, ignore_eos=True)

# Around the edges of blocks and chunks; some are longer than the largest chunk.
LENGTHS = (1, 15, 16, 17, 40, 63, 64, 65, 130, 257, 513, 600)
FOLLOW_UP_LENGTHS = (1, 16, 23, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """first: prompts; follow_ups: what is said behind the answers to the first of them, one each."""

    first: Sequence[tuple[int, ...]]
    follow_ups: Sequence[tuple[int, ...]]
    max_tokens: int
    params: SamplingParams

    @property
    def num_prompts(self) -> int:
        return len(self.first) + len(self.follow_ups)

    async def play(self, cluster: TorchCluster, at_once: int) -> list[Answer]:
        """All first turns, then all second ones; their answers in this order."""
        answers = await cluster.ask_all(
            [self._job(ids, seed) for seed, ids in enumerate(self.first)], at_once
        )
        second = [
            self._job((*answer.ids, *more), 1000 + seed)
            for seed, (answer, more) in enumerate(zip(answers, self.follow_ups))
        ]
        return answers + await cluster.ask_all(second, at_once)

    def _job(self, ids: tuple[int, ...], seed: int) -> Job:
        return Job(prompt=ids, sampling=replace(self.params, max_tokens=self.max_tokens), seed=seed)


def random_script(
    num_first: int, num_second: int, *, max_tokens: int, params: SamplingParams, ids: range
) -> Script:
    """Of prompts of all LENGTHS, two of three begin with three quarters of their length that all those share."""
    source = random.Random(17)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(source.choice(ids) for _ in range(count))

    common = draw(max(LENGTHS))
    first = []
    for index in range(num_first):
        length = LENGTHS[index % len(LENGTHS)]
        shared = common[: 3 * length // 4] if index % 3 else ()
        first.append((*shared, *draw(length - len(shared))))
    follow_ups = [draw(FOLLOW_UP_LENGTHS[index % len(FOLLOW_UP_LENGTHS)]) for index in range(num_second)]
    return Script(first=first, follow_ups=follow_ups, max_tokens=max_tokens, params=params)
