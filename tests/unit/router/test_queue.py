"""The order in which waiting attempts get their turn."""

from __future__ import annotations

import random
from dataclasses import dataclass

from router.queue import AGE_STEP_S, FairQueue


@dataclass(eq=False)
class Item:
    name: str
    queued_s: float = 0.0
    priority: int = 0
    user: str = ""
    replay: bool = False


def drain(queue: FairQueue[Item], now_s: float = 0.0, step_s: float = 0.1) -> list[str]:
    order = []
    while len(queue):
        item = queue.first_replay() or queue.first_new(now_s)
        assert item is not None
        order.append(item.name)
        queue.served(item, now_s)
        now_s += step_s
    return order


def filled(*items: Item, now_s: float = 0.0) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue()
    for item in items:
        queue.push(item, now_s)
    return queue


def test_equal_requests_go_in_the_order_of_their_arrival() -> None:
    assert drain(filled(Item("a", 1), Item("b", 2), Item("c", 3))) == ["a", "b", "c"]


def test_the_higher_priority_goes_first_within_and_between_users() -> None:
    assert drain(filled(Item("low"), Item("high", priority=3))) == ["high", "low"]
    assert drain(filled(Item("low", user="a"), Item("high", priority=3, user="b"))) == ["high", "low"]


def test_replays_go_ahead_of_everything_the_oldest_first() -> None:
    queue = filled(Item("new", priority=9), Item("r2", 2, replay=True), Item("r1", 1, replay=True))
    assert drain(queue) == ["r1", "r2", "new"]


def test_users_take_turns_however_many_one_of_them_sends() -> None:
    items = [Item(f"a{n}", n * 0.001, user="a") for n in range(4)]
    items += [Item(f"b{n}", 1 + n * 0.001, user="b") for n in range(2)]
    assert drain(filled(*items)) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_flood_that_waits_long_does_not_keep_another_user_out() -> None:
    queue = filled(*[Item(f"a{n}", user="a") for n in range(100)])
    for n in range(50):  # served steadily for 50 s
        item = queue.first_new(n * 1.0)
        assert item is not None
        queue.served(item, n * 1.0)
    queue.push(Item("b", 50.0, user="b"), 50.0)
    assert "b" in drain(queue, 50.0)[:2]


def test_waiting_ages_a_low_priority_past_fresh_high_ones() -> None:
    queue = filled(Item("old", priority=0, user="a"))
    queue.push(Item("fresh", 2.5 * AGE_STEP_S, priority=2, user="b"), 2.5 * AGE_STEP_S)
    assert queue.first_new(AGE_STEP_S) is not None
    assert drain(queue, 3.5 * AGE_STEP_S)[0] == "old"
    within = filled(Item("old", 0.0, priority=0), Item("fresh", 2.5 * AGE_STEP_S, priority=2))
    assert drain(within) == ["old", "fresh"]


def test_what_has_gone_is_not_served_and_leaves_the_rest_in_order() -> None:
    a, b, c = Item("a", 1), Item("b", 2), Item("c", 3, replay=True)
    queue = filled(a, b, c)
    queue.remove(c)
    queue.remove(a)
    queue.remove(a)
    assert len(queue) == 1 and drain(queue) == ["b"]


def test_a_user_that_is_passed_over_lets_others_pass() -> None:
    queue = filled(Item("a", user="a"), Item("b", user="b"))
    first = queue.first_new(0.0)
    assert first is not None
    second = queue.first_new(0.0, {first.user: None})
    assert second is not None and second is not first


def test_who_is_ahead_is_who_is_served_before() -> None:
    draws = random.Random(3)
    for _ in range(60):
        items = [
            Item(
                f"i{n}",
                n * 0.001,
                priority=draws.choice([0, 0, 0, 2]),
                user=draws.choice("abc"),
                replay=draws.random() < 0.1,
            )
            for n in range(draws.randrange(1, 20))
        ]
        queue = filled(*items)
        ahead = {item.name: queue.num_ahead(item) for item in items}
        order = drain(queue, step_s=0.0)
        for place, name in enumerate(order):
            assert abs(ahead[name] - place) <= 2, (ahead, order)  # priorities may shift a turn
