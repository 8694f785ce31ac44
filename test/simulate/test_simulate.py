"""The simulator must agree with figures computed by hand, and lose no request."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightserve.router.policy import POLICIES
from lightserve.router.scheduler import SchedulerLimits
from lightserve.simulate.__main__ import arguments, main, setups
from lightserve.simulate.gpu import CostModel
from lightserve.simulate.load import LOADS, URGENT, Load, fixed, lognormal
from lightserve.simulate.replica import Setup
from lightserve.simulate.report import header, legend, plot
from lightserve.simulate.result import Result, quantile
from lightserve.simulate.simulation import Simulation, simulate

FLAT = CostModel(matmul_ms=((1, 10.0), (1000, 10.0)), bytes_per_s=float("inf"), pairs_per_s=float("inf"), rest_s=(0, 0))
SMALL = Load(lognormal(20, 1.0, 200), lognormal(15, 0.8, 100), count=80, streams=20, max_new_tokens=100)
TIGHT = Setup(limits=SchedulerLimits(16, 64, 32, token_ratio=1.0), quantile=0.5, pool_size=300)


def figures(result: Result) -> tuple[object, ...]:
    """All fields except the simulator's own run time."""
    return tuple(getattr(result, name) for name in Result.__dataclass_fields__ if name != "cpu_s")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rate", [None, 50.0])
def test_every_request_ends_with_all_its_tokens(policy: str, rate: float | None) -> None:
    load = replace(SMALL, rate=rate)
    requests = list(load.requests())
    simulation = Simulation(replace(TIGHT, policy=policy), load)

    result = simulation.run()

    assert result.requests == len(result.ttft) == load.count
    assert result.output_tokens == sum(one.output_len for one in requests)
    assert result.prompt_tokens == sum(len(one.prompt_ids) for one in requests)
    assert sum(result.gap_counts) == result.output_tokens - result.requests
    assert result.preemptions > 0 or rate is not None
    assert 0 < result.peak_used <= TIGHT.pool_size
    assert simulation.replicas[0].scheduler.only_group.pool.used == 0


def test_streams_that_continue_at_once_get_one_token_each_a_step() -> None:
    """10 ms per step, 4 streams of 5 tokens: 400 tokens per second, except while the next request is planned.

    With two steps in flight, the step after a request's last is planned before its end is known: the next request waits
    for that one. So a request takes 5 steps, and its stream 6.
    """
    load = Load(fixed(8), fixed(5), count=40, streams=4, max_new_tokens=50)
    setup = Setup(limits=SchedulerLimits(4, 64, 64), cost=FLAT)

    result = simulate(setup, load)

    assert result.seconds == pytest.approx(10 * 6 * 0.010, abs=0.011)
    assert result.itl(0.5) == pytest.approx(0.010)
    assert min(result.ttft) == pytest.approx(0.013), "with the time to launch the first step"


def test_one_stream_costs_its_prefill_and_its_steps() -> None:
    cost = CostModel()
    load = Load(fixed(512), fixed(101), count=1, streams=1, max_new_tokens=101)

    result = simulate(Setup(cost=cost), load)

    fixed_s, token_s = cost.rest_s
    prefill = cost.matmul_s(512) + 512 * 256 / cost.pairs_per_s + fixed_s + 512 * token_s
    kv = sum((512 + i) * cost.kv_bytes / cost.bytes_per_s for i in range(100))
    decode = 100 * (cost.matmul_s(1) + fixed_s + token_s) + kv
    launch_s = Setup().lead_s
    assert result.ttft[0] == pytest.approx(launch_s + prefill)
    assert result.seconds == pytest.approx(launch_s + prefill + decode)


def test_a_load_below_the_limit_is_served_at_its_own_rate() -> None:
    load = Load(fixed(16), fixed(4), count=2000, rate=100.0, max_new_tokens=4)

    result = simulate(Setup(cost=FLAT), load)

    assert result.requests / result.seconds == pytest.approx(100.0, rel=0.1)
    assert np.median(result.ttft) == pytest.approx(0.025, abs=0.01)  # the steps in flight, on average one and a half


