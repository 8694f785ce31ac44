"""What the client saw of one request."""

from __future__ import annotations

from itertools import pairwise

import msgspec


class Record(msgspec.Struct, kw_only=True, tag=True):
    """Times are seconds of ``time.monotonic``, which all processes of a machine share."""

    index: int
    due: float  # when the arrival process wanted the request to be sent
    sent: float = 0.0
    ended: float = 0.0  # when the response was complete, or given up
    event_times: list[float] = []  # when each event with output arrived; several events may share one read
    input_tokens: int | None = None  # from the server's usage
    output_tokens: int | None = None  # from the server's usage
    cached_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""  # kept only if a tokenizer has to count it
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.event_times[0] - self.sent

    @property
    def e2e_s(self) -> float:
        """Until the last event with output. Bytes that follow, such as usage, carry no token."""
        return self.event_times[-1] - self.sent

    @property
    def itls_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.event_times)]
