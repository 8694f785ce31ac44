"""How the dispatcher and the simulator count the work of an engine and measure its speed."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightserve.cluster.load_estimate import Assignment, MeasuredLoad, SharedRates
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

    assert load.load().decode_slowdown_s == pytest.approx(0.002)


def test_several_tokens_of_a_request_in_a_step_are_not_several_requests() -> None:
    """With drafts, a token takes a part of the step."""
    load = MeasuredLoad(0, SharedRates())
    running = [load.add(1, 0.0) for _ in range(9)]
    load.observe_step(9, running, 0.0)
    now_s = 0.0
    for step in range(100):
        count = 1 + step % 9
        now_s += 0.01 + 0.002 * count
        load.observe_step(count, running[:count], now_s, num_tokens=4 * count)

    assert load.load().decode_slowdown_s == pytest.approx(0.002 / 4)


def test_a_prompt_that_comes_as_kv_is_no_work_but_its_last_tokens_are() -> None:
    load = MeasuredLoad(0, SharedRates())

    request = load.add_waiting_for_kv(missing_tokens=4000, tokens=32, now_s=0.0)

    found = load.load()
    assert (found.open_requests, found.waiting_tokens, found.running) == (1, 32, 1)
    load.observe_step(1, [request], 5.0)
    found = load.load()
    assert (found.open_requests, found.waiting_tokens, found.running) == (1, 0, 1)


def test_a_prompt_whose_kv_does_not_come_is_work_from_then_on() -> None:
    load = MeasuredLoad(0, SharedRates())
    request = load.add_waiting_for_kv(4000, 32, 0.0)

    load.compute_itself(request, 1.0, is_measured=True)
    load.compute_itself(request, 2.0, is_measured=False)  # it does so already

    found = load.load()
    assert (found.open_requests, found.waiting_tokens, found.running) == (1, 4000, 0)
    load.observe_step(1, [request], 3.0)
    assert load.load().prefill_tokens_s == pytest.approx(2000), "without the second in which it waited"
    load.compute_itself(request, 4.0, is_measured=True)  # too late: it has a token
    assert load.load().waiting_tokens == 0


@pytest.mark.parametrize("came_partly", [False, True])
def test_the_prefill_rate_is_not_measured_where_kv_came(came_partly: bool) -> None:
    rates = SharedRates()
    load = MeasuredLoad(0, rates)
    request = load.add_waiting_for_kv(4000, 32, 0.0)
    if came_partly:
        load.compute_itself(request, 1.0, is_measured=False)

    load.observe_step(1, [request], 1.1)

    assert load.load().prefill_tokens_s == rates.prefill.tokens_s == FIRST_PREFILL_TOKENS_S


def test_the_slowdown_is_measured_beside_requests_that_wait_for_kv() -> None:
    load = MeasuredLoad(0, SharedRates())
    running = [load.add(1, 0.0) for _ in range(9)]
    load.observe_step(9, running, 0.0)
    load.add_waiting_for_kv(4000, 32, 0.0)
    now_s = 0.0
    for step in range(100):
        now_s += 0.01 + 0.002 * (1 + step % 9)
        load.observe_step(1 + step % 9, running[: 1 + step % 9], now_s)

    assert load.load().decode_slowdown_s == pytest.approx(0.002)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 5000),
            st.one_of(st.none(), st.integers(1, 64)),
            st.integers(0, 30),
            st.sampled_from(["token", "leaves", "computes itself", "computes the rest"]),
        )
    )
)
def test_the_load_is_the_sum_over_its_requests(events: list[tuple[int, int | None, int, str]]) -> None:
    load = MeasuredLoad(0, SharedRates())
    requests: list[Assignment] = []
    for now_s, (tokens, rest, at, event) in enumerate(events):
        requests.append(load.add(tokens, now_s) if rest is None else load.add_waiting_for_kv(tokens, rest, now_s))
        chosen = requests[at % len(requests)]
        if event == "leaves":
            requests.remove(chosen)
            load.remove(chosen)
        elif event == "token":
            load.observe_step(1, [chosen], now_s + 0.5)
        else:
            load.compute_itself(chosen, now_s, is_measured=event == "computes itself")

        found = load.load()
        computing = [one for one in requests if one.tokens_to_compute and not one.waits_for_kv]
        assert found.open_requests == len(requests)
        assert found.running == len(requests) - len(computing)
        assert found.waiting_tokens == sum(one.tokens_to_compute for one in requests)
        assert all(one.tokens_to_compute == one.missing_tokens for one in computing)
        assert all(one.tokens_to_compute <= min(one.missing_tokens, 64) for one in requests if one.waits_for_kv)
        assert found.prefill_tokens_s > 0
