"""The parts of a profile become one file on one clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lightserve.tools import merge_profile
from lightserve.utils.trace_recorder import TraceRecorder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_profile, "_be_a_quiet_child", lambda: None)


def span(ts: float, pid: int = 5) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": 1, "name": "s", "ts": ts, "dur": 1.0}


def test_parts_with_other_bases_are_moved_to_one_clock_that_begins_at_zero(tmp_path: Path) -> None:
    ours = {
        "process": {"pid": 5, "name": "router"},
        "baseTimeNanoseconds": 1_000_000_000_000,
        "traceEvents": [
            {"ph": "M", "pid": 5, "tid": 0, "name": "process_name", "args": {"name": "router"}},
            span(1_000.0),
        ],
    }
    of_torch = {
        "baseTimeNanoseconds": 900_000_000_000,
        "traceEvents": [
            {"ph": "M", "pid": 5, "tid": 0, "ts": 7.0, "name": "process_name", "args": {"name": "python"}},
            {"ph": "M", "pid": 0, "tid": 0, "ts": 7.0, "name": "process_name", "args": {"name": "GPU 0"}},
            span(100_001_250.5, pid=0),
            {"ph": "s", "pid": 5, "tid": 1, "name": "flow", "id": 1, "ts": 100_001_300.0},
        ],
    }
    for name, part in (("a", ours), ("b", of_torch)):
        (tmp_path / name).write_text(json.dumps(part))

    code = merge_profile.main([str(tmp_path / "out.json.gz"), str(tmp_path / "a"), str(tmp_path / "b")])

    assert code == 0
    merged = json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))
    assert merged["baseTimeNanoseconds"] == 1_000_001_000_000
    assert [one["ts"] for one in merged["traceEvents"] if "ts" in one] == [0.0, 250.5, 300.0]
    names = [one["args"]["name"] for one in merged["traceEvents"] if one["ph"] == "M"]
    assert names == ["router", "GPU 0"]


@pytest.mark.parametrize("part", ["", "{", "{}"])
def test_a_damaged_part_is_one_line_and_leaves_no_file(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part").write_text(part)

    assert merge_profile.main([str(tmp_path / "out.json.gz"), str(tmp_path / "part")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


def test_a_recorder_is_bounded(tmp_path: Path) -> None:
    recorder = TraceRecorder("router", max_events=3)
    for i in range(5):
        recorder.add("span", float(i), i + 0.5)
    recorder.write(str(tmp_path / "part"))

    events = json.loads((tmp_path / "part").read_bytes())["traceEvents"]
    assert sum(one["ph"] == "X" for one in events) == 3
    assert recorder.num_dropped == 2
