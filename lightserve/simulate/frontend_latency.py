"""What comes before a simulated router: the way of a request through HTTP, and of its tokens back to the client."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontendLatency:
    """HTTP processes. Without any, requests are in the router when clients send them."""

    processes: int = 0
    to_http_s: float = 0.0  # from the client, latency only
    request_s: float = 0.0  # of an HTTP process, for every request
    token_s: float = 0.0  # and for every token of its prompt
    to_client_s: float = 0.0  # a token from the router through the detokenizer and HTTP


NO_FRONTEND = FrontendLatency()
# benchmark.serving_path --hops on a Neoverse N1: 0.87 + 0.10 ms to the step, 0.95 ms to parse and tokenise, 0.04 + 1.14
# ms back; 13 ms for 8,000 tokens. The host of an H200 is 1.8 times as fast: the program gives 35,500 tokens/s there
# instead of 19,500.
HOST_SPEED = 1.8
MEASURED_FRONTEND = FrontendLatency(
    4,
    to_http_s=0.97e-3 / HOST_SPEED,
    request_s=0.95e-3 / HOST_SPEED,
    token_s=13e-3 / 8000 / HOST_SPEED,
    to_client_s=1.18e-3 / HOST_SPEED,
)


class HttpProcesses:
    """Requests take turns. A process works on one after the other."""

    def __init__(self, frontend: FrontendLatency) -> None:
        self._frontend = frontend
        self._free_s = [0.0] * frontend.processes  # a heap: when each has no more to do

    def arrival_s(self, sent_s: float, prompt_len: int) -> float:
        """When a request is in the router, if the client sends it at ``sent_s``. Call it in the order of that time."""
        if not self._free_s:
            return sent_s
        begin_s = max(sent_s + self._frontend.to_http_s, self._free_s[0])
        end_s = begin_s + self._frontend.request_s + prompt_len * self._frontend.token_s
        heapq.heapreplace(self._free_s, end_s)
        return end_s
