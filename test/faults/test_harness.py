"""The harness notices what it is for."""

from __future__ import annotations

import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from test.faults import census, stage as stage_module
from test.faults.case import Case
from test.faults.cases import CASES, CORE, START_CASES
from test.faults.census import GpuMemory, grown
from test.faults.engine import Engine
from test.faults.reactions import ABORTED, SERVED_ON, answers, ends
from test.faults.scene import Scene
from test.faults.stage import Stage
from test.waiting import wait_until


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


def do_nothing(scene: Scene) -> None:
    pass


@pytest.mark.slow
def test_what_a_case_leaves_behind_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "SETTLE_S", 0.5)
    kept: list[socket.socket] = []

    def leak(scene: Scene) -> None:
        kept.append(scene.client.open())

    with pytest.raises(AssertionError, match="left behind: ls-httpserver: descriptors"):
        Case("a connection is kept", leak, SERVED_ON).run(stage, seed=1, slack=6.0)

    assert len(kept) == 2  # what grows once may be a cache, so it was tried again
    for sock in kept:
        sock.close()


@pytest.mark.long
def test_another_reaction_than_the_expected_fails(stage: Stage) -> None:
    with pytest.raises(AssertionError):
        Case("nobody is refused", do_nothing, answers(400)).run(stage, seed=1)
    with pytest.raises(subprocess.TimeoutExpired):
        Case("nobody dies", do_nothing, ends(1), within_s=0.1).run(stage, seed=1)


@pytest.mark.long
def test_a_request_that_goes_on_is_no_abort(stage: Stage) -> None:
    def ask(scene: Scene) -> None:
        scene.stream(max_tokens=8000).read_events(1)

    with pytest.raises(TimeoutError):
        Case("a client stays", ask, ABORTED, within_s=0.5).run(stage, seed=1)


def test_fewer_processes_and_more_of_anything_else_are_told() -> None:
    before = Counter({"ls-router: processes": 1, "ls-router: threads": 5, "ls-router: descriptors": 9})

    assert grown(before, Counter(before)) == ""
    assert grown(before, before - Counter({"ls-router: threads": 1})) == ""
    assert grown(before, before + Counter({"ls-router: threads": 1})) == "ls-router: threads 5 -> 6"
    assert grown(before, Counter()) == "ls-router: processes 1 -> 0"


def test_a_gpu_whose_memory_two_workers_hold_is_told() -> None:
    assert not GpuMemory(before_server=500, before_fault=100_500, peak=101_000, after=100_500).was_held_twice
    assert GpuMemory(before_server=500, before_fault=10_500, peak=20_500, after=10_500).was_held_twice


def test_the_most_of_a_gpu_that_was_in_use_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [10, 90, 20]
    monkeypatch.setattr(census, "HAS_GPU", True)
    monkeypatch.setattr(census, "gpu_mib", lambda: used.pop(0) if used else 0)

    with census.gpu_peak() as peak:
        wait_until(lambda: not used)

    assert peak.mib == 90


def test_prompts_fit_the_model() -> None:
    small, large = Engine(context_len=128, last_id=120, step_s=0.001), Engine(context_len=8192, last_id=30_000)

    assert large.ids([501, 31_999]) == [501, 20 + 31_999 % 29_980]
    assert all(20 <= i <= 120 for i in small.ids([0, 501, 31_999]))
    assert small.ids(small.ids([501])) == small.ids([501])
    assert (large.tokens(100), small.tokens(100, prompt_len=3)) == (100, 125)
    assert Engine(context_len=8192, last_id=120, step_s=1.0).tokens(100) == 20
    assert (large.prompt_len(4000, tokens=4), small.prompt_len(4000, tokens=4)) == (4000, 123)


def test_the_core_needs_as_few_servers_as_it_ends() -> None:
    names = [case.name for case in CORE]

    assert len(names) == len(set(names)) > 10
    for before, after in pairwise(CORE):  # no server is thrown away that could serve on
        assert before.reaction.ends_server or (before.program, before.flags) == (after.program, after.flags)


def test_every_case_has_its_own_name() -> None:
    names = [case.name for case in CASES] + [case.name for case in START_CASES]

    assert len(names) == len(set(names)) > 50
