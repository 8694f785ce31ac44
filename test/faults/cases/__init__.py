"""All cases, in an order in which those that share a server come one after the other."""

from __future__ import annotations

from test.faults.case import Case
from test.faults.cases import connections, hosts, processes, scheduling
from test.faults.start_case import StartCase

CASES: list[Case] = sorted(
    [*connections.CASES, *scheduling.CASES, *processes.CASES],
    key=lambda case: (case.program, case.flags, case.reaction.ends_server),
)
START_CASES: list[StartCase] = hosts.CASES
