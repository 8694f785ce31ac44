from __future__ import annotations

import random

import numpy as np

from lightserve.router.token_budget import FEW, OutputEstimate, peak_tokens


def brute_force_peak(held: list[int], remaining: list[int]) -> int:
    """Step by step: everybody grows by one until their end."""
    peak = 0
    for step in range(max(remaining, default=0) + 1):
        peak = max(peak, sum(h + step for h, r in zip(held, remaining, strict=True) if r >= step))
    return peak


def test_the_peak_is_that_of_running_it() -> None:
    rng = random.Random(0)
    for _ in range(500):
        count = rng.randint(0, 12)
        held = [rng.randint(0, 50) for _ in range(count)]
        remaining = [rng.randint(0, 30) for _ in range(count)]

        assert peak_tokens(held, remaining) == brute_force_peak(held, remaining)


def test_without_history_the_guess_is_all_that_is_left() -> None:
    estimate = OutputEstimate()

    assert estimate.remaining(np.array([3, 0]), np.array([10, 100])).tolist() == [7, 100]


def test_the_guess_is_a_quantile_of_the_outputs_that_went_on_as_long() -> None:
    estimate = OutputEstimate(quantile=0.5)
    for length in range(1, 101):
        estimate.learn(length)

    guess = estimate.remaining(np.array([0, 50, 99, 100, 200]), np.array([1000, 1000, 1000, 1000, 1000]))

    assert guess.tolist() == [51, 26, 1, 900, 800]


def test_the_guess_is_never_more_than_what_may_come_nor_less_than_one() -> None:
    estimate = OutputEstimate()
    for length in [5] * FEW:
        estimate.learn(length)

    assert estimate.remaining(np.array([0, 4, 4]), np.array([3, 5, 1000])).tolist() == [3, 1, 1]
