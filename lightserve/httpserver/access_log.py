"""One line a request: who asked, what it cost, how it ended."""

from __future__ import annotations

import time

from lightserve.errors import ClientDisconnectedError, LightserveError
from lightserve.io_struct import StrOut
from lightserve.utils.logger import init_logger

logger = init_logger("lightserve.access")


class AccessLog:
    """Counts what one HTTP request used; the sums of ``usage`` come from here too."""

    def __init__(self, request_id: str, route: str, is_written: bool = True) -> None:
        self.request_id = request_id
        self.arrived_s = time.monotonic()
        self.prompt_tokens = 0  # set by the route: each prompt once, however many answers it gets
        self.cached_tokens = 0
        self.output_tokens = 0
        self.shows_output = True  # set by the route: False where a prompt is only scored
        self._route = route
        self._is_written = is_written
        self._queue_s = 0.0
        self._first_token_s: float | None = None
        self._finish_reasons: list[str] = []

    def unwritten(self) -> AccessLog:
        """For the requests that this one is made of: they have its name and its age, and no lines of their own."""
        log = AccessLog(self.request_id, self._route, is_written=False)
        log.arrived_s = self.arrived_s
        return log

    def note(self, out: StrOut, is_first_choice: bool) -> None:
        self.output_tokens += self.shows_output
        if out.admission is not None:
            self.cached_tokens += out.admission.cached_tokens if is_first_choice else 0
            self._queue_s = max(self._queue_s, out.admission.queue_s)
            if self._first_token_s is None:
                self._first_token_s = time.monotonic() - self.arrived_s
        if out.finish_reason is not None:
            self._finish_reasons.append(out.finish_reason.value)

    def close(self, error: BaseException | None) -> None:
        if not self._is_written:
            return
        first = "-" if self._first_token_s is None else f"{self._first_token_s:.3f}s"
        logger.info(
            "%s %s prompt=%d cached=%d output=%d queue=%.3fs first=%s total=%.3fs finish=%s",
            self.request_id,
            self._route,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self._queue_s,
            first,
            time.monotonic() - self.arrived_s,
            _finish(self._finish_reasons, error),
        )


def _finish(reasons: list[str], error: BaseException | None) -> str:
    if error is None:
        return ",".join(reasons)
    if isinstance(error, LightserveError) and not isinstance(error, ClientDisconnectedError):
        return f"error:{error.status}"
    return "abort"  # the client left: its task was cancelled or its stream closed
