"""The fake engine shows wrong KV as wrong text, and its rule can be computed without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from pdserve.engine import fake_rule
from pdserve.engine.fake_rule import FakeRule, expected_choice, expected_tokens
from pdserve.engine.fake_runner import FakeFaults, FakeRunner, InjectedFault
from pdserve.engine.port import Row, RowOutput, SampleSpec
from pdserve.sampling import SamplingParams
from tests.support.memories import pool_bytes
from tests.unit.engine_core.building import sample_key

PROMPT = list(b"the quick brown fox jumps over the lazy dog")
TABLE = [5, 2, 9, 7, 0, 3, 11, 4, 1, 8]
BLOCK_SIZE = 8


def runner_of(rule: FakeRule | None = None, faults: FakeFaults | None = None) -> FakeRunner:
    return FakeRunner(num_blocks=24, block_size=BLOCK_SIZE, rule=rule, faults=faults)


def prefill(runner: FakeRunner, ids: Sequence[int], table: Sequence[int], *, chunk: int = 1000) -> RowOutput:
    """Compute ids in chunks and sample behind them."""
    key = sample_key(1000)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        spec = SampleSpec(key, ids, len(ids)) if start + len(part) == len(ids) else None
        (output,) = runner.run([Row(part, start, table, spec)])
    return output


def decode(runner: FakeRunner, first: int, num_tokens: int, *, table: Sequence[int] = TABLE) -> list[int]:
    """Go on from a prefill of PROMPT whose first token is `first`."""
    ids = [*PROMPT, first]
    while len(ids) < len(PROMPT) + num_tokens:
        spec = SampleSpec(sample_key(1000), ids, len(PROMPT))
        (output,) = runner.run([Row(ids[-1:], len(ids) - 1, table, spec)])
        assert output.token_id is not None
        ids.append(output.token_id)
    return ids[len(PROMPT) :]


def text_after(damage: str) -> list[int]:
    """The text of PROMPT when, between prefill and decode, something happens to its blocks."""
    runner = runner_of()
    prefill(runner, b"somebody else's prompt, as long as ours is", [12, 13, 14, 15, 16, 17])
    first = prefill(runner, PROMPT, TABLE, chunk=10).token_id
    assert first is not None
    size = runner.layout.block_bytes

    def block(block_id: int) -> memoryview:
        return pool_bytes(runner)[block_id * size : (block_id + 1) * size]

    if damage == "copy left out":
        block(TABLE[1])[:] = bytes(size)
    elif damage == "two blocks swapped":
        kept = bytes(block(TABLE[1]))
        block(TABLE[1])[:] = block(TABLE[3])
        block(TABLE[3])[:] = kept
    elif damage == "a block of another request":
        block(TABLE[1])[:] = block(13)
    elif damage == "one byte flipped":
        block(TABLE[1])[size // 2 + 3] ^= 0x10
    return decode(runner, first, 24)


def test_unharmed_blocks_give_the_expected_text() -> None:
    assert text_after("nothing") == expected_tokens(PROMPT, 24, seed=7)


@pytest.mark.parametrize(
    "damage", ["copy left out", "two blocks swapped", "a block of another request", "one byte flipped"]
)
def test_harmed_blocks_change_the_text(damage: str) -> None:
    good = expected_tokens(PROMPT, 24, seed=7)
    bad = text_after(damage)
    assert bad[0] == good[0], "the first token came from the good blocks"
    assert bad[1:] != good[1:]


def test_every_byte_of_every_position_counts() -> None:
    runner = runner_of()
    ids = PROMPT[:11]
    prefill(runner, ids, TABLE)
    size = runner.layout.block_bytes
    spec = SampleSpec(sample_key(1000), [*ids, 65], len(ids))

    def digest_token() -> int:
        # The same row again: its record is the same, so only what is read can differ.
        (output,) = runner.run([Row([65], len(ids), TABLE, spec)])
        assert output.token_id is not None
        return output.token_id

    good = digest_token()
    same = 0
    full = range(TABLE[0] * size, (TABLE[0] + 1) * size)
    for at in full:
        pool_bytes(runner)[at] ^= 0xFF
        same += digest_token() == good
        pool_bytes(runner)[at] ^= 0xFF
    assert digest_token() == good
    assert same <= len(full) / 64 * 4, "about one in 64 gives the same letter by chance"


def test_what_lies_behind_the_last_position_is_not_read() -> None:
    runner = runner_of()
    first = prefill(runner, PROMPT, TABLE).token_id
    assert first is not None
    used = len(PROMPT) % BLOCK_SIZE
    last = TABLE[len(PROMPT) // BLOCK_SIZE]
    words = pool_bytes(runner).cast("Q")
    per_block = runner.layout.block_bytes // 8
    for word in range(per_block):
        if word % BLOCK_SIZE > used:
            words[last * per_block + word] = 1
    assert decode(runner, first, 8) == expected_tokens(PROMPT, 8, seed=7)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK_SIZE, 17])
def test_chunks_and_tables_do_not_show(chunk: int) -> None:
    runner = runner_of()
    table = [20, 1, 22, 3, 19, 18, 17]
    first = prefill(runner, PROMPT, table, chunk=chunk).token_id
    assert first is not None
    assert decode(runner, first, 12, table=table) == expected_tokens(PROMPT, 12, seed=7)


def test_ids_of_the_sample_spec_are_not_looked_at() -> None:
    key = sample_key(1000)
    truth = runner_of().run([Row(PROMPT, 0, TABLE, SampleSpec(key, PROMPT, len(PROMPT)))])
    lies = runner_of().run([Row(PROMPT, 0, TABLE, SampleSpec(key, [0] * len(PROMPT), len(PROMPT)))])
    assert truth == lies


def test_the_key_is_in_the_text_unless_greedy() -> None:
    texts = [
        expected_tokens(PROMPT, 12),
        expected_tokens(PROMPT, 12, seed=1),
        expected_tokens(PROMPT, 12, seed=1, choice=1),
        expected_tokens(PROMPT, 12, greedy=True),
    ]
    assert len({tuple(text) for text in texts}) == 4
    assert texts[3] == expected_tokens(PROMPT, 12, seed=9, choice=2, greedy=True)
    assert all(32 <= letter < 127 for text in texts for letter in text)


def test_vectors_of_the_rule() -> None:
    assert fake_rule.link(0, ord("h")) == 0xC871EEB29F8C404F
    assert bytes(expected_tokens(b"hello", 16)) == b"ItJlEq1vgLmx5SG6"
    assert bytes(expected_tokens(b"hello", 16, seed=7, choice=1)) == b"Us1qE2Xzolw2eT9Y"
    assert bytes(expected_tokens(b"hello", 16, greedy=True)) == b"vHM58Ml2WnjAFmOF"


def test_a_replay_goes_on_where_the_text_stopped() -> None:
    whole = expected_tokens(PROMPT, 20, seed=3)
    rest = expected_tokens([*PROMPT, *whole[:9]], 11, seed=3, num_prompt_tokens=len(PROMPT))
    assert rest == whole[9:]


def test_the_rule_may_end_a_text() -> None:
    rule = FakeRule(eos_one_in=5)
    text = expected_tokens(PROMPT, 200, seed=1, rule=rule)
    assert text[-1] == fake_rule.EOS_ID
    assert fake_rule.EOS_ID not in text[:-1]
    key = sample_key(200, seed=1, params=SamplingParams(min_tokens=150))
    assert len(expected_choice(PROMPT, key, rule=rule)) >= 150
    stop = sample_key(200, seed=1, params=SamplingParams(stop_token_ids=(text[2],), min_tokens=60))
    letters = expected_choice(PROMPT, stop)
    assert len(letters) >= 60
    assert text[2] not in letters[:59]


def test_bad_rows_die_alone() -> None:
    runner = runner_of(faults=FakeFaults(row_token_ids=frozenset([66])))
    spec = SampleSpec(sample_key(), PROMPT, len(PROMPT))
    rows = [
        Row([66], 0, [1], spec),
        Row([300], 0, [2], spec),
        Row([65], 0, [99], spec),
        Row([65] * 9, 0, [3], spec),
        Row(PROMPT, 0, TABLE, spec),
    ]
    outputs = runner.run(rows)
    assert [output.error is not None for output in outputs] == [True, True, True, True, False]
    assert outputs[-1].token_id == expected_tokens(PROMPT, 1, seed=7)[0]


def test_a_failing_step_raises_and_leaves_garbage_in_its_rows_only() -> None:
    runner = runner_of(faults=FakeFaults(step_token_ids=frozenset([0]), failing_steps=frozenset([2])))
    prefill(runner, PROMPT, TABLE)
    before = bytes(pool_bytes(runner))
    with pytest.raises(InjectedFault):
        runner.run([Row([65], 0, [20], None)])
    with pytest.raises(InjectedFault):
        runner.run([Row([0], 0, [20], None), Row([65], 0, [21], None)])
    size = runner.layout.block_bytes
    assert bytes(pool_bytes(runner)[: 20 * size]) == before[: 20 * size]
    assert bytes(pool_bytes(runner)[20 * size :]) != before[20 * size :]


def test_no_torch_in_a_process_of_the_fake_engine() -> None:
    code = (
        "import sys, pdserve.engine.engine, pdserve.engine.fake_runner\n"
        "assert not {'torch', 'grpc'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_vocabulary_without_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        FakeRunner(num_blocks=1, vocab_size=256)
