"""The wall clock jumps, as after an update from a time server. Timeouts must use the monotonic clock."""

from __future__ import annotations

from test.faults.case import Case
from test.faults.cases.processes import STEP
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import STREAMS_CONTINUE

HOUR_S = 3600


def jump(context: FaultContext) -> None:
    """Jump an hour ahead, then to an hour behind. One of the streams has a deadline."""
    context.streams.append(context.stream(max_tokens=100, timeout=60.0))
    for offset_s in (HOUR_S, -HOUR_S):
        before_s = server_time_s(context)
        (context.running.base / "clock-offset").write_text(str(offset_s))
        assert abs(server_time_s(context) - before_s) > HOUR_S / 2, "the clock does not jump"
        assert context.health() == 200


def server_time_s(context: FaultContext) -> int:
    """The server's wall clock."""
    _, response = context.complete({"prompt": [501], "max_tokens": 1})
    return int(response["created"])


CASES = [
    Case(
        "the clock jumps by hours, streaming",
        jump,
        STREAMS_CONTINUE,
        STREAMING,
        STEP,
        is_long=True,
        program="test.faults.jumping_server",
    )
]
