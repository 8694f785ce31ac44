"""The harness notices what it is for."""

from __future__ import annotations

import socket
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from test.faults import stage as stage_module
from test.faults.case import Case
from test.faults.cases import CASES, START_CASES
from test.faults.census import grown
from test.faults.reactions import ABORTED, SERVED_ON, answers, ends
from test.faults.scene import Scene
from test.faults.stage import Stage


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


def test_every_case_has_its_own_name() -> None:
    names = [case.name for case in CASES] + [case.name for case in START_CASES]

    assert len(names) == len(set(names)) > 50
