from __future__ import annotations

import random

import numpy as np

from lightserve.router.token_budget import MIN_HISTORY, OutputEstimate, peak_tokens


def brute_force_peak(held: list[int], remaining: list[int]) -> int:
    """Step by step: every request grows by one token until its end."""
    peak = 0
    for step in range(max(remaining, default=0) + 1):
        peak = max(peak, sum(h + step for h, r in zip(held, remaining, strict=True) if r >= step))
    return peak


def test_the_peak_equals_a_step_by_step_simulation() -> None:
    rng = random.Random(0)
    for _ in range(500):
        count = rng.randint(0, 12)
        held = [rng.randint(0, 50) for _ in range(count)]
        remaining = [rng.randint(0, 30) for _ in range(count)]

        assert peak_tokens(held, remaining) == brute_force_peak(held, remaining)


def test_the_peak_of_requests_that_grow_at_different_rates_equals_a_simulation() -> None:
    rng = random.Random(1)
    for _ in range(500):
        count = rng.randint(1, 12)
        held = [rng.randint(0, 50) for _ in range(count)]
        rates = [rng.randint(1, 4) for _ in range(count)]
        remaining = [rate * rng.randint(0, 10) for rate in rates]  # each ends with a step
        peak = 0
        for step in range(11):
            running = [index for index in range(count) if remaining[index] >= rates[index] * step]
            peak = max(peak, sum(held[index] + rates[index] * step for index in running))

        assert peak_tokens(held, remaining, np.array(rates, dtype=float)) == peak


def test_equal_rates_do_not_change_the_peak() -> None:
    """However many tokens a step brings: the requests end in the same order, each as long as before."""
    rng = random.Random(2)
    for _ in range(200):
        held, remaining = ([rng.randint(0, 5000) for _ in range(9)] for _ in range(2))

        assert peak_tokens(held, remaining, np.full(9, rng.uniform(1, 5))) == peak_tokens(held, remaining)


def test_without_history_the_estimate_is_the_maximum() -> None:
    estimate = OutputEstimate()

    assert estimate.remaining(np.array([3, 0]), np.array([10, 100])).tolist() == [7, 100]


def test_the_estimate_is_a_quantile_of_the_outputs_that_were_longer() -> None:
    estimate = OutputEstimate(quantile=0.5)
    for length in range(1, 101):
        estimate.observe(length)

    guess = estimate.remaining(np.array([0, 50, 99, 100, 200]), np.array([1000, 1000, 1000, 1000, 1000]))

    assert guess.tolist() == [51, 26, 1, 900, 800]


def test_the_estimate_is_at_least_one_and_at_most_the_maximum() -> None:
    estimate = OutputEstimate()
    for length in [5] * MIN_HISTORY:
        estimate.observe(length)

    assert estimate.remaining(np.array([0, 4, 4]), np.array([3, 5, 1000])).tolist() == [3, 1, 1]
