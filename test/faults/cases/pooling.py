"""Faults while embeddings are computed, and pooling requests to a model that generates."""

from __future__ import annotations

import signal
from typing import Any

from test.faults.case import Case
from test.faults.cases.processes import STEP, send_signal
from test.faults.harness import STREAMING, FaultContext
from test.faults.in_flight import InFlight
from test.faults.reactions import ends, responds

FLAGS = ("--task", "embed", "--null_step_ms", "20")
EMBED = "/v1/embeddings"
BODY = {"input": [[20 + i, 30] for i in range(600)], "dimensions": 2}
WRONG_KIND: dict[str, Any] = {
    EMBED: {"input": "a"},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/get_score": {"chat": "a"},
}


def ask_the_wrong_kind(context: FaultContext) -> None:
    for path, body in WRONG_KIND.items():
        status, response = context.client.post(path, body)
        assert "generates text" in str(response)
        context.statuses.append(status)


_killed, _lost = (InFlight(EMBED, BODY, "data", number=4) for _ in range(2))
CASES = [
    _killed.survive(
        "kill -9 ls-worker, embeddings",
        send_signal("ls-worker", signal.SIGKILL),
        "requests go on, same embeddings",
        FLAGS,
    ),
    Case(
        "kill -9 ls-router, embeddings",
        _lost.during(send_signal("ls-router", signal.SIGKILL)),
        ends(1, "router"),
        flags=FLAGS,
        is_long=True,
    ),
    Case("pooling requests to a model that generates", ask_the_wrong_kind, responds(400), STREAMING, flags=STEP),
]
