"""One log line per request: its id, its status, its tokens and times, and how it ended, or why it was refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from lightserve.errors import ClientDisconnectedError, LightserveError
from lightserve.messages.output import Admission, RequestDrafts
from lightserve.messages.params import FinishReason
from lightserve.utils.logger import fields, init_logger

logger = init_logger("lightserve.access")

MAX_TEXT = 300  # characters
DISCONNECTED = ClientDisconnectedError.status


class ResponseRecord:
    """Writes the log line of an HTTP request when its status is known. The middleware has one for each request.

    A request that generates has the line of its AccessLog. Any other request has a line only if it is refused.
    """

    def __init__(self, method: str, path: str, is_written: bool) -> None:
        self.reason: str | None = None  # why the request is refused
        self._status: int | None = None  # None: the response has not started
        self._write_line: Callable[[int], None] | None = None  # of a generation that ended before the response started
        self._method = method
        self._path = path
        self._is_written = is_written

    def start(self, status: int, request_id: str) -> None:
        """The response starts."""
        self._status = status
        if self._write_line is not None:
            self._write_line(status)
        elif self._is_written and (400 <= status < 500 or self.reason is not None):
            log_refusal(f"{request_id} {self._method} {self._path}", status, self.reason or "refused")

    def end_generation(self, write_line: Callable[[int], None]) -> None:
        if self._status is None:
            self._write_line = write_line
        else:
            write_line(self._status)

    def end(self) -> None:
        """The request is over. If its task was cancelled, no response has started."""
        if self._status is None and self._write_line is not None:
            self._write_line(DISCONNECTED)


def log_refusal(what: str, status: int, reason: str) -> None:
    """A client may have chosen parts of the texts."""
    logger.info("%s status=%d: %s", _printable(what), status, _printable(reason))


class AccessLog:
    """Counts the tokens of one HTTP request, for the log line and for ``usage``."""

    def __init__(
        self, request_id: str, route: str, is_written: bool = True, response: ResponseRecord | None = None
    ) -> None:
        """``response`` None: there is no HTTP response, in tests."""
        self.request_id = request_id
        self.response_id: str | None = None  # set by the route: aborting it aborts the request
        self.owner = ""  # the client: see ApiKeys
        self.arrived_s = time.monotonic()
        self.prompt_tokens = 0  # set by the route; a prompt counts once, however many choices it has
        self.image_tokens = self.audio_tokens = 0  # of the prompt; set by the route
        self.images_read_s: tuple[float, float] | None = None  # begin and end; None: there were none
        self.cached_tokens = 0
        self.generated_tokens = 0  # counted by the manager
        self.drafts: RequestDrafts | None = None  # of all choices; None: there were none
        self.counts_output = True  # set by the route: False where max_tokens is 0
        self.is_generating = False  # set by the manager
        self.queue_s = 0.0
        self.first_token_s: float | None = None  # since arrived_s
        self.on_tokens: Callable[[str, int, int], None] | None = None  # gets the owner, prompt and output tokens
        self.on_close: Callable[[BaseException | None], None] | None = None  # for traces
        self._route = route
        self._is_written = is_written
        self._response = response
        self._finish_reasons: list[str] = []

    def silent_copy(self) -> AccessLog:
        """For a part of the engine requests: the same id, client and arrival time, and no log line."""
        log = AccessLog(self.request_id, self._route, is_written=False)
        log.arrived_s, log.owner = self.arrived_s, self.owner
        return log

    def count_drafts(self, drafts: RequestDrafts | None) -> None:
        """Of a choice that has ended."""
        if drafts is not None:
            before = self.drafts or RequestDrafts(0, 0)
            self.drafts = RequestDrafts(before.accepted + drafts.accepted, before.rejected + drafts.rejected)

    def add(self, copy: AccessLog) -> None:
        """Count what a silent copy has counted."""
        self.count_drafts(copy.drafts)
        self.cached_tokens += copy.cached_tokens
        self.queue_s = max(self.queue_s, copy.queue_s)
        self.first_token_s = copy.first_token_s if self.first_token_s is None else self.first_token_s
        self._finish_reasons += copy._finish_reasons

    @property
    def output_tokens(self) -> int:
        return self.generated_tokens if self.counts_output else 0

    def record_admission(self, admission: Admission, is_first_choice: bool) -> None:
        """With the first token of a choice."""
        self.cached_tokens += admission.cached_tokens if is_first_choice else 0
        self.queue_s = max(self.queue_s, admission.queue_s)
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.arrived_s

    def record_finish(self, reason: FinishReason) -> None:
        """With the last token of a choice."""
        self._finish_reasons.append(reason.value)

    def finish_reasons(self, error: BaseException | None) -> list[str]:
        """One for each choice, or what ended the request instead."""
        return self._finish_reasons if error is None else [_end(error)]

    def _fields(self, status: int, total_s: float, error: BaseException | None) -> dict[str, object]:
        """For --log_format json."""
        return fields(
            request_id=self.request_id,
            route=self._route,
            status=status,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            queue_s=round(self.queue_s, 6),
            first_token_s=None if self.first_token_s is None else round(self.first_token_s, 6),
            total_s=round(total_s, 6),
            finish=self._finish(error),
        )

    def _finish(self, error: BaseException | None) -> str:
        """Each reason once, with its count: a request may have thousands of texts."""
        if error is not None:
            return _end(error)
        counts = Counter(self._finish_reasons)
        return ",".join(reason if count == 1 else f"{reason}*{count}" for reason, count in counts.items())

    def close(self, error: BaseException | None) -> None:
        self.is_generating = False
        if self.on_close is not None:
            self.on_close(error)
        if self.on_tokens is not None:
            self.on_tokens(self.owner, self.prompt_tokens, self.output_tokens)
        if not self._is_written:
            return
        total_s = time.monotonic() - self.arrived_s
        if self._response is None:
            self._write(_status(error), total_s, error)
        else:
            self._response.end_generation(lambda status: self._write(status, total_s, error))

    def _write(self, status: int, total_s: float, error: BaseException | None) -> None:
        first = "-" if self.first_token_s is None else f"{self.first_token_s:.3f}s"
        logger.info(
            "%s %s status=%d prompt=%d cached=%d output=%d queue=%.3fs first=%s total=%.3fs finish=%s",
            self.request_id,
            self._route,
            status,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.queue_s,
            first,
            total_s,
            self._finish(error),
            extra=self._fields(status, total_s, error),
        )


def _status(error: BaseException | None) -> int:
    if error is None:
        return 200
    return error.status if isinstance(error, LightserveError) else DISCONNECTED


def _printable(text: str) -> str:
    return "".join([char if char.isprintable() else "?" for char in text[:MAX_TEXT]])


def _end(error: BaseException) -> str:
    if isinstance(error, LightserveError) and not isinstance(error, ClientDisconnectedError):
        return f"error:{error.status}"
    return "abort"  # the client disconnected: its task was cancelled or its stream closed
