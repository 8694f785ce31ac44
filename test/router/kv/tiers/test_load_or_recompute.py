from __future__ import annotations

from lightserve.router.kv.tiers.load_or_recompute import MIN_STEP_TOKENS, PROBE_S, LoadOrRecompute


def measured(computed_per_s: float, loaded_per_s: float) -> LoadOrRecompute:
    load_policy = LoadOrRecompute(bytes_per_token=1000)
    load_policy.observe_step(1000, 1000 / computed_per_s)
    load_policy.observe_load(1000, 1000 / loaded_per_s, now_s=0.0)
    return load_policy


def test_what_was_never_measured_is_tried() -> None:
    assert LoadOrRecompute(1000).allows(100, 0, now_s=0.0)


def test_a_tier_that_is_faster_than_computing_is_used() -> None:
    assert measured(computed_per_s=100, loaded_per_s=200).allows(1000, 0, now_s=1.0)


def test_a_tier_that_is_slower_than_computing_is_not_used() -> None:
    assert not measured(computed_per_s=100, loaded_per_s=90).allows(1000, 0, now_s=1.0)


def test_a_load_does_not_wait_behind_others_for_longer_than_computing_takes() -> None:
    load_policy = measured(computed_per_s=100, loaded_per_s=200)

    assert load_policy.allows(1000, 900, now_s=1.0)
    assert not load_policy.allows(1000, 1100, now_s=1.0)
    assert not load_policy.allows(1000, 1100, now_s=1.0 + PROBE_S), "the tier is busy, not slow"


def test_a_slow_tier_is_tried_again_after_a_while_and_used_if_it_has_become_fast() -> None:
    load_policy = measured(computed_per_s=100, loaded_per_s=10)

    assert load_policy.allows(1000, 0, now_s=PROBE_S)

    for _ in range(20):
        load_policy.observe_load(1000, 0.1, now_s=PROBE_S)
    assert load_policy.allows(1000, 0, now_s=PROBE_S + 1)


def test_a_tier_that_becomes_slow_is_not_used_any_more() -> None:
    load_policy = measured(computed_per_s=100, loaded_per_s=1000)

    load_policy.observe_load(1000, 100.0, now_s=1.0)

    assert not load_policy.allows(1000, 0, now_s=2.0)


def test_steps_with_few_prompt_tokens_do_not_count() -> None:
    load_policy = measured(computed_per_s=100, loaded_per_s=200)

    for _ in range(100):
        load_policy.observe_step(MIN_STEP_TOKENS - 1, 100.0)

    assert load_policy.computed_per_second == 100


def test_a_request_waits_as_long_as_computing_would_take() -> None:
    assert measured(computed_per_s=100, loaded_per_s=200).deadline_s(1000, now_s=5.0) == 15.0


def test_the_rate_is_told_in_bytes() -> None:
    assert measured(computed_per_s=100, loaded_per_s=200).bytes_per_second == 200_000
