"""Faults in the middle of a beam search, whose steps name the beams before them."""

from __future__ import annotations

import signal

from test.api.test_faults import COMPLETE
from test.faults.case import Case
from test.faults.cases.engines import TWO, kill_router
from test.faults.cases.processes import STEP, send_signal
from test.faults.in_flight import InFlight
from test.faults.reactions import Reaction

BODY = {"prompt": [21, 22, 23], "use_beam_search": True, "best_of": 4, "n": 4, "max_tokens": 60, "ignore_eos": True}

_killed, _killed_of_two = (InFlight(COMPLETE, BODY, "choices", number=3) for _ in range(2))
CASES = [
    Case(
        "kill -9 ls-worker, beam search",
        _killed.during(send_signal("ls-worker", signal.SIGKILL)),
        Reaction("searches go on, same beams", _killed.all_complete),
        flags=STEP,
        within_s=20.0,
        is_long=True,
        restarts=1,
    ),
    Case(
        "kill -9 a router of two, beam search",
        _killed_of_two.during(kill_router(1)),
        Reaction("searches go on elsewhere, same beams", _killed_of_two.all_complete),
        flags=(*STEP, *TWO),
        within_s=20.0,
        is_long=True,
        restarts=1,
    ),
]
