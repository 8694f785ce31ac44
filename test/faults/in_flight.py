"""Requests that are in flight while a fault occurs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from test.api.test_faults import Client
from test.faults.case import Case
from test.faults.cases.processes import Fault
from test.faults.harness import FaultContext
from test.faults.reactions import Reaction


class InFlight:
    """``number`` of the same. ``field`` of their responses does not depend on the fault."""

    def __init__(self, path: str, body: dict[str, Any], field: str, number: int) -> None:
        self._path = path
        self._body = body
        self._field = field
        self._number = number
        self._answers: list[Future[tuple[int, Any]]] = []

    def survive(self, name: str, fault: Fault, words: str, flags: tuple[str, ...], is_long: bool = False) -> Case:
        """A fault that no client sees, because something else takes the place of what died."""
        reaction = Reaction(words, self.all_complete)
        return Case(name, self.during(fault), reaction, flags=flags, within_s=20.0, is_long=is_long, restarts=1)

    def during(self, fault: Fault) -> Fault:
        def run(context: FaultContext) -> None:
            pool = context.exits.enter_context(ThreadPoolExecutor(self._number))
            self._answers = [pool.submit(self._post, context) for _ in range(self._number)]
            context.wait_until(lambda: context.load() > 0)
            fault(context)

        return run

    def all_complete(self, context: FaultContext) -> None:
        _, expected = self._post(context)
        for answer in self._answers:
            status, response = answer.result(context.deadline_s)
            assert status == 200, response
            assert response[self._field] == expected[self._field]

    def _post(self, context: FaultContext) -> tuple[int, Any]:
        return Client(context.server).post(self._path, self._body)
