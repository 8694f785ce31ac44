"""Faults while embeddings are computed, and pooling requests to a model that generates."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from test.api.test_faults import Client
from test.faults.case import Case
from test.faults.cases.processes import STEP, Fault, send_signal
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import Reaction, ends, responds

FLAGS = ("--task", "embed", *STEP)
EMBED = "/v1/embeddings"
REQUESTS = 4
BODY = {"input": [[20 + i, 30] for i in range(600)], "dimensions": 2}
WRONG_KIND: dict[str, Any] = {
    EMBED: {"input": "a"},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/get_score": {"chat": "a"},
}


class Embeddings:
    """Requests that are in flight while a fault occurs."""

    def __init__(self) -> None:
        self.answers: list[Future[tuple[int, Any]]] = []

    def during(self, fault: Fault) -> Fault:
        def run(context: FaultContext) -> None:
            pool = context.exits.enter_context(ThreadPoolExecutor(REQUESTS))
            self.answers = [pool.submit(_post, context) for _ in range(REQUESTS)]
            context.wait_until(lambda: context.load() > 0)
            fault(context)

        return run

    def all_complete(self, context: FaultContext) -> None:
        expected = _post(context)
        for answer in self.answers:
            status, response = answer.result(context.deadline_s)
            assert status == 200, response
            assert response["data"] == expected[1]["data"]


def _post(context: FaultContext) -> tuple[int, Any]:
    return Client(context.server).post(EMBED, BODY)


def ask_the_wrong_kind(context: FaultContext) -> None:
    for path, body in WRONG_KIND.items():
        status, response = context.client.post(path, body)
        assert "generates text" in str(response)
        context.statuses.append(status)


_killed = Embeddings()
CASES = [
    Case(
        "kill -9 ls-worker, embeddings",
        _killed.during(send_signal("ls-worker", signal.SIGKILL)),
        Reaction("requests go on, same embeddings", _killed.all_complete),
        flags=FLAGS,
        within_s=20.0,
        restarts=1,
    ),
    Case(
        "kill -9 ls-router, embeddings",
        Embeddings().during(send_signal("ls-router", signal.SIGKILL)),
        ends(1, "router"),
        flags=FLAGS,
        is_long=True,
    ),
    Case("pooling requests to a model that generates", ask_the_wrong_kind, responds(400), STREAMING, flags=STEP),
]
