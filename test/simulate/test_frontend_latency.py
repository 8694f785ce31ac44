"""What requests meet before a simulated router, and sessions of several turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lightserve.router.scheduler import SchedulerLimits
from lightserve.simulate.frontend_latency import MEASURED_FRONTEND, NO_FRONTEND, FrontendLatency, HttpProcesses
from lightserve.simulate.gpu import CostModel
from lightserve.simulate.load import Load, fixed, lognormal
from lightserve.simulate.replica import Setup
from lightserve.simulate.simulation import simulate

FLAT = CostModel(matmul_ms=((1, 10.0), (1000, 10.0)), bytes_per_s=float("inf"), pairs_per_s=float("inf"), rest_s=(0, 0))
FRONTEND = FrontendLatency(2, to_http_s=0.001, request_s=0.002, token_s=0.0005, to_client_s=0.004)
CHAT = Load(lognormal(60, 0.8, 400), lognormal(40, 0.6, 120), count=60, rate=10.0, num_prefixes=2, prefix_len=50)


def test_without_http_a_request_arrives_when_it_is_sent() -> None:
    assert HttpProcesses(NO_FRONTEND).arrival_s(1.5, 1000) == 1.5


def test_http_processes_take_one_request_after_the_other() -> None:
    http = HttpProcesses(FRONTEND)

    arrivals = [http.arrival_s(1.0, 4) for _ in range(3)]

    assert arrivals == pytest.approx([1.005, 1.005, 1.009])


@pytest.mark.parametrize("rate", [None, 1.0])
def test_a_first_token_takes_its_way_and_that_of_its_request(rate: float | None) -> None:
    load = Load(fixed(8), fixed(5), count=4, streams=1, rate=rate, max_new_tokens=5)
    setup = Setup("fifo", SchedulerLimits(4, 64, 64), cost=FLAT, lead_s=0.003, frontend=FRONTEND)

    result = simulate(setup, load)

    assert list(result.ttft) == pytest.approx([0.001 + 0.002 + 8 * 0.0005 + 0.003 + 0.010 + 0.004] * 4)
    assert result.itl(1.0) == pytest.approx(0.010)


def test_a_stream_sends_its_next_request_when_it_has_the_end_of_the_last() -> None:
    load = Load(fixed(8), fixed(5), count=10, streams=1, max_new_tokens=5)
    setup = Setup("fifo", SchedulerLimits(4, 64, 64), cost=FLAT, lead_s=0.003)

    near, far = simulate(setup, load), simulate(replace(setup, frontend=FRONTEND), load)

    assert far.seconds - near.seconds == pytest.approx(10 * 0.007 + 9 * 0.004)


def test_the_measured_loads_of_an_h200_have_the_first_tokens_that_were_seen() -> None:
    """One stream of 128 tokens: 9.6 to 11.0 ms. A prompt of 8,000 tokens: 222 ms. See docs/log.md."""
    setup = Setup(frontend=MEASURED_FRONTEND)
    short, long = (Load(fixed(size), fixed(4), count=3, streams=1, max_new_tokens=4) for size in (128, 8000))

    assert np.median(simulate(setup, short).ttft) == pytest.approx(10.3e-3, rel=0.07)
    assert np.median(simulate(setup, long).ttft) == pytest.approx(222e-3, rel=0.05)


def test_a_turn_has_all_turns_before_it() -> None:
    load = replace(CHAT, turns=4, think_s=2.0)
    requests, arrivals = list(load.requests()), list(load.arrivals())
    first = [one for one in requests if len(one.prompt_ids) <= 450]

    assert len(requests) == len(arrivals) == 60
    assert arrivals == sorted(arrivals)
    assert len(first) >= 15
    last = max(requests, key=lambda one: len(one.prompt_ids))
    before = [one for one in requests if np.array_equal(one.prompt_ids, last.prompt_ids[: len(one.prompt_ids)])]
    assert len(before) == 4, "itself, and three turns"
    lengths = sorted(len(one.prompt_ids) for one in before)
    by_length = {len(one.prompt_ids): one for one in before}
    assert all(late > early + by_length[early].output_len for early, late in pairwise(lengths))


def test_sessions_find_their_last_turns_cached() -> None:
    setup = Setup("fifo")

    alone, talking = (simulate(setup, replace(CHAT, turns=turns, think_s=2.0)) for turns in (1, 4))

    assert talking.requests == alone.requests == 60
    assert talking.hit_rate > alone.hit_rate + 0.2
