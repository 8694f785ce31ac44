"""Where the time of a request goes on its way through the processes of a server on this machine.

The client notes when it writes a request and when it reads the first and the last event. GET /debug/requests
knows the rest: all processes of a machine share the monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmark.serving.stream_client import StreamClient, finish
from lightserve.utils.clock import unix_s

# What a hop lasts from and to. A moment is in ms since the request arrived in its HTTP process.
HOPS = {
    "client -> HTTP process": ("sent", "arrived"),
    "parse, tokenize -> router": ("arrived", "queued"),
    "router -> step": ("queued", "step"),
    "step": ("step", "step_end"),
    "step -> first token in the router": ("step_end", "first_token"),
    "first token -> client": ("first_token", "first_read"),
    "last token -> client": ("finished", "last_read"),
    "all, to the first token": ("sent", "first_read"),
}


class TimedClient(StreamClient):
    """Notes the dates of what it writes and reads."""

    sent_s = first_read_s = last_read_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self.sent_s = unix_s(time.monotonic())  # afterwards the server may have it already
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        had_events = self.events
        super().data_received(data)
        if self.events > had_events:
            self.last_read_s = unix_s(time.monotonic())
            self.first_read_s = self.first_read_s or self.last_read_s


async def measure_hops(url: str, request: bytes, event: bytes, count: int) -> list[dict[str, float]]:
    """Send ``count`` requests one after the other. Returns the moments of each, in ms since it arrived."""
    return [await _moments_of(url, request, event, f"hops-{number}") for number in range(count)]


async def _moments_of(url: str, request: bytes, event: bytes, request_id: str) -> dict[str, float]:
    head, _, body = request.partition(b"\r\n\r\n")
    client = TimedClient(b"%b\r\nX-Request-Id: %b\r\n\r\n%b" % (head, request_id.encode(), body), event)
    await finish(client, url)
    recorded = await asyncio.to_thread(_recorded, url, request_id)
    return moments(recorded) | {
        name: (date_s - recorded["arrived"]) * 1e3
        for name, date_s in (
            ("sent", client.sent_s),
            ("first_read", client.first_read_s),
            ("last_read", client.last_read_s),
        )
    }


def _recorded(url: str, request_id: str) -> Any:
    address = urlsplit(url)
    with urllib.request.urlopen(f"{address.scheme}://{address.netloc}/debug/requests/{request_id}") as response:
        return json.load(response)["sequences"][-1]


def moments(recorded: dict[str, Any]) -> dict[str, float]:
    """Of a sequence in /debug/requests whose prompt was computed in one step."""
    at = {entry["event"]: entry["at_ms"] for entry in recorded["events"]}
    step = next(entry for entry in recorded["events"] if entry["event"] == "prefill")
    return {
        "arrived": 0.0,
        "queued": at["queued"],
        "step": step["at_ms"],
        "step_end": step["at_ms"] + step["duration_ms"],
        "first_token": at["first_token"],
        "finished": at["finished"],
    }


def hop_table(requests: Sequence[dict[str, float]]) -> Iterable[str]:
    """Lines with the median and the 99th percentile of each hop."""
    yield f"{len(requests)} requests, one after the other; ms".ljust(40) + f"{'p50':>9}{'p99':>9}"
    for name, (begin, end) in HOPS.items():
        spans = np.array([moment[end] - moment[begin] for moment in requests])
        yield f"{name:<40}{np.percentile(spans, 50):>9.3f}{np.percentile(spans, 99):>9.3f}"


def print_hops(url: str, request_of: Callable[[str], bytes], event: bytes, count: int) -> None:
    """``request_of``: a request to a host that streams."""
    import uvloop

    request = request_of(urlsplit(url).netloc)
    for line in hop_table(uvloop.run(measure_hops(url, request, event, count))):
        print(line, flush=True)
