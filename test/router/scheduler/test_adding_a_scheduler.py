"""The code on the page about policies must work: this test runs it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightserve.router.policy import POLICIES, Policy
from lightserve.router.scheduler import SchedulerLimits
from lightserve.simulate.__main__ import main
from lightserve.simulate.load import Load, fixed, mixed
from lightserve.simulate.replica import Setup
from lightserve.simulate.simulation import simulate

PAGE = Path(__file__).parents[3] / "docs" / "adding_a_scheduler.md"


def policy_of_the_page() -> type[Policy]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    names: dict[str, type[Policy]] = {}
    exec(blocks[0], names)
    return names["ShortestFirst"]


def test_the_policy_of_the_page_serves_all_and_short_prompts_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of_the_page()
    monkeypatch.setitem(POLICIES, policy.name, policy)
    load = Load(mixed(fixed(20), fixed(4000), 0.2), fixed(10), count=200, streams=100, max_new_tokens=10)
    setup = Setup("fifo", SchedulerLimits(8, 512, 512), pool_size=100_000)

    fifo, ours = (simulate(replace(setup, policy=name), load) for name in ("fifo", policy.name))

    assert ours.requests == fifo.requests == load.count
    assert np.median(ours.ttft) < np.median(fifo.ttft) / 2


def test_the_policies_differ_in_the_commands_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer requests, to be quick."""
    policy = policy_of_the_page()
    monkeypatch.setitem(POLICIES, policy.name, policy)
    commands = re.findall(r"^python -m lightserve.simulate (--load .*)$", PAGE.read_text(), re.MULTILINE)

    assert len(commands) == 2
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["simulate", *command.split(), "--requests", "100"])
        main()
        _, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
        times = {row.partition("|")[2].split()[2] for row in rows}
        assert len(times) == len(rows) > 1
