"""The guard measures the tree that it is given, and tells a change from noise."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmark.guard.__main__ import TREE, main
from benchmark.guard.loads import QUICK_LOADS, Load
from benchmark.guard.noise import Judged
from benchmark.guard.table import judge, lines_of, log_line
from lightserve.bench.client.sweep import ServerProblemError
from test.bench.fake_openai_server import Behaviour, fake_server

SLOW_S = 0.03
SLOW_WORKER = f"""

def _slow_launch(self, step, _launch=ModelWorker.launch):
    import time

    time.sleep({SLOW_S})
    return _launch(self, step)


ModelWorker.launch = _slow_launch
"""


def copy_of_this_tree(folder: Path) -> Path:
    shutil.copytree(TREE / "lightserve", folder / "lightserve", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.slow
def test_each_side_is_served_by_its_own_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = copy_of_this_tree(tmp_path)
    with (slow / "lightserve/worker/worker.py").open("a") as source:
        source.write(SLOW_WORKER)
    load = QUICK_LOADS[0].name

    code = main(["--before", str(TREE), "--after", str(slow), "--quick", "--loads", load, "--rounds", "1"])

    printed = capsys.readouterr().out
    assert len(re.findall(r"^\w+, .* CPU us [1-9]", printed, re.MULTILINE)) == 2
    tpot_ms = {side: float(ms) for side, ms in re.findall(r"^(\w+), .* TPOT p50 ([\d.]+)", printed, re.MULTILINE)}
    assert tpot_ms["after"] >= SLOW_S * 1e3
    assert tpot_ms["after"] > tpot_ms["before"]
    assert code == 0, "one run each says nothing about noise"
    assert re.search(r"^\| \d{4}-\d\d-\d\d \| after \| before \|", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("before", "after", "more_is_better", "verdict"),
    [
        ([100, 100.2], [97, 97.1], True, "worse"),
        ([100, 100.2], [97, 97.1], False, "better"),
        ([100, 104], [97, 101], True, ""),  # within the noise of either side
        ([100, 100], [99.2, 99.2], True, ""),  # below the floor
        ([100], [50], True, ""),
    ],
)
def test_only_what_exceeds_the_noise_of_both_sides_has_moved(
    before: list[float], after: list[float], more_is_better: bool, verdict: str
) -> None:
    assert Judged(before, after, more_is_better).verdict == verdict


def test_a_change_is_in_the_table_and_in_the_line_for_the_log() -> None:
    figures = {("c8", "tokens/s"): 100.0, ("c8", "ITL p99"): 9.0}
    slower = {("c8", "tokens/s"): 90.0, ("c8", "ITL p99"): 9.0}

    judged = judge(
        [{("start", "first, s"): 20.0, **figures}, figures], [{("start", "first, s"): 9.0, **slower}, slower]
    )

    table = "\n".join(lines_of(judged))
    assert re.search(r"c8 +tokens/s +100.00 +90.00 +-10.0% +1.0 % +worse", table)
    assert re.search(r"start +first, s +20.00 +9.00 +-55.0% +20.00; 9.00", table)
    line = log_line(("aaaa", "bbbb"), "H200", judged)
    assert line.endswith("| bbbb | aaaa | H200 | c8 90.00 tokens/s | c8 tokens/s -10.0 %, worse |")


def test_a_load_with_a_failed_request_is_no_measurement() -> None:
    load = Load("c2", 6, 8, 4, ("tokens/s",), concurrency=2)

    with fake_server(Behaviour(fails_every=4)) as server, pytest.raises(ServerProblemError, match=r"c2: 1 of 6 .* 503"):
        load.run(server.url, seed=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loads", "c9"], "there is no c9; there are one, deep, c8"),
        (["--rounds", "0"], "--rounds is 0"),
        ([], "has no lightserve to measure"),
    ],
)
def test_wrong_flags_are_refused_before_a_server_starts(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--before", str(tmp_path), *flags])

    assert code == 2
    assert message in capsys.readouterr().err
