"""Several simulated servers: the routing is the dispatcher's, and no failure loses a token."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import psutil
import pytest
from hypothesis import given, settings, strategies as st

from lightserve.cluster.routing import POLICIES
from lightserve.router.scheduler import SchedulerLimits
from lightserve.simulate.__main__ import main
from lightserve.simulate.clusters import share_of, simulate_clusters
from lightserve.simulate.load import Load, fixed, lognormal
from lightserve.simulate.replica import Setup
from lightserve.simulate.simulation import Failure, Simulation, simulate
from test.waiting import has_ended, wait_until

SHARED = Load(
    lognormal(20, 1.0, 200), lognormal(10, 0.8, 40), count=120, streams=24, max_new_tokens=40, num_prefixes=8,
    prefix_len=256,
)  # fmt: skip
SMALL = Setup(limits=SchedulerLimits(16, 512, 256), pool_size=3000)


@pytest.mark.parametrize("rate", [None, 200.0])
def test_one_replica_behind_a_gateway_is_a_single_server(rate: float | None) -> None:
    load = replace(SHARED, rate=rate)

    single, behind = simulate(SMALL, load), simulate(SMALL, load, 1, "prefix")

    assert behind.seconds == single.seconds
    assert (behind.steps, behind.cached_tokens, behind.ttft) == (single.steps, single.cached_tokens, single.ttft)


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_share_the_load(policy: str) -> None:
    one, four = simulate(SMALL, SHARED), simulate(SMALL, SHARED, 4, policy)

    assert (four.requests, four.output_tokens) == (one.requests, one.output_tokens)
    assert four.seconds < 0.8 * one.seconds  # steps with few tokens take as long


def test_requests_go_where_their_prefix_is_cached() -> None:
    """A replica has room for 3 of the 8 prefixes: 4 replicas have room for all, if each prefix has its place."""
    load = replace(SHARED, count=200, rate=60.0)
    setup = replace(SMALL, pool_size=1000)

    hits = {policy: simulate(setup, load, 4, policy).hit_rate for policy in ("prefix", "round_robin")}

    assert hits["prefix"] > hits["round_robin"] + 0.1


@pytest.mark.parametrize("streams", [12, 24, 48])
def test_replicas_find_nearly_as_many_prefixes_cached_as_one_server(streams: int) -> None:
    """Each prefix has one replica, unless it has too much to do: few requests more than the mean are not too much."""
    load = Load(fixed(8), fixed(8), count=192, streams=streams, max_new_tokens=8, num_prefixes=12, prefix_len=512)
    setup = replace(SMALL, pool_size=16_000)

    one, three = (simulate(setup, load, replicas, "prefix") for replicas in (1, 3))

    assert three.hit_rate >= 0.95 * one.hit_rate
    assert three.seconds < one.seconds


@settings(max_examples=12, deadline=None, derandomize=False, database=None, print_blob=True)
@given(
    failures=st.lists(
        st.builds(Failure, st.floats(0, 1.5), st.integers(0, 2), st.floats(0.01, 1.0)), min_size=1, max_size=6
    ),
    rate=st.sampled_from([None, 100.0]),
)
def test_no_failure_loses_a_token(failures: list[Failure], rate: float | None) -> None:
    """All replicas may be down at once."""
    load = replace(SHARED, rate=rate)
    requests = list(load.requests())

    result = simulate(SMALL, load, 3, "prefix", failures)

    assert result.requests == len(result.ttft) == len(requests)
    assert result.output_tokens == sum(one.output_len for one in requests)
    assert sum(result.gap_counts) == result.output_tokens - result.requests


def test_a_dead_replica_costs_its_streams_a_pause_and_the_others_nothing() -> None:
    load = Load(fixed(64), fixed(200), count=8, streams=8, max_new_tokens=200)

    whole = simulate(SMALL, load, 2, "round_robin")
    failed = simulate(SMALL, load, 2, "round_robin", [Failure(0.3, 0, 60.0)])

    assert whole.itl(1.0) < 0.03
    assert sum(count for gap, count in zip(failed.gaps, failed.gap_counts, strict=True) if gap > 0.03) <= 4
    assert failed.output_tokens == whole.output_tokens


def test_a_request_that_cannot_end_is_reported() -> None:
    simulation = Simulation(SMALL, SHARED)
    simulation.replicas.clear()

    with pytest.raises(RuntimeError, match="24 requests have not ended"):
        simulation.run()


def test_cells_serve_their_shares_of_the_load_apart() -> None:
    load = replace(SHARED, count=31, rate=60.0)

    both = simulate_clusters(partial(simulate, SMALL, replicas=2, policy="prefix"), load, 2)

    shares = [share_of(load, cell, 2) for cell in range(2)]
    alone = [simulate(SMALL, share, 2, "prefix") for share in shares]
    assert [share.count for share in shares] == [16, 15]
    assert shares[0].rate == shares[1].rate == 30.0
    assert list(shares[0].arrivals())[:15] != list(shares[1].arrivals())
    assert both.requests == 31
    assert both.ttft == alone[0].ttft + alone[1].ttft
    assert both.output_tokens == alone[0].output_tokens + alone[1].output_tokens
    assert both.seconds == max(alone[0].seconds, alone[1].seconds)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core simulates them one after the other")
def test_cells_end_with_the_process_that_started_them() -> None:
    flags = "--policies fifo --requests 1000000 --rate 100 --replicas 2 --clusters 2"
    command = [sys.executable, "-m", "lightserve.simulate", *flags.split()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        parent = psutil.Process(process.pid)

        def clusters() -> list[psutil.Process]:
            return [one for one in parent.children() if "spawn_main" in " ".join(one.cmdline())]

        wait_until(lambda: sum(one.cpu_times().user > 1.0 for one in clusters()) == 2)  # they have begun
        found = clusters()

        process.kill()

    wait_until(lambda: all(has_ended(one) for one in found))


def test_clusters_run_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--load fixed --requests 12 --policies fifo --replicas 1 2 --cluster_policy prefix session"
    monkeypatch.setattr(sys, "argv", ["simulate", *flags.split()])
    main()
    rows = capsys.readouterr().out.splitlines()

    assert [row.partition("  2 replicas, ")[2] for row in rows[1:4]] == ["", "prefix", "session"]


@pytest.mark.parametrize(
    "flags", ["--fail 1:2:3", "--replicas 2 --fail 1:2:3", "--replicas 2 --fail 1:0:0", "--replicas 0", "--clusters 0"]
)
def test_wrong_figures_are_refused(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", *flags.split()])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
