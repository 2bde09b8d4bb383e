"""Several routers' statuses as one: nothing counted twice, nothing unknown taken for nothing."""

from __future__ import annotations

import pytest

from deploy.scaling.observe import Observed, observe
from pdserve.block_messages import BlockCounts
from pdserve.figures import RouterFigures, Spread
from pdserve.messages import Role
from pdserve.status import ClusterStatus
from tests.unit.deploy.scaling.statuses import status, worker

BOUNDS_S = (0.1, 1.0)


def seen(*answers: ClusterStatus | None) -> Observed:
    observed, _ = observe(5.0, answers, {})
    assert observed is not None
    return observed


def test_nobody_answers() -> None:
    counted = {"r": RouterFigures(at_s=1.0)}
    assert observe(5.0, [None, None], counted) == (None, counted)


def test_a_worker_of_two_routers_counts_once_and_their_queues_both() -> None:
    both = seen(
        status(worker("prefill-0", queued_tokens=100), router="a", waiting=2, waiting_tokens=30),
        status(
            worker("prefill-0", queued_tokens=400),
            worker("prefill-1"),
            router="b",
            waiting=1,
            waiting_tokens=5,
        ),
    )
    assert (both.num_waiting, both.num_waiting_tokens, both.complete) == (3, 35, True)
    pool = both.pool(Role.PREFILL)
    assert (pool.num_ready, pool.num_queued_tokens) == (2, 400)  # of two reports of one worker the fuller one


def test_an_unreachable_router_makes_it_incomplete() -> None:
    assert not seen(status(worker("prefill-0")), None).complete


def test_who_drains_at_one_router_takes_no_work_and_who_is_unknown_neither() -> None:
    pool = seen(
        status(
            worker("decode-0"),
            worker("decode-1", state="hung"),
            worker("decode-2", state="sings"),
            router="a",
        ),
        status(worker("decode-0", state="draining"), worker("decode-3"), router="b"),
    ).pool(Role.DECODE)
    assert [each.id for each in pool.ready] == ["decode-3"]
    assert pool.num_draining == 1


def test_a_role_of_a_later_version_is_left_out() -> None:
    assert seen(status(worker("x-0", role="encode"), worker("decode-0"))).pool(Role.DECODE).num_ready == 1


def test_the_newest_incarnation_is_the_worker() -> None:
    old = worker("decode-0", epoch="9.0000000000000001", running=9)
    new = worker("decode-0", epoch="10.0000000000000000", running=1)
    changed = worker("decode-0", epoch="10.0000000000000000", role_generation=2, role="prefill")
    assert seen(status(new, router="a"), status(old, router="b")).workers[0].num_running == 1
    assert seen(status(changed, router="a"), status(new, router="b")).pool(Role.DECODE).num_ready == 0


def test_without_a_report_a_worker_is_silent_not_idle() -> None:
    pool = seen(status(worker("decode-0", blocks=BlockCounts(0, 0, 0, 0, 0)))).pool(Role.DECODE)
    assert (pool.num_ready, pool.num_untold) == (1, 1)


def test_cached_blocks_are_free_for_others() -> None:
    pool = seen(status(worker("decode-0", blocks=BlockCounts(20, 10, 20, 40, 10)))).pool(Role.DECODE)
    assert pool.occupancy == pytest.approx(0.4)


def test_an_idle_workers_old_step_says_nothing() -> None:
    pool = seen(status(worker("decode-0", step_s=0.5), worker("decode-1", running=2, step_s=0.02))).pool(
        Role.DECODE
    )
    assert (pool.step_s, pool.slowest_step_s, pool.num_unmeasured) == (0.02, 0.02, 0)
    assert seen(status(worker("decode-0", running=1))).pool(Role.DECODE).num_unmeasured == 1


def test_rates_are_of_those_that_know_theirs() -> None:
    pool = seen(status(worker("prefill-0", tokens_per_s=300.0), worker("prefill-1"))).pool(Role.PREFILL)
    assert pool.tokens_per_s == 300.0


def test_the_least_loaded_go_first_and_the_silent_last() -> None:
    observed = seen(
        status(
            worker("decode-2", running=1),
            worker("decode-10"),
            worker("decode-9"),
            worker("decode-1", blocks=BlockCounts(0, 0, 0, 0, 0)),
            worker("decode-3", state="draining"),
        )
    )
    assert observed.victims(Role.DECODE) == ("decode-10", "decode-9", "decode-2", "decode-1")


def figures(at_s: float, prompt: int, cached: int, queued: tuple[int, ...]) -> RouterFigures:
    return RouterFigures(
        at_s=at_s, num_prompt_tokens=prompt, num_cached_tokens=cached, queued=Spread(BOUNDS_S, queued)
    )


def test_what_was_counted_since_the_last_look_of_all_routers_together() -> None:
    first, counted = observe(
        1.0, [status(router="a", figures=figures(10.0, 100, 50, (9, 0, 0))), status(router="b")], {}
    )
    assert first is not None
    assert (first.prompt_tokens_per_s, first.queue_s) == (None, None)
    second, counted = observe(
        3.0,
        [
            status(router="a", figures=figures(12.0, 300, 150, (9, 4, 0))),
            status(router="b", figures=figures(2.0, 40, 0, (6, 0, 0))),
        ],
        counted,
    )
    assert second is not None
    assert second.prompt_tokens_per_s == pytest.approx((200 - 100) / 2.0 + 40 / 2.0)
    assert second.queue_s == pytest.approx(0.1 + 0.9 * 3 / 4)  # the ninth of ten
    restarted, _ = observe(4.0, [status(router="a", figures=figures(0.5, 10, 0, (1, 0, 0)))], counted)
    assert restarted is not None
    assert restarted.prompt_tokens_per_s is None
