"""Takes a profile of a server under load, for Perfetto, and checks that its processes are on one clock.

    python -m benchmark.serving.server_profile --out FOLDER [--requests 16] [--seconds 3] [flags of the server]

It starts a server with --profile_dir FOLDER, keeps so many requests running, and prints what the profile has: events of
each process, and how much of the work of the GPU, or of torch on a CPU, lies inside a step of the router.
"""

from __future__ import annotations

import argparse
import gzip
import json
import threading
import time
import urllib.request
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.serving.server import Server

START_S = 600.0
REQUEST_S = 600.0
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
FIRST_TOKEN_ID = 1000
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SLACK_US = 100.0  # between the clocks of the CPU and the GPU


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the profile")
    parser.add_argument("--requests", type=int, default=16, help="requests that run at once")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of the profile")
    args, flags = parser.parse_known_args(argv)
    server = Server([*flags, "--profile_dir", args.out])
    try:
        url = server.wait_until_ready(START_S)
        path = profile_under_load(url, args.requests, args.seconds)
    finally:
        server.stop()
    print(report(json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]))
    print(f"{Path(path).stat().st_size / 1e6:.1f} MB in {path}; open it at https://ui.perfetto.dev")


def profile_under_load(url: str, requests: int, seconds: float) -> str:
    """The path of the profile."""
    is_over = threading.Event()
    clients = [threading.Thread(target=_send_requests, args=(url, index, is_over)) for index in range(requests)]
    for client in clients:
        client.start()
    try:
        _post(url, "/v1/completions", _body(requests))  # the first steps of all kinds have run when it is back
        _post(url, "/start_profile", {"max_seconds": 60})
        time.sleep(seconds)
        begin_s = time.monotonic()
        path: str = _post(url, "/stop_profile", {})["path"]
        print(f"/stop_profile took {time.monotonic() - begin_s:.1f} s")
        return path
    finally:
        is_over.set()
        for client in clients:
            client.join()


def report(events: list[dict[str, Any]]) -> str:
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    spans = [one for one in events if one["ph"] == "X"]
    counts = Counter(str(names.get(one["pid"], one["pid"])) for one in spans)
    on_gpu = [one for one in spans if one.get("cat") in GPU_CATEGORIES]
    work = on_gpu or [one for one in spans if one.get("cat") == "cpu_op"]
    steps = [one for one in spans if one["name"] in ("prefill step", "decode step")]
    lines = [f"{name}: {count} spans" for name, count in counts.items()]
    lines.append(f"{len(steps)} steps, {len(on_gpu)} kernels and copies on a GPU")
    lines.append(
        f"{inside(work, steps):.2%} of the {'GPU' if on_gpu else 'torch'} spans lie inside a step of the router"
    )
    return "\n".join(lines)


def inside(work: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> float:
    """The share of the spans that begin in a step, of those between the first and the last step."""
    ordered = sorted((one["ts"], one["ts"] + one["dur"]) for one in steps)
    if not ordered:
        return 0.0
    begins = [begin for begin, _ in ordered]
    ends, latest = [], 0.0
    for _, end in ordered:
        latest = max(latest, end)
        ends.append(latest)
    times = [one["ts"] for one in work if begins[0] <= one["ts"] <= ends[-1]]
    found = [bisect_right(begins, at + SLACK_US) for at in times]
    hits = sum(place > 0 and at <= ends[place - 1] + SLACK_US for at, place in zip(times, found, strict=True))
    return hits / len(times) if times else 0.0


def _send_requests(url: str, index: int, is_over: threading.Event) -> None:
    while not is_over.is_set():
        _post(url, "/v1/completions", _body(index))


def _body(index: int) -> dict[str, Any]:
    prompt = [FIRST_TOKEN_ID + (index * 31 + place) % 1000 for place in range(PROMPT_TOKENS)]
    return {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}


def _post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
        found: dict[str, Any] = json.load(response)
    return found


if __name__ == "__main__":
    main()
