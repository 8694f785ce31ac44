"""Which tier pays, against what can be computed by hand."""

from __future__ import annotations

import sys

import pytest

from lightserve.simulate.gpu import H200
from lightserve.simulate.shapes import LLAMA_8B, SHAPES
from lightserve.simulate.tiers import HEADER, RATES, compute_s, least_rate, load_s, main


def test_a_prompt_is_computed_in_steps_that_see_what_is_before() -> None:
    two = H200.step_s(2048, 0, 2048 * 1024) + H200.step_s(952, 0, 952 * (2048 + 476))

    assert compute_s(H200, 3000) == pytest.approx(two)


def test_a_load_takes_its_bytes_by_the_rate() -> None:
    shape = SHAPES["llama3-70b"]

    assert load_s(shape, 4, "ram", 50e9, 1000) == pytest.approx(1000 * 327_680 / 200e9)
    assert load_s(shape, 4, "disk", 6e9, 1000) == pytest.approx(0.2e-3 + 1000 * 327_680 / 6e9)


@pytest.mark.parametrize("tier", RATES)
def test_at_the_least_rate_both_take_the_same(tier: str) -> None:
    rate = least_rate(LLAMA_8B, 2, tier, 4000)

    assert load_s(LLAMA_8B, 2, tier, rate, 4000) == pytest.approx(compute_s(LLAMA_8B.cost(2), 4000))


def test_the_command_says_which_tier_pays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--shape llama3-8b --tp 1 --tokens 8000 --rate remote=1e6 disk=1e12"
    monkeypatch.setattr(sys, "argv", ["tiers", *flags.split()])

    main()

    header, ram, disk, remote = capsys.readouterr().out.splitlines()
    assert header == HEADER
    assert "pays, " in ram
    assert "pays, " in disk
    assert "does not pay" in remote


@pytest.mark.parametrize("flags", ["--rate tape=1", "--rate ram=0", "--tokens 0"])
def test_wrong_figures_are_refused(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tiers", *flags.split()])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
