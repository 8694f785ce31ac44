"""Policies against plain definitions, on random loads."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from lightserve.cluster.rates import KEPT, DecodeSlowdown, OutputLength, PrefillRate
from lightserve.cluster.routing import (
    MAX_EXCESS,
    MAX_LOAD_FACTOR,
    POLICIES,
    EngineLoad,
    RoutedRequest,
    cost_s,
    make_policy,
    within_bound,
)
from lightserve.errors import OptionError


def random_load(choice: random.Random, engine: int) -> EngineLoad:
    running = choice.randrange(80)
    waiting = choice.randrange(5)
    return EngineLoad(
        engine,
        open_requests=running + waiting,
        waiting_tokens=waiting * choice.randrange(1, 4000),
        running=running,
        prefill_tokens_s=choice.uniform(100, 50_000),
        decode_slowdown_s=choice.choice([0.0, choice.uniform(0, 0.01)]),
    )


def random_request(choice: random.Random, engines: int) -> RoutedRequest:
    prompt_len = choice.randrange(1, 8000)
    cached = {engine: choice.randrange(prompt_len) for engine in range(engines) if choice.random() < 0.5}
    first_block = choice.getrandbits(63) if prompt_len >= 64 else 0
    return RoutedRequest(prompt_len, choice.uniform(1, 500), cached, choice.choice(["", "a", "b"]), first_block)


@pytest.mark.parametrize("name", POLICIES)
def test_no_engine_exceeds_the_bound_while_another_is_below_it(name: str) -> None:
    for seed in range(50):
        choice = random.Random(seed)
        policy, loads = make_policy(name), [random_load(choice, engine) for engine in range(choice.randrange(1, 8))]
        for _ in range(50):
            request = random_request(choice, len(loads))

            chosen = loads[policy.choose(request, loads)]

            total = sum(load.open_requests for load in loads) + 1
            mean = total / len(loads)
            assert chosen.open_requests + 1 <= max(math.ceil(MAX_LOAD_FACTOR * mean), int(mean) + MAX_EXCESS)
            chosen.open_requests += 1
            ending = choice.choice(loads)
            ending.open_requests = max(ending.open_requests - choice.randrange(2), 0)


def test_the_default_policy_chooses_the_least_cost_among_engines_within_the_bound() -> None:
    choice = random.Random(3)
    policy = make_policy("prefix")
    for _ in range(500):
        loads = [random_load(choice, engine) for engine in range(choice.randrange(1, 8))]
        request = random_request(choice, len(loads))
        request.first_block = request.first_block or 1

        chosen = loads[policy.choose(request, loads)]

        assert cost_s(request, chosen) == min(cost_s(request, load) for load in within_bound(loads))


def test_a_cached_prefix_wins_until_its_engine_has_more_to_do_than_the_prefix_saves() -> None:
    policy = make_policy("prefix")
    request = RoutedRequest(6400, cached_tokens={1: 6000}, first_block=5)
    loads = [EngineLoad(0, 2, 0, 2, 1000.0), EngineLoad(1, 2, 0, 2, 1000.0)]

    assert policy.choose(request, loads) == 1
    loads[1].waiting_tokens = 5999
    assert policy.choose(request, loads) == 1
    loads[1].waiting_tokens = 6001
    assert policy.choose(request, loads) == 0


def test_running_requests_count_as_far_as_they_slow_tokens_down() -> None:
    policy = make_policy("prefix")
    request = RoutedRequest(64, expected_output=100, cached_tokens={1: 64}, first_block=5)
    loads = [EngineLoad(0, 3, 0, 3, 1000.0), EngineLoad(1, 4, 0, 4, 1000.0)]

    assert policy.choose(request, loads) == 1
    for load in loads:
        load.decode_slowdown_s = 0.01
    assert policy.choose(request, loads) == 0


def test_idle_engines_share_prompts_by_their_first_block_always_the_same_way() -> None:
    choice = random.Random(5)
    blocks = [choice.getrandbits(63) for _ in range(300)]
    loads = [EngineLoad(engine) for engine in range(4)]

    chosen = [make_policy("prefix").choose(RoutedRequest(500, first_block=block), loads) for block in blocks]
    again = [make_policy("prefix").choose(RoutedRequest(500, first_block=block), loads) for block in blocks]
    without_one = [make_policy("prefix").choose(RoutedRequest(500, first_block=block), loads[:3]) for block in blocks]

    assert chosen == again
    assert min(Counter(chosen).values()) > 40
    assert all(then == now for then, now in zip(chosen, without_one, strict=True) if then != 3)


def test_a_session_stays_in_its_engine_and_others_go_where_the_load_is_least() -> None:
    policy = make_policy("session")
    loads = [EngineLoad(engine, open_requests=8) for engine in range(4)]
    engine = policy.choose(RoutedRequest(10, session="a chat"), loads)
    others = [policy.choose(RoutedRequest(10, session=f"chat {number}"), loads) for number in range(50)]

    for number in range(4):
        loads[number].running = number
        loads[number].decode_slowdown_s = 1.0
        assert policy.choose(RoutedRequest(10, session="a chat"), loads) == engine
    assert set(others) == {0, 1, 2, 3}
    assert policy.choose(RoutedRequest(10, expected_output=1), loads) == 0


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix"])
def test_short_prompts_take_turns_on_equal_engines(name: str) -> None:
    policy, loads = make_policy(name), [EngineLoad(engine, open_requests=9) for engine in range(3)]

    assert [policy.choose(RoutedRequest(10), loads) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="cluster_policy='best': must be one of prefix, least_loaded, session, round"):
        make_policy("best")


def test_the_slowdown_is_the_slope_of_step_times() -> None:
    choice = random.Random(1)
    slowdown = DecodeSlowdown()
    assert slowdown.seconds == 0
    for _ in range(50):
        slowdown.observe(8, 0.02)
    assert slowdown.seconds == 0  # one point has no slope

    for _ in range(500):
        running = choice.randrange(1, 30)
        slowdown.observe(running, 0.01 + 0.002 * running)

    assert slowdown.seconds == pytest.approx(0.002)


def test_rates_follow_what_is_measured() -> None:
    rate, length = PrefillRate(), OutputLength()
    for _ in range(200):
        rate.observe(500, 0.25)
        length.observe(10)

    assert rate.tokens_s == pytest.approx(2000)
    assert length.tokens == pytest.approx(10, abs=KEPT)


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_goes_to_an_engine_that_holds_its_adapter_unless_it_is_busier(name: str) -> None:
    policy, loads = make_policy(name), [EngineLoad(engine) for engine in range(4)]
    request = RoutedRequest(500, first_block=5, adapter="sql", adapter_engines={2, 3})

    assert {policy.choose(request, loads) for _ in range(8)} <= {2, 3}
    loads[2].open_requests = loads[3].open_requests = 50
    assert policy.choose(request, loads) in {0, 1}


@pytest.mark.parametrize("name", POLICIES)
def test_an_adapter_that_no_engine_holds_is_always_loaded_by_the_same(name: str) -> None:
    policy, loads = make_policy(name), [EngineLoad(engine) for engine in range(4)]

    chosen = {
        adapter: {policy.choose(RoutedRequest(500, first_block=number, adapter=adapter), loads) for number in range(8)}
        for adapter in map(str, range(20))
    }

    assert all(len(engines) == 1 for engines in chosen.values())
    assert len(set.union(*chosen.values())) == 4
