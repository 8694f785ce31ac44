"""Simulated prefill and decode servers: the schedulers, transfers and choices are those of real engines."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import RemotePrefillRequest
from lightserve.messages.step import KvRecv, KvSend
from lightserve.router.scheduler import SchedulerLimits
from lightserve.simulate import __main__ as command, capacity, disaggregation as disaggregation_command
from lightserve.simulate.clusters import processes
from lightserve.simulate.gpu import H200
from lightserve.simulate.kv_transfer import KvTransfers, Links, Split
from lightserve.simulate.load import Load, fixed, lognormal
from lightserve.simulate.replica import Setup
from lightserve.simulate.result import Result
from lightserve.simulate.simulation import Failure, Simulation, simulate

ROLES = ("prefill", "decode", "decode")
LOAD = Load(lognormal(300, 0.8, 1500), lognormal(20, 0.8, 60), count=24, rate=30.0, max_new_tokens=60)
SMALL = Setup("fifo", SchedulerLimits(16, 512, 256), pool_size=6000)
FAST = Split(ROLES, min_tokens=64)


def figures(result: Result) -> dict[str, object]:
    return {name: getattr(result, name) for name in Result.__dataclass_fields__ if name != "cpu_s"}


def test_decode_servers_compute_only_the_ends_of_prompts() -> None:
    load = replace(LOAD, prompt_len=fixed(300))
    simulation = Simulation(SMALL, load, 3, "prefix", split=FAST)

    result = simulation.run()

    prefill, *decodes = simulation.replicas.values()
    moved = 300 // BLOCK_TOKENS * BLOCK_TOKENS
    assert result.requests == len(result.ttft) == load.count
    assert result.moved_tokens == prefill.scheduler.only_group.sends.num_sent == moved * load.count
    assert result.cached_tokens == moved * load.count
    remote_kv = [server.remote_kv for server in decodes]
    assert sum(one.num_received for one in remote_kv if one is not None) == moved * load.count
    assert sum(one.num_recomputed + one.num_given_up for one in remote_kv if one is not None) == 0


def test_kv_that_waits_for_a_seat_is_not_computed_again() -> None:
    """More requests come than the decode server has seats for, and it asks for their prompts meanwhile."""
    load = Load(fixed(2000), fixed(300), count=120, rate=10.0, max_new_tokens=300)
    setup = Setup("fifo", SchedulerLimits(8, 8192, 256), pool_size=120_000)
    simulation = Simulation(setup, load, 3, "prefix", split=Split(("prefill", "prefill", "decode")))

    result = simulation.run()

    remote_kv = simulation.replicas[2].remote_kv
    assert remote_kv is not None
    assert result.requests == load.count
    assert remote_kv.num_recomputed == 0
    assert remote_kv.num_received == 2000 // BLOCK_TOKENS * BLOCK_TOKENS * load.count


def test_short_prompts_make_no_trip() -> None:
    result = simulate(SMALL, LOAD, 3, "prefix", split=replace(FAST, min_tokens=2000))

    assert result.moved_tokens == 0
    assert result.requests == LOAD.count


def test_long_prompts_do_not_delay_the_tokens_of_decode_servers() -> None:
    load = Load(fixed(3000), fixed(100), count=24, rate=6.0, max_new_tokens=100)

    alike = simulate(Setup("fifo"), load, 3, "prefix")
    divided = simulate(Setup("fifo"), load, 3, "prefix", split=Split(ROLES))

    assert divided.itl(0.99) < 0.6 * alike.itl(0.99)
    assert divided.itl(0.99) < 1.5 * divided.itl(0.5)


def test_decode_servers_compute_prompts_of_a_prefill_server_that_falls_behind() -> None:
    """It computes 9 of these prompts a second. Alone it would be 7 s behind in the end."""
    load = Load(fixed(4000), fixed(50), count=150, rate=18.0, max_new_tokens=50)
    simulation = Simulation(Setup("fifo"), load, 3, "prefix", split=Split(ROLES))

    result = simulation.run()

    assert max(result.ttft) < 1.5
    assert 0.4 < result.moved_tokens / result.prompt_tokens < 0.8, "the prefill server has as much to do as it can"
    remote_kv = [replica.remote_kv for replica in simulation.replicas.values()]
    assert sum(one.num_given_up for one in remote_kv if one is not None) == 0


def test_a_prefill_server_that_keeps_up_computes_all_prompts() -> None:
    """All begin with the same rate, until one is measured. So the first prompts come one after the other."""
    load = Load(fixed(4000), fixed(50), count=60, rate=6.0, max_new_tokens=50)
    result = simulate(Setup("fifo"), load, 3, "prefix", split=Split(ROLES))

    assert result.moved_tokens >= 58 * 3968
    assert result.itl(0.99) < 1.5 * result.itl(0.5)


def test_a_prompt_comes_later_by_the_time_of_its_last_step_on_the_network() -> None:
    load = Load(fixed(BLOCK_TOKENS * 4 + 1), fixed(5), count=1, streams=1, max_new_tokens=5)
    near, far = (
        simulate(Setup("fifo"), load, 3, "prefix", split=replace(FAST, bytes_per_s=rate, latency_s=0.0))
        for rate in (float("inf"), 1e9)
    )

    assert far.ttft[0] - near.ttft[0] == pytest.approx(4 * BLOCK_TOKENS * H200.kv_bytes / 1e9)


def test_what_a_server_sends_and_what_reaches_one_shares_its_link() -> None:
    links = Links(bytes_per_s=100.0, latency_s=0.5)

    assert links.send(0, 2, 200.0, now=1.0) == pytest.approx(3.5)
    assert links.send(1, 3, 100.0, now=1.0) == pytest.approx(2.5), "another pair"
    assert links.send(0, 3, 100.0, now=1.0) == pytest.approx(4.5), "after what 0 sends already"
    assert links.send(1, 2, 100.0, now=1.0) == pytest.approx(4.5), "after what reaches 2 already"


def test_a_transfer_ends_with_its_last_block_or_at_its_deadline() -> None:
    transfers = KvTransfers(Split(ROLES, bytes_per_s=64.0, latency_s=0.0), token_bytes=1)
    slots = np.zeros(BLOCK_TOKENS, dtype=np.int32)
    for transfer_id in (7, 8):
        transfers.open(RemotePrefillRequest(transfer_id, transfer_id, 0, 2), 1, 0)
        transfers.expect([KvRecv(transfer_id, slots, 10.0)], now=0.0)
        transfers.send([KvSend(transfer_id, [], 0, slots)], 0, now=0.0)
    transfers.send([KvSend(7, [], 1, slots)], 0, now=1.0)

    assert not transfers.arrived(2.0)
    assert transfers.next_s == pytest.approx(3.0)
    assert [(transfer_id, one.arrived) for transfer_id, one in transfers.arrived(3.0)] == [(7, 2)]
    assert transfers.next_s == pytest.approx(10.0)
    assert [(transfer_id, one.arrived) for transfer_id, one in transfers.arrived(10.0)] == [(8, 1)]


def test_requests_compute_what_has_not_come_in_time_and_the_servers_are_kept_apart() -> None:
    """The network is so slow that the first transfer ends after its 10 s."""
    load = Load(fixed(2000), fixed(5), count=20, rate=1.0, max_new_tokens=5)
    simulation = Simulation(SMALL, load, 2, "prefix", split=Split(ROLES[:2], bytes_per_s=1e6))

    result = simulation.run()

    remote_kv = simulation.replicas[1].remote_kv
    assert remote_kv is not None
    assert result.requests == load.count
    assert remote_kv.num_given_up > 0
    assert remote_kv.num_wanted < 12 * 1984, "the last ones do not ask"


def test_a_decode_server_does_not_wait_for_a_prefill_server_that_died() -> None:
    load = Load(fixed(1000), fixed(5), count=1, streams=1, max_new_tokens=5)

    whole = simulate(SMALL, load, 2, "prefix", split=Split(ROLES[:2]))
    failed = simulate(SMALL, load, 2, "prefix", [Failure(0.02, 0, 60.0)], Split(ROLES[:2]))

    assert whole.ttft[0] > 0.03, "it died while it computed"
    assert failed.ttft[0] < whole.ttft[0] + 0.02, "it computes what has not come"


def test_nobody_computes_prompts_for_a_decode_server_that_died() -> None:
    """The prompt is in the middle of its steps. It goes on in the other decode server, with a job of its own."""
    load = Load(fixed(3000), fixed(5), count=1, streams=1, max_new_tokens=5)
    simulation = Simulation(SMALL, load, 3, "prefix", [Failure(0.02, 1, 60.0), Failure(0.02, 2, 0.5)], Split(ROLES))

    result = simulation.run()

    assert result.requests == 1
    assert simulation.replicas[0].scheduler.num_running == 0
    assert simulation.replicas[0].scheduler.only_group.pool.used == 0


@settings(max_examples=8, deadline=None, derandomize=False, database=None, print_blob=True)
@given(
    roles=st.sampled_from([ROLES, ("prefill", "prefill", "decode"), ("both", "decode", "normal")]),
    failures=st.lists(st.builds(Failure, st.floats(0, 1.5), st.integers(0, 2), st.floats(0.01, 1.0)), max_size=5),
    rate=st.sampled_from([None, 30.0, 100.0]),
    pool_size=st.sampled_from([2500, 6000]),
    bytes_per_s=st.sampled_from([1e6, 1e9, 1e12]),
    num_prefixes=st.sampled_from([0, 4]),
)
@example(ROLES, [Failure(0.22, 0, 0.01), Failure(0.33, 2, 1.0), Failure(0.0, 1, 0.5)], 30.0, 6000, 1e9, 0)
def test_no_failure_loses_a_token_and_skipped_planning_changes_nothing(
    roles: tuple[str, ...],
    failures: list[Failure],
    rate: float | None,
    pool_size: int,
    bytes_per_s: float,
    num_prefixes: int,
) -> None:
    load = replace(LOAD, rate=rate, streams=12, num_prefixes=num_prefixes, prefix_len=200 if num_prefixes else 0)
    requests = list(load.requests())
    divided = Split(roles, min_tokens=100, bytes_per_s=bytes_per_s)
    setup = replace(SMALL, pool_size=pool_size)

    simulation = Simulation(setup, load, 3, "prefix", failures, divided)
    result = simulation.run()
    planned = simulate(replace(setup, skips_planning=False), load, 3, "prefix", failures, divided)

    assert result.requests == len(result.ttft) == len(requests)
    assert result.output_tokens == sum(one.output_len for one in requests)
    assert sum(result.gap_counts) == result.output_tokens - result.requests
    assert figures(result) == figures(planned)
    assert simulation._gateway is not None
    loads = [server.load.load() for server in simulation._gateway._servers.values()]
    assert {(one.open_requests, one.waiting_tokens, one.running) for one in loads} <= {(0, 0, 0)}, "or all are down"


def test_the_command_finds_the_best_split(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--shape llama3-8b --tp 1 --servers 2 --prompt 2000 --output 20 --itl_ms 15 0.1 --seconds 1"
    monkeypatch.setattr(sys, "argv", ["split", *flags.split()])
    monkeypatch.setattr(disaggregation_command, "PRECISION", 2.0)
    monkeypatch.setattr(capacity, "MIN_RATE", 1.0)
    monkeypatch.setattr(disaggregation_command, "processes", lambda _: processes(1))

    disaggregation_command.main()

    header, none, divided, *too_short = capsys.readouterr().out.splitlines()
    assert header == disaggregation_command.HEADER
    assert none.split()[1] == "none"
    assert divided.split()[1] == "1:1"
    assert "best" in none + divided
    assert all("no rate" in row for row in too_short)
    assert len(too_short) == 2


def test_roles_run_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--load fixed --requests 12 --policies fifo --replicas 2 --roles prefill,decode"
    monkeypatch.setattr(sys, "argv", ["simulate", *flags.split()])

    command.main()

    assert "2 replicas, prefix, prefill,decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--replicas 2 --roles prefill,prefill", "no engine is decode"),
        ("--replicas 3 --roles prefill,decode", "use --replicas 2"),
        ("--replicas 2 --roles prefill,decode --network_gb_s 0", "must be above 0"),
    ],
)
def test_wrong_roles_are_refused(
    flags: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", *flags.split()])

    with pytest.raises(SystemExit):
        command.main()

    assert error in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--servers 1", "--prompt 0", "--tp 1"])
def test_wrong_figures_are_refused(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["split", *flags.split()])

    with pytest.raises(SystemExit) as ended:
        disaggregation_command.main()

    assert ended.value.code == 2
