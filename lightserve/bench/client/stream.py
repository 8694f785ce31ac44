"""Server-sent events of a streamed completion or chat completion, into a record."""

from __future__ import annotations

from typing import Any

import msgspec

from lightserve.bench.client.record import Record

ERROR_BYTES = 2000  # of a response that is no stream; more would not fit into a report
ERROR_CHARS = 300


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamedResponse:
    """Takes the bytes of one response as they arrive. ``finish`` says whether it was a whole stream."""

    def __init__(self, record: Record, keeps_text: bool = False) -> None:
        self.record = record
        self._keeps_text = keeps_text
        self._status = 0  # 0: no response yet
        self._is_stream = False
        self._rest = b""  # an incomplete line, or the start of a body that is no stream
        self._is_done = False

    @property
    def has_begun(self) -> bool:
        return self._status != 0

    def start(self, status: int, content_type: bytes) -> None:
        self._status = status
        self._is_stream = status == 200 and content_type.startswith(b"text/event-stream")

    def feed(self, data: bytes, now: float) -> None:
        if not self._is_stream:
            self._rest = (self._rest + data)[:ERROR_BYTES]
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def finish(self) -> None:
        """The response has ended. A stream without [DONE] and without a finish reason was cut off."""
        record = self.record
        if record.error:
            return
        if not self._is_stream:
            record.error = self._refusal()
        elif not record.event_times:
            record.error = "the stream has no output"
        elif not self._is_done and record.finish_reason is None:
            record.error = "the stream ended early"

    def _refusal(self) -> str:
        if self._status == 200:
            return "the response is not streamed (Content-Type is not text/event-stream)"
        return f"HTTP {self._status}: {_message(self._rest)}"[:ERROR_CHARS]

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:  # ValidationError is one too
            self._fail(f"an event is not of the OpenAI schema: {error}")
            return
        if event.error is not None:
            self._fail(f"error in the stream: {_error_text(event.error)}")
        if event.choices:
            self._take_choice(event.choices[0], now)
        if event.usage is not None:
            self._take_usage(event.usage)

    def _take_choice(self, choice: _Choice, now: float) -> None:
        record = self.record
        record.finish_reason = choice.finish_reason or record.finish_reason
        if _is_only_role(choice):  # it may be sent before the model has run
            return
        record.event_times.append(now)
        if self._keeps_text:
            record.text += _text_of(choice)

    def _take_usage(self, usage: _Usage) -> None:
        """The last one counts: some servers send usage with every event."""
        record = self.record
        record.input_tokens = usage.prompt_tokens
        record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def _fail(self, error: str) -> None:
        self.record.error = self.record.error or error[:ERROR_CHARS]


def _is_only_role(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None or delta.role is None or choice.finish_reason is not None:
        return False
    return not (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def _text_of(choice: _Choice) -> str:
    delta = choice.delta
    pieces = [choice.text] if delta is None else [delta.reasoning_content or delta.reasoning, delta.content]
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _message(body: bytes) -> str:
    """The message of an error body: OpenAI's, FastAPI's, or its text."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip() or "no body"
    if isinstance(content, dict):
        content = content.get("error", content.get("detail", content.get("message", content)))
    return _error_text(content)


def _error_text(error: Any) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
