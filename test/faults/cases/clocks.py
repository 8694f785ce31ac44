"""The wall clock jumps, as when a machine hears from a time server: all that waits must look at another clock."""

from __future__ import annotations

from test.faults.case import Case
from test.faults.cases.processes import STEP
from test.faults.reactions import STREAMS_GO_ON
from test.faults.scene import STREAMING, Scene

HOUR_S = 3600


def jump(scene: Scene) -> None:
    """An hour ahead, then to an hour behind; one of the streams has a deadline."""
    scene.streams.append(scene.stream(max_tokens=100, timeout=60.0))
    for offset_s in (HOUR_S, -HOUR_S):
        before_s = told_time_s(scene)
        (scene.running.base / "clock-offset").write_text(str(offset_s))
        assert abs(told_time_s(scene) - before_s) > HOUR_S / 2, "the clock does not jump"
        assert scene.health() == 200


def told_time_s(scene: Scene) -> int:
    """What the server takes it to be."""
    _, answer = scene.complete({"prompt": [501], "max_tokens": 1})
    return int(answer["created"])


CASES = [
    Case(
        "the clock jumps by hours, streaming",
        jump,
        STREAMS_GO_ON,
        STREAMING,
        STEP,
        is_long=True,
        program="test.faults.jumping_server",
    )
]
