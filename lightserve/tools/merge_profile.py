"""Joins the parts of a profile into one file for Perfetto: ``merge_profile OUT.json.gz PART ...``

The router runs it as a process of its own: the parts of a GPU have some hundred megabytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

NICENESS = 10  # steps of the server go first
PIDS = 1 << 22  # of a machine, at most
OF_NODE = re.compile(r"\.node-(\d+)\.part$")  # utils/trace_recorder.py
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("merge_profile: give the file to write and its parts", file=sys.stderr)
        return 2
    _be_a_quiet_child()
    out, *parts = argv
    unfinished = f"{out}.tmp"
    try:
        merged = merge(map(read_part, parts))
        Path(unfinished).write_bytes(gzip.compress(orjson.dumps(merged), compresslevel=1))
        os.replace(unfinished, out)
    except (OSError, ValueError, KeyError) as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def read_part(path: str) -> dict[str, Any]:
    """Machines give their processes the same ids: those of another node get other ones."""
    trace: dict[str, Any] = orjson.loads(Path(path).read_bytes())
    node = OF_NODE.search(path)
    if node is not None:
        for entry in (*trace["traceEvents"], *([trace["process"]] if "process" in trace else ())):
            if "pid" in entry:
                pid = entry["pid"]
                entry["pid"] = pid + PIDS * int(node[1]) if isinstance(pid, int) else f"{pid} of node {node[1]}"
    return trace


def merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One trace on one clock, which begins with the first event. Our names of processes replace torch's."""
    loaded = list(parts)
    bases_us = [trace.get("baseTimeNanoseconds", 0) / 1e3 for trace in loaded]
    ours = {trace["process"]["pid"] for trace in loaded if "process" in trace}
    times = [
        base + event["ts"]
        for trace, base in zip(loaded, bases_us, strict=True)
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
    ]
    begin_us = min(times, default=0.0)
    events = [
        _shifted(event, base - begin_us)
        for trace, base in zip(loaded, bases_us, strict=True)
        for event in trace["traceEvents"]
        if "process" in trace or not _names_process(event, ours)
    ]
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": round(begin_us * 1e3), "traceEvents": events}


def _shifted(event: dict[str, Any], by_us: float) -> dict[str, Any]:
    if event.get("ph") == "M" or "ts" not in event:
        event.pop("ts", None)  # a name has no time
    else:
        event["ts"] = round(event["ts"] + by_us, 3)
    return event


def _names_process(event: dict[str, Any], pids: set[int]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "process_name" and event.get("pid") in pids


def _be_a_quiet_child() -> None:
    os.nice(NICENESS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the router


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
