"""How many cards a load needs, against what can be computed by hand."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from lightserve.simulate import capacity
from lightserve.simulate.capacity import PRECISION, Demand, Estimate, Slo, plan, rate_of_one
from lightserve.simulate.gpu import H200, CostModel
from lightserve.simulate.load import Load, fixed
from lightserve.simulate.replica import Setup
from lightserve.simulate.shapes import LLAMA_8B, SHAPES

# A step takes 10 ms, and 1 ms more for every token: prompts of 9 tokens and 2 tokens of output take 10 ms of tokens.
LINEAR = CostModel(
    matmul_ms=((0, 10.0), (1000, 1010.0)), bytes_per_s=float("inf"), pairs_per_s=float("inf"), rest_s=(0, 0)
)
SHORT = Load(fixed(9), fixed(2))


def test_the_shape_that_was_measured_costs_what_was_measured() -> None:
    assert LLAMA_8B.cost(1) == H200
    assert LLAMA_8B.kv_bytes == H200.kv_bytes


def test_a_larger_model_costs_in_proportion_to_its_weights() -> None:
    shape = SHAPES["llama3-70b"]

    assert shape.weights == pytest.approx(69.5e9, rel=0.01)
    assert shape.pool_size(1) == 0, "140 GB of weights do not fit into one card"
    assert 300_000 < shape.pool_size(2) < 400_000
    one, eight = shape.cost(1), shape.cost(8)
    assert one.matmul_s(64) / H200.matmul_s(64) == pytest.approx(69.5 / 7.5, rel=0.01)
    assert eight.matmul_s(64) == pytest.approx(one.matmul_s(64) / 8)
    assert one.kv_bytes == 8 * eight.kv_bytes == 80 * 2 * 8 * 128 * 2
    assert eight.step_s(64, 0, 0) > one.step_s(64, 0, 0) / 8, "all-reduces are not free"


def test_the_highest_rate_is_that_of_the_steps() -> None:
    """Full steps have little of the 10 ms that each step costs. So 10 ms of tokens bound the rate at 100."""
    rate = rate_of_one(Setup(cost=LINEAR), SHORT, Slo(ttft_s=2.0, itl_s=10.0), seconds=8)

    assert 100 / PRECISION / 1.1 < rate < 100 * 1.2


def test_nothing_keeps_up_with_a_time_that_one_step_exceeds() -> None:
    assert rate_of_one(Setup(cost=LINEAR), SHORT, Slo(ttft_s=2.0, itl_s=0.005), seconds=5) == 0


def test_servers_are_added_until_all_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "setup_of", lambda shape, tp, itl_s: Setup(cost=LINEAR))
    slo = Slo(ttft_s=1.0, itl_s=1.0)

    found = plan(LLAMA_8B, 4, slo, Demand(SHORT, rate=250.0, seconds=5))

    assert found.result is not None
    assert slo.is_met(found.result)
    assert found.servers >= 250 / found.rate
    assert found.cards == 4 * found.servers
    assert not plan(LLAMA_8B, 32, slo, Demand(SHORT, rate=1000.0, seconds=5)).cards, "more than 64 cards"


def test_servers_that_die_need_others_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "setup_of", lambda shape, tp, itl_s: Setup(cost=LINEAR))
    slo = Slo(ttft_s=1.0, itl_s=1.0)

    whole, lost = (plan(LLAMA_8B, 1, slo, Demand(SHORT, 60.0, 3, lost)) for lost in (0, 1))

    assert whole.servers == 1
    assert lost.servers == 2
    assert lost.result is not None
    assert lost.result.requests == 180


def test_slower_steps_need_more_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "setup_of", lambda shape, tp, itl_s: Setup(cost=LINEAR))
    find = partial(plan, LLAMA_8B, 1, Slo(ttft_s=1.0, itl_s=1.0), Demand(SHORT, rate=250.0, seconds=5))

    plans = [find(slowness=slowness) for slowness in (1.0, 0.5, 2.0)]
    estimate = Estimate(plans[0], plans[1:])

    assert plans[2].servers >= 1.5 * plans[0].servers >= 2 * plans[1].servers
    assert str(estimate) == f"{plans[1].cards}-{plans[2].cards}"
    assert str(Estimate(plans[0], [plans[1], plans[2]._replace(servers=0)])) == f"{plans[1].cards}-none"


def test_the_command_prints_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plots" / "cards.png"
    flags = f"--shape llama3-70b --tp 1 8 --rate 0.25 --itl_ms 60 --seconds 1 --plot {picture}"
    monkeypatch.setattr(sys, "argv", ["capacity", *flags.split()])
    monkeypatch.setattr(capacity, "PRECISION", 4.0)
    monkeypatch.setattr(capacity, "MIN_RATE", 1.0)

    capacity.main()

    header, one, eight = capsys.readouterr().out.splitlines()
    assert header == capacity.HEADER
    assert one.split()[-5:] == ["with", "up", "to", "64", "cards"]
    assert eight.split()[5:8] == ["1", "8", "8-8"]
    assert picture.stat().st_size > 1000
