"""KV tiers of simulated servers: what is loaded, from where, and when computing is sooner."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lightserve.router.scheduler import SchedulerLimits
from lightserve.simulate.__main__ import main
from lightserve.simulate.gpu import H200
from lightserve.simulate.kv_tiers import Store, StoreBlocks, Tiers
from lightserve.simulate.load import Load, fixed
from lightserve.simulate.replica import Setup
from lightserve.simulate.simulation import Failure, simulate

RAM = Store("ram", 1e12, 22e9)
DISK = Store("disk", 1e12, 6e9, 0.2e-3)
REMOTE = Store("remote", 1e12, 12e9, 1e-3, is_shared=True)
# one after the other, 10 prefixes of which the pool holds 3
LOAD = Load(fixed(20), fixed(4), count=60, streams=1, max_new_tokens=4, num_prefixes=10, prefix_len=1024)
SMALL = Setup("fifo", SchedulerLimits(16, 2048, 512), pool_size=3500)


def tiers(ram: Store, *lower: Store) -> Tiers:
    return Tiers(H200.kv_bytes, ram, lower)


def test_evicted_prefixes_are_loaded_from_host_memory() -> None:
    without, loaded = simulate(SMALL, LOAD), simulate(replace(SMALL, tiers=tiers(RAM)), LOAD)

    assert without.hit_rate < 0.5
    assert loaded.requests == without.requests == 60
    assert loaded.hit_rate > 0.75, "all but the first requests of each prefix"
    assert loaded.tier_hits["ram"] > 20 * 1000
    assert sum(loaded.ttft) < 0.7 * sum(without.ttft)


def test_a_tier_that_is_slower_than_computing_is_tried_once() -> None:
    slow = replace(RAM, bytes_per_s=1e8)

    without, gated = simulate(SMALL, LOAD), simulate(replace(SMALL, tiers=tiers(slow)), LOAD)

    assert gated.tier_hits["ram"] <= 4 * 1024, "until its rate is known"
    assert gated.tier_recomputed["ram"] > 20 * 1000
    assert sum(gated.ttft) < 2 * sum(without.ttft), "each of those loads takes 1.3 s"


def test_what_host_memory_has_no_room_for_comes_from_the_disk() -> None:
    """It passes through host memory, which holds two prefixes."""
    ram = replace(RAM, num_bytes=2 * 1024 * H200.kv_bytes)

    small = simulate(replace(SMALL, tiers=tiers(ram)), LOAD)
    below = simulate(replace(SMALL, tiers=tiers(ram, DISK)), LOAD)

    assert below.tier_hits["disk"] > 10 * 1000
    assert below.hit_rate > small.hit_rate + 0.2


def test_servers_read_what_others_wrote_to_a_store_of_all() -> None:
    """No server gets the same prefix twice, as far as round robin can help it."""
    load = replace(LOAD, count=40, num_prefixes=2)
    setup = replace(SMALL, pool_size=1500)

    own = simulate(replace(setup, tiers=tiers(RAM, DISK)), load, 4, "round_robin")
    shared = simulate(replace(setup, tiers=tiers(RAM, REMOTE)), load, 4, "round_robin")

    assert shared.tier_hits["remote"] > own.tier_hits["disk"]
    assert shared.cached_tokens > own.cached_tokens


@settings(max_examples=6, deadline=None, derandomize=False, database=None, print_blob=True)
@given(
    ram_blocks=st.sampled_from([4, 40, 1000]),
    rate=st.sampled_from([1e8, 3e9, 1e12]),
    failures=st.lists(st.builds(Failure, st.floats(0, 1.0), st.integers(0, 1), st.floats(0.01, 0.5)), max_size=3),
    streams=st.sampled_from([1, 12]),
)
def test_no_request_is_lost(ram_blocks: int, rate: float, failures: list[Failure], streams: int) -> None:
    load = replace(LOAD, streams=streams, count=40)
    ram = Store("ram", ram_blocks * 64 * H200.kv_bytes, rate)
    setup = replace(SMALL, tiers=tiers(ram, replace(DISK, bytes_per_s=rate), replace(REMOTE, bytes_per_s=rate)))

    result = simulate(setup, load, 2, "prefix", failures)

    assert result.requests == len(result.ttft) == 40
    assert result.output_tokens == 40 * 4


def test_the_least_recently_used_block_makes_room() -> None:
    blocks = StoreBlocks(2)

    assert [blocks.put(key) for key in (b"a", b"b", b"a", b"c")] == [True, True, False, True]
    assert [key in blocks for key in (b"a", b"b", b"c")] == [True, False, True]


def test_tiers_run_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--load shared --requests 30 --streams 2 --policies fifo --pool 9000 --num_prefixes 6 --kv_ram_gb 10"
    monkeypatch.setattr(sys, "argv", ["simulate", *flags.split(), "--tier_rate", "ram=22e9"])

    main()

    row = capsys.readouterr().out.splitlines()[1]
    assert "  ram " in row


@pytest.mark.parametrize("flags", ["--kv_disk_gb 10", "--kv_ram_gb 1 --tier_rate tape=3"])
def test_wrong_tiers_are_refused(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", *flags.split()])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
