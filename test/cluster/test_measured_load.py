"""How the dispatcher and the simulator count the work of an engine and measure its speed."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightserve.cluster.measured_load import Assignment, MeasuredLoad, SharedRates
from lightserve.cluster.rates import FIRST_PREFILL_TOKENS_S


def test_a_prompt_is_work_until_its_first_token() -> None:
    load = MeasuredLoad(3, SharedRates())

    first, _ = load.add(100, 0.0), load.add(50, 0.0)
    load.observe_step(1, [first], 0.1)

    found = load.load()
    assert (found.engine, found.open_requests, found.waiting_tokens, found.running) == (3, 2, 50, 1)


def test_the_prefill_rate_is_that_of_the_time_in_which_prompts_were_computed() -> None:
    """The second prompt waits until the first one is computed."""
    rates = SharedRates()
    load = MeasuredLoad(0, rates)
    first, second = load.add(1000, 1.0), load.add(500, 1.0)
    assert load.load().prefill_tokens_s == FIRST_PREFILL_TOKENS_S

    load.observe_step(1, [first], 2.0)
    load.observe_step(2, [first, second], 2.5)

    assert load.load().prefill_tokens_s == pytest.approx(1000)
    assert MeasuredLoad(1, rates).load().prefill_tokens_s == pytest.approx(1000), "until it is measured itself"


def test_the_slowdown_is_measured_only_while_no_prompt_is_computed() -> None:
    """It would be 0.01 s for a token, if the steps beside a prompt counted."""
    load = MeasuredLoad(0, SharedRates())
    running = [load.add(1, 0.0) for _ in range(9)]
    load.observe_step(9, running, 0.0)
    now_s = 0.0
    for step in range(200):
        prompt = load.add(100, now_s) if step % 3 == 0 else None
        count = 1 + step % 9
        now_s += 0.01 + 0.002 * count + (0.01 * count if prompt else 0.0)
        load.observe_step(count, running[:count], now_s)
        if prompt is not None:
            load.remove(prompt)

    assert load.load().token_slowdown_s == pytest.approx(0.002)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 30), st.sampled_from(["token", "leaves"]))))
def test_the_load_is_the_sum_over_its_requests(events: list[tuple[int, int, str]]) -> None:
    load = MeasuredLoad(0, SharedRates())
    requests: list[Assignment] = []
    for now_s, (tokens, at, event) in enumerate(events):
        requests.append(load.add(tokens, now_s))
        chosen = requests[at % len(requests)]
        if event == "leaves":
            requests.remove(chosen)
            load.remove(chosen)
        else:
            load.observe_step(1, [chosen], now_s + 0.5)

        found = load.load()
        waiting = [one for one in requests if one.tokens_to_compute]
        assert found.open_requests == len(requests)
        assert found.running == len(requests) - len(waiting)
        assert found.waiting_tokens == sum(one.tokens_to_compute for one in waiting)
        assert found.prefill_tokens_s > 0
