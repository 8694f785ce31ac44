"""What steps cost, as the router learns it, and what it does with that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightserve.config import RouterConfig, WorkerConfig
from lightserve.messages.control import StepLimits
from lightserve.messages.int_arrays import NO_INT32, int32s
from lightserve.router.scheduler.chunking import bounded_tokens, long_prompt_tokens
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.limits import make_limits
from lightserve.router.scheduler.step_cost import MIN_STEPS, StepCost
from lightserve.simulate.load import Load, fixed
from lightserve.simulate.replica import LIMITS, Setup
from lightserve.simulate.simulation import simulate

TOKEN_S, PAIR_S = 22e-6, 1e-9


def decodes_of(streams: int, drafts: int = 0) -> Decodes:
    """``drafts``: of each stream."""
    return Decodes(np.arange(streams), int32s([drafts] * streams) if drafts else NO_INT32)


def learned(rng: np.random.Generator, steps: int = 100, noise: float = 0.1) -> StepCost:
    cost = StepCost()
    for _ in range(steps):
        tokens, context = int(rng.integers(64, 2048)), int(rng.integers(0, 20_000))
        seconds = (TOKEN_S + PAIR_S * context) * tokens * rng.uniform(1 - noise, 1 + noise)
        cost.observe(tokens, tokens * context, seconds)
    return cost


@pytest.mark.parametrize("seed", range(10))
def test_it_learns_what_tokens_and_pairs_cost(seed: int) -> None:
    cost = learned(np.random.default_rng(seed))

    for context in (0, 1_000, 30_000):
        assert cost.tokens_within(0.02, context) == pytest.approx(0.02 / (TOKEN_S + PAIR_S * context), rel=0.1)


def test_it_follows_a_device_that_becomes_slower() -> None:
    cost = learned(np.random.default_rng(1))
    for _ in range(300):
        cost.observe(512, 512 * 1_000, 512 * (TOKEN_S + PAIR_S * 1_000) * 3)

    assert cost.tokens_within(0.02, 1_000) == pytest.approx(0.02 / (TOKEN_S + PAIR_S * 1_000) / 3, rel=0.1)


def test_one_slow_step_hardly_changes_it() -> None:
    cost = learned(np.random.default_rng(1))
    before = cost.tokens_within(0.02, 1_000)
    cost.observe(512, 512 * 1_000, 60.0)

    assert cost.tokens_within(0.02, 1_000) == pytest.approx(before, rel=0.1)


def test_equal_steps_cost_in_proportion_to_their_tokens() -> None:
    """Nothing tells tokens and pairs apart then, and nothing is negative or infinite."""
    for pairs in (0, 512 * 256, 512 * 100_000):
        cost = StepCost()
        for _ in range(50):
            cost.observe(512, pairs, 0.012)

        assert cost.tokens_within(0.024, pairs / 512) == pytest.approx(1024, rel=0.01)


def test_it_says_nothing_before_it_knows() -> None:
    cost = learned(np.random.default_rng(1), MIN_STEPS - 1)

    assert cost.tokens_within(0.02, 0) is None
    assert long_prompt_tokens(LIMITS, cost, decodes_of(4), 0, 252) == 252
    assert bounded_tokens(replace(LIMITS, max_step_s=1e-3), cost, 4, 0, 252) == 252


def test_a_long_prompt_uses_the_time_of_few_streams_but_not_of_many() -> None:
    cost = learned(np.random.default_rng(1), noise=0)

    tokens = {n: long_prompt_tokens(LIMITS, cost, decodes_of(n), 0, 252) for n in (1, 4, 6, 10, 15, 16, 64)}

    assert tokens == {1: 767, 4: 764, 6: 762, 10: 502, 15: 252, 16: 252, 64: 252}
    assert long_prompt_tokens(replace(LIMITS, batch_max_tokens=512), cost, decodes_of(4), 0, 252) == 508
    assert long_prompt_tokens(LIMITS, cost, decodes_of(4), 1_000_000, 252) == 252, "never shorter than without it"


def test_a_long_prompt_uses_the_time_of_few_streams_with_drafts() -> None:
    """They are few, though they compute 24 tokens. These take time of the step, too."""
    cost = learned(np.random.default_rng(1), noise=0)

    assert long_prompt_tokens(LIMITS, cost, decodes_of(4, drafts=5), 0, 252) == 768 - 24
    assert long_prompt_tokens(LIMITS, cost, decodes_of(24), 0, 252) == 252


def test_a_bound_holds_for_every_step_with_decodes() -> None:
    cost = learned(np.random.default_rng(1), noise=0)
    limits = replace(LIMITS, max_step_s=11e-3)

    assert bounded_tokens(limits, cost, 100, 0, 1024) == 400
    assert bounded_tokens(limits, cost, 100, 0, 200) == 200
    assert bounded_tokens(limits, cost, 100, 1_000_000, 1024) == 32, "a few in any case"
    assert bounded_tokens(limits, cost, 0, 0, 8192) == 8192, "nobody waits for this step"


@pytest.mark.parametrize(
    ("flags", "long_s", "max_s"),
    [
        ({}, 0.02, None),
        ({"itl_target_ms": 50.0}, 0.05, 0.05),
        ({"chunked_prefill_size": 512}, 0.0, None),
        ({"chunked_prefill_size": 512, "itl_target_ms": 8.0}, 0.008, 0.008),
    ],
)
def test_flags_count_before_the_device(flags: dict[str, float], long_s: float, max_s: float | None) -> None:
    device = StepLimits(8192, 256, long_prompt_step_s=0.02)

    limits = make_limits(WorkerConfig(model_dir="m"), RouterConfig(**flags), device)  # type: ignore[arg-type]

    assert (limits.long_prompt_step_s, limits.max_step_s) == (long_s, max_s)


def test_the_steps_of_a_pipeline_share_the_time_between_two_tokens() -> None:
    worker, device = WorkerConfig(model_dir="m", pp=2), StepLimits(8192, 256, long_prompt_step_s=0.02)

    assert make_limits(worker, RouterConfig(), device).long_prompt_step_s == 0.01
    assert make_limits(worker, RouterConfig(itl_target_ms=50.0), device).max_step_s == 0.025


LONG_PROMPTS = Load(fixed(10_000), fixed(150), 18, streams=6)


def test_long_prompts_beside_few_streams_are_computed_sooner() -> None:
    before = simulate(Setup(limits=replace(LIMITS, long_prompt_step_s=0.0)), LONG_PROMPTS)
    now = simulate(Setup(), LONG_PROMPTS)

    assert now.seconds < before.seconds
    assert max(now.ttft) < 0.9 * max(before.ttft)
    assert np.median(now.ttft) < 0.7 * np.median(before.ttft)
    assert now.itl(0.99) < 1.2 * LIMITS.long_prompt_step_s


@pytest.mark.parametrize("target_s", [8e-3, 12e-3, 40e-3])
def test_gaps_between_tokens_stay_near_the_operators_target(target_s: float) -> None:
    limits = replace(LIMITS, long_prompt_step_s=target_s, max_step_s=target_s)

    result = simulate(Setup(limits=limits), LONG_PROMPTS)

    assert result.itl(0.9) < 1.3 * target_s
    if target_s > LIMITS.long_prompt_step_s:
        assert max(result.ttft) < max(simulate(Setup(), LONG_PROMPTS).ttft)