def test_the_cost_model_interpolates_between_measured_sizes() -> None:
    cost = CostModel()

    measured = [cost.matmul_s(tokens) * 1000 for tokens, _ in cost.matmul_ms]

    assert measured == pytest.approx([ms for _, ms in cost.matmul_ms])
    assert cost.matmul_s(3072) == pytest.approx((0.0439 + 0.0866) / 2)
    assert cost.matmul_s(12_288) == pytest.approx(0.172 + (0.172 - 0.0866))
    assert cost.step_s(256, 256 * 1150, 0.0) == pytest.approx(0.0168, rel=0.05)  # measured with a model
    assert cost.step_s(0, 0, 0.0) == 0.0


def test_the_same_seed_gives_the_same_figures_and_another_gives_others() -> None:
    first = figures(simulate(TIGHT, SMALL))

    assert figures(simulate(TIGHT, SMALL)) == first
    assert figures(simulate(TIGHT, replace(SMALL, seed=1))) != first


def test_cache_aware_finds_more_in_the_cache_when_prefixes_compete_for_memory() -> None:
    load = Load(fixed(20), fixed(10), count=300, streams=60, max_new_tokens=10, num_prefixes=12, prefix_len=200)
    setup = Setup(limits=SchedulerLimits(4, 512, 512), pool_size=1500)

    hits = {policy: simulate(replace(setup, policy=policy), load).hit_rate for policy in POLICIES}

    assert hits["cache_aware"] > hits["fifo"] + 0.1
    assert hits["priority"] == hits["fifo"]


def test_priority_serves_the_urgent_first() -> None:
    load = replace(SMALL, urgent=0.2)
    setup = replace(TIGHT, limits=SchedulerLimits(2, 64, 64))

    fifo, priority = (simulate(replace(setup, policy=policy), load) for policy in ("fifo", "priority"))

    assert len(fifo.urgent_ttft) == sum(one.priority == URGENT for one in load.requests())
    assert np.median(priority.urgent_ttft) < np.median(fifo.urgent_ttft) / 2


def test_estimating_output_lengths_uses_more_of_the_memory() -> None:
    setup = replace(TIGHT, quantile=0.9)
    limits = setup.limits

    reserved = simulate(replace(setup, limits=replace(limits, token_ratio=0.0)), SMALL)
    estimated = simulate(setup, SMALL)

    assert reserved.preemptions == 0
    assert estimated.seconds < reserved.seconds


def test_quantiles_count_every_value_as_often_as_it_occurs() -> None:
    values, counts = np.array([3.0, 1.0, 2.0]), np.array([1, 98, 1])

    assert [quantile(values, counts, share) for share in (0.5, 0.98, 0.99, 1.0)] == [1.0, 1.0, 2.0, 3.0]
    assert quantile(np.array([]), np.array([], dtype=np.int64), 0.5) == 0.0


@pytest.mark.parametrize("name", LOADS)
def test_every_named_load_runs_from_the_command_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", "--load", name, "--requests", "20", "--urgent", "0.5"])

    main()

    table, _, columns = capsys.readouterr().out.partition("\n\ncolumns:\n")
    assert [line.split()[0] for line in table.splitlines()] == ["policy", *POLICIES]
    assert columns.rstrip() == legend()


def test_flags_reach_the_scheduler() -> None:
    flags = "--policies fifo --token_ratio 0.5 --sizes 64 128 --chunk 32 --batch_max_tokens 256 --max_running 8"
    flags += " --drafts 2 --tokens_a_step 1.5"

    (setup,) = setups(arguments().parse_args(flags.split()))

    assert setup.limits == SchedulerLimits(
        max_running=8,
        batch_max_tokens=256,
        chunk_size=32,
        preferred_step_tokens=(64, 128),
        token_ratio=0.5,
        num_drafts=2,
        weight_read_tokens=256.0,
    )
    assert setup.tokens_a_step == 1.5


def test_the_legend_has_every_column() -> None:
    names = [line[2:15].strip() for line in legend().splitlines()]

    rest = header()
    for name in names[:-1]:  # the last one is behind the rows with urgent requests
        assert name in rest, name
        rest = rest.replace(name, "", 1)
    assert set(rest) == {" ", "|"}


def test_plots_without_matplotlib_say_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):  # as if it were not installed
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["simulate", "--plots", str(tmp_path)])

    with pytest.raises(SystemExit):
        main()

    assert "pip install matplotlib" in capsys.readouterr().err


def test_plots_are_written_where_matplotlib_is(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")

    plot(tmp_path / "plots", figures, [(TIGHT, simulate(TIGHT, SMALL))])

    written = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert set(written) == {"ttft.png", "itl.png"}
    assert all(content.startswith(b"\x89PNG\r\n") for content in written.values())
