"""Faults in the middle of a beam search, whose steps name the beams before them."""

from __future__ import annotations

import signal

from test.api.test_faults import COMPLETE
from test.faults.cases.engines import TWO, kill_router
from test.faults.cases.processes import STEP, send_signal
from test.faults.in_flight import InFlight

BODY = {"prompt": [21, 22, 23], "use_beam_search": True, "best_of": 4, "n": 4, "max_tokens": 60, "ignore_eos": True}

_killed, _killed_of_two = (InFlight(COMPLETE, BODY, "choices", number=3) for _ in range(2))
CASES = [
    _killed.survive(
        "kill -9 ls-worker, beam search",
        send_signal("ls-worker", signal.SIGKILL),
        "searches go on, same beams",
        STEP,
        is_long=True,
    ),
    _killed_of_two.survive(
        "kill -9 a router of two, beam search",
        kill_router(1),
        "searches go on elsewhere, same beams",
        (*STEP, *TWO),
        is_long=True,
    ),
]
