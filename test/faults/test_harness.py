"""The harness detects what it must detect."""

from __future__ import annotations

import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from test.faults import resource_snapshot, server_pool
from test.faults.case import Case
from test.faults.cases import CASES, CORE, START_CASES
from test.faults.harness import FaultContext
from test.faults.model_limits import ModelLimits
from test.faults.reactions import ABORTED, OTHERS_SERVED, ends, responds
from test.faults.resource_snapshot import GpuMemory, describe_growth
from test.faults.server_pool import ServerPool
from test.waiting import wait_until


@pytest.fixture(scope="module")
def pool() -> Iterator[ServerPool]:
    with ServerPool() as pool:
        yield pool


def do_nothing(context: FaultContext) -> None:
    pass


@pytest.mark.slow
def test_a_leaked_descriptor_is_reported(pool: ServerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_SETTLE_S", 0.5)
    monkeypatch.setattr(server_pool, "SETTLE_S", 0.5)
    kept: list[socket.socket] = []

    def leak(context: FaultContext) -> None:
        kept.append(context.client.open())

    with pytest.raises(AssertionError, match="left behind: ls-httpserver: descriptors"):
        Case("a connection is kept", leak, OTHERS_SERVED).run(pool, seed=1, slack=6.0)

    assert len(kept) == 2  # growth in one run may be a cache, so the case ran twice
    for sock in kept:
        sock.close()


@pytest.mark.long
def test_a_case_fails_on_an_unexpected_reaction(pool: ServerPool) -> None:
    with pytest.raises(AssertionError):
        Case("nobody is refused", do_nothing, responds(400)).run(pool, seed=1)
    with pytest.raises(subprocess.TimeoutExpired):
        Case("nobody dies", do_nothing, ends(1), within_s=0.1).run(pool, seed=1)


@pytest.mark.long
def test_a_request_that_still_runs_is_not_aborted(pool: ServerPool) -> None:
    def ask(context: FaultContext) -> None:
        context.stream(max_tokens=8000).read_events(1)

    with pytest.raises(TimeoutError):
        Case("a client stays", ask, ABORTED, within_s=0.5).run(pool, seed=1)


def test_missing_processes_and_growth_of_anything_else_are_reported() -> None:
    before = Counter({"ls-router: processes": 1, "ls-router: threads": 5, "ls-router: descriptors": 9})

    assert describe_growth(before, Counter(before)) == ""
    assert describe_growth(before, before - Counter({"ls-router: threads": 1})) == ""
    assert describe_growth(before, before + Counter({"ls-router: threads": 1})) == "ls-router: threads 5 -> 6"
    assert describe_growth(before, Counter()) == "ls-router: processes 1 -> 0"


def test_gpu_memory_of_two_workers_at_once_is_detected() -> None:
    assert not GpuMemory(before_server=500, before_fault=100_500, peak=101_000, after=100_500).is_doubled
    assert GpuMemory(before_server=500, before_fault=10_500, peak=20_500, after=10_500).is_doubled


def test_the_peak_of_gpu_memory_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [10, 90, 20]
    monkeypatch.setattr(resource_snapshot, "HAS_GPU", True)
    monkeypatch.setattr(resource_snapshot, "gpu_mib", lambda: used.pop(0) if used else 0)

    with resource_snapshot.gpu_peak() as peak:
        wait_until(lambda: not used)

    assert peak.mib == 90


def test_prompts_are_adapted_to_the_model() -> None:
    small, large = (
        ModelLimits(context_len=128, last_id=120, step_s=0.001),
        ModelLimits(context_len=8192, last_id=30_000),
    )

    assert large.ids([501, 31_999]) == [501, 20 + 31_999 % 29_980]
    assert all(20 <= i <= 120 for i in small.ids([0, 501, 31_999]))
    assert small.ids(small.ids([501])) == small.ids([501])
    assert (large.tokens(100), small.tokens(100, prompt_len=3)) == (100, 125)
    assert ModelLimits(context_len=8192, last_id=120, step_s=1.0).tokens(100) == 20
    assert (large.prompt_len(4000, tokens=4), small.prompt_len(4000, tokens=4)) == (4000, 123)


def test_the_core_cases_reuse_servers_as_long_as_possible() -> None:
    names = [case.name for case in CORE]

    assert len(names) == len(set(names)) > 10
    for before, after in pairwise(CORE):  # a server that still runs is reused
        assert before.reaction.ends_server or (before.program, before.flags) == (after.program, after.flags)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES] + [case.name for case in START_CASES]

    assert len(names) == len(set(names)) > 50
