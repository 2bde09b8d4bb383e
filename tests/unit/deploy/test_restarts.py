"""When a child is started again."""

from __future__ import annotations

from deploy.local.restarts import Again, GiveUp, RestartPolicy, Restarts, exit_text

POLICY = RestartPolicy(
    final_exits={78: "its configuration is wrong"}, final_starts={2: "it can't start with these settings"}
)


def test_the_delay_grows_with_each_end_in_a_row_up_to_its_bound() -> None:
    restarts = Restarts(POLICY)
    delays = []
    for _ in range(12):
        decision = restarts.after_exit(-9, ready_s=1.0)
        assert isinstance(decision, Again)
        delays.append(decision.delay_s)
    assert delays[:4] == [0.2, 0.4, 0.8, 1.6]
    assert delays == sorted(delays)
    assert delays[-1] == POLICY.max_delay_s


def test_a_child_that_was_ready_for_long_starts_afresh() -> None:
    restarts = Restarts(POLICY)
    restarts.after_exit(1, ready_s=0.5)
    restarts.after_exit(1, ready_s=0.5)
    assert restarts.after_exit(-9, ready_s=POLICY.stable_s) == Again(POLICY.first_delay_s, 1)


def test_what_was_never_ready_is_given_up_after_some_starts() -> None:
    restarts = Restarts(POLICY)
    assert isinstance(restarts.after_exit(1, ready_s=None), Again)
    assert isinstance(restarts.after_exit(1, ready_s=None), Again)
    decision = restarts.after_exit(1, ready_s=None)
    assert isinstance(decision, GiveUp)
    assert "3 starts" in decision.reason


def test_what_was_ready_once_is_never_given_up_for_dying() -> None:
    restarts = Restarts(POLICY)
    restarts.after_exit(1, ready_s=2.0)
    assert all(isinstance(restarts.after_exit(1, ready_s=None), Again) for _ in range(50))


def test_an_exit_that_a_restart_would_not_change_is_final_at_once() -> None:
    assert Restarts(POLICY).after_exit(78, ready_s=100.0) == GiveUp("its configuration is wrong")


def test_an_exit_that_says_it_cannot_be_started_is_final_unless_it_could_be_before() -> None:
    assert Restarts(POLICY).after_exit(2, ready_s=None) == GiveUp("it can't start with these settings")
    restarts = Restarts(POLICY)
    restarts.after_exit(-9, ready_s=1.0)
    assert isinstance(restarts.after_exit(2, ready_s=None), Again)


def test_exit_codes_in_words() -> None:
    assert exit_text(-9) == "was killed by SIGKILL"
    assert exit_text(3) == "ended with exit code 3"
    assert exit_text(-200) == "was killed by signal 200"
