"""Lines fitted to made-up timings."""

from __future__ import annotations

import random

import pytest

from router.fitted_lines import Line, Prior

PRIOR = Prior(0.0, 1e-3)


def test_before_anything_was_seen_it_is_the_prior() -> None:
    line = Line()
    assert line.predict(700, Prior(0.01, 2e-3), 5.0) == pytest.approx(0.01 + 1.4)
    assert not line.known(5.0)


def test_it_follows_what_is_observed_noise_and_all() -> None:
    line, draws = Line(), random.Random(1)
    for n in range(60):
        tokens = draws.randrange(10, 2000)
        line.observe(tokens, (0.02 + 2e-4 * tokens) * draws.uniform(0.8, 1.2), PRIOR, n * 0.1)
    assert line.known(6.0)
    for tokens in (100, 500, 1500):
        assert line.predict(tokens, PRIOR, 6.0) == pytest.approx(0.02 + 2e-4 * tokens, rel=0.15)


def test_a_machine_that_became_slower_is_believed_after_a_few() -> None:
    line = Line()
    for n in range(100):
        line.observe(500, 0.1, PRIOR, n * 0.1)
    for n in range(40):
        line.observe(500, 0.3, PRIOR, 10.0 + n * 0.1)
    assert line.predict(500, PRIOR, 14.0) > 0.25


def test_one_outlier_hardly_counts() -> None:
    line = Line()
    for n in range(30):
        line.observe(500, 0.1, PRIOR, n * 0.1)
    line.observe(500, 60.0, PRIOR, 3.0)
    assert line.predict(500, PRIOR, 3.0) < 0.15


def test_who_is_not_asked_any_more_is_judged_by_the_prior_again() -> None:
    line = Line()
    for n in range(20):
        line.observe(500, 5.0, PRIOR, n * 0.1)
    assert line.predict(500, PRIOR, 2.0) > 2.0
    assert line.predict(500, PRIOR, 242.0) == pytest.approx(0.5, rel=0.1)
    assert not line.known(242.0)


def test_estimates_are_never_negative_nor_fall_with_more_tokens() -> None:
    draws = random.Random(2)
    for _ in range(50):
        line = Line()
        for n in range(draws.randrange(1, 20)):
            line.observe(draws.choice([0, 10, 4000]), draws.choice([0.0, 0.01, 3.0]), PRIOR, n * 1.0)
        values = [line.predict(tokens, PRIOR, 20.0) for tokens in (0, 1, 100, 5000)]
        assert values[0] >= 0 and values == sorted(values)


def test_doubt_is_as_large_as_chance_and_shrinks_with_more_observations() -> None:
    draws = random.Random(5)
    noisy, steady, fresh = Line(), Line(), Line()
    assert fresh.doubt_s(PRIOR, 0.0) == 0
    for n in range(40):
        tokens = draws.randrange(100, 1000)
        noisy.observe(tokens, 0.1 + 0.04 * (draws.random() - 0.5), PRIOR, n * 0.1)
        steady.observe(tokens, 1e-3 * tokens, PRIOR, n * 0.1)
        if n == 3:
            early_s = noisy.doubt_s(PRIOR, n * 0.1)
    late_s = noisy.doubt_s(PRIOR, 4.0)
    assert 0.001 < late_s < 0.006 and late_s < early_s
    assert steady.doubt_s(PRIOR, 4.0) < 1e-6
    assert noisy.doubt_s(PRIOR, 1000.0) == 0
