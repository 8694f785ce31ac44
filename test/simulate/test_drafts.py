"""The simulator verifies drafts too, and the real scheduler plans as many as are worth their time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lightserve.messages.control import StepLimits
from lightserve.simulate.load import LOADS, Load, fixed
from lightserve.simulate.replica import LIMITS, Setup
from lightserve.simulate.simulation import simulate

NUM_DRAFTS = 3
WITH_DRAFTS = replace(LIMITS, num_drafts=NUM_DRAFTS, weight_read_tokens=StepLimits(1).weight_read_tokens)


def load_of(streams: int) -> Load:
    return replace(LOADS["fixed"], count=3 * streams, streams=streams, prompt_len=fixed(300), output_len=fixed(200))


@cache
def tokens_a_second(streams: int, tokens_a_step: float | None) -> float:
    setup = Setup() if tokens_a_step is None else Setup(limits=WITH_DRAFTS, tokens_a_step=tokens_a_step)
    result = simulate(setup, load_of(streams))
    assert result.requests == 3 * streams
    assert result.output_tokens == result.requests * 200
    return result.output_tokens / result.seconds


@pytest.mark.parametrize("streams", [1, 8, 64, 256])
@pytest.mark.parametrize("tokens_a_step", [1.0, 1.1, 1.4, 2.0, 2.79, 4.0])
def test_drafts_are_never_slower_than_two_percent(streams: int, tokens_a_step: float) -> None:
    assert tokens_a_second(streams, tokens_a_step) > 0.98 * tokens_a_second(streams, None)


@pytest.mark.parametrize(("streams", "gain"), [(1, 2.3), (8, 2.0), (64, 1.3)])
def test_accepted_drafts_are_worth_their_time(streams: int, gain: float) -> None:
    assert tokens_a_second(streams, 2.79) > gain * tokens_a_second(streams, None)
