"""The exception classes, by whose fault the error is.

LightserveError
├── RequestError               the client's fault: 4xx, sent to the client unchanged
│   ├── InvalidRequestError        400
│   │   ├── NotSupportedYetError       documented by the API, planned for a later version
│   │   │   └── TextOnlyError              an image, a sound, a video or a file
│   │   ├── TemplateLimitError         the chat template takes too many steps, bytes or seconds
│   │   └── PreviousResponseNotFoundError
│   ├── PromptTooLongError         400
│   ├── TextTooLongError           400: a text to embed or to score
│   ├── UnauthorizedError          401
│   ├── ForbiddenError             403: the key is not for this route, or Host is not a name of this server
│   ├── ModelNotFoundError         404
│   ├── ResponseNotFoundError      404
│   ├── RequestNotFoundError       404: of /debug/requests
│   ├── StreamNotFoundError        404: of Last-Event-ID
│   ├── BodyTimeoutError           408
│   ├── SlowReaderError            408: the client does not read its response
│   ├── ConflictError              409: a profile is running already, or none is
│   ├── StreamGoneError            410: its server died, and no other one can continue it
│   ├── BodyTooLargeError          413
│   ├── MediaTypeError             415
│   ├── WebSocketError             426: the client must use HTTP
│   ├── OverloadedError            429
│   │   └── KeyLimitError              the limits of an API key
│   ├── McpError                   424: an MCP server that the request names cannot be used
│   ├── HeadersTooLargeError       431
│   ├── AbortedError               499: by /abort_request
│   └── ClientDisconnectedError    499, for the log only
└── ServerError                the server's fault: 5xx, logged with its traceback, sent to the client without details
    ├── NotComputableError         500: affects this request only, sent to the client unchanged
    ├── UnavailableError           503: loading, draining or dead
    ├── DeadlineError              504: the request's deadline has passed
    ├── WorkerDiedError            503
    ├── WorkerCallError            500: a call to the model workers failed, besides steps
    ├── OptionError                at start only: a flag or a value in --config
    └── ModelFilesError            at start only: one line that names the file, the problem and the remedy
        ├── UnsupportedModelTypeError
        ├── CheckpointError            the same for a tensor
        └── AdapterError               the same for a LoRA adapter; while the server runs, it is a request's 400
"""

from __future__ import annotations

from typing import Any


class LightserveError(Exception):
    status = 500
    code: str | None = None  # OpenAI's machine-readable code, if there is one
    docs: str | None = None  # the page under docs/ that explains more to the operator, if there is one

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the request field that caused the error


class RequestError(LightserveError):
    status = 400


class InvalidRequestError(RequestError):
    pass


class NotSupportedYetError(InvalidRequestError):
    code = "not_supported"

    def __init__(self, what: str, param: str | None = None, reason: str = "") -> None:
        super().__init__(f"{what} is not supported yet{reason}", param)


class TextOnlyError(NotSupportedYetError):
    def __init__(self, what: str, param: str) -> None:
        super().__init__(what, param, ": this model reads and answers text only")


class TemplateLimitError(InvalidRequestError):
    def __init__(self, cost: str) -> None:
        super().__init__(f"the model's chat template takes {cost} to render these messages")


class PromptTooLongError(RequestError):
    code = "context_length_exceeded"

    def __init__(
        self,
        length: int,
        total: int,
        new_tokens: int | None = None,
        field: str = "max_tokens",
        is_lower_bound: bool = False,
    ) -> None:
        """A prompt of ``length`` tokens does not fit into a context of ``total`` tokens, alone or with the
        ``new_tokens`` that ``field`` of the request asks for. ``is_lower_bound``: the prompt was not encoded."""
        self.length, self.limit = length, total - 1  # tokens of the prompt
        counted = f"at least {length}" if is_lower_bound else length
        reason = f"the prompt has {counted} tokens; the limit is {total - 1}"
        if new_tokens is not None:
            reason = f"prompt {length} + {field} {new_tokens} > {total}; use {field} <= {total - length}"
        super().__init__(
            f"This model's maximum context length is {total} tokens: {reason}",  # OpenAI's phrase: LiteLLM matches it
            None if new_tokens is None else field,
        )


class TextTooLongError(RequestError):
    """A text to embed or to score does not fit. There are no new tokens that would need room."""

    code = "context_length_exceeded"

    def __init__(self, length: int, limit: int, is_lower_bound: bool = False) -> None:
        counted = f"at least {length}" if is_lower_bound else length
        super().__init__(
            f"This model's maximum context length is {limit} tokens: the text has {counted} tokens; shorten it, or "
            "truncate it (truncate_prompt_tokens: -1, or truncate: true)"
        )


class UnauthorizedError(RequestError):
    status = 401
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    status = 403
    code = "insufficient_permissions"


class ModelNotFoundError(RequestError):
    status = 404
    code = "model_not_found"


class ResponseNotFoundError(RequestError):
    status = 404
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"response {response_id[:100]!r} not found: it was deleted, has expired, was sent with store: false, "
            "or belongs to another API key",
            "response_id",
        )


class RequestNotFoundError(RequestError):
    status = 404
    code = "request_not_found"


class StreamNotFoundError(RequestError):
    status = 404
    code = "stream_not_found"

    def __init__(self, event_id: str) -> None:
        super().__init__(
            f"Last-Event-ID {event_id[:100]!r}: there is no such stream: it has expired (--stream_log_ttl), was "
            "started at another endpoint or belongs to another API key; send the request without this header",
        )


class StreamGoneError(RequestError):
    status = 410
    code = "stream_gone"


class PreviousResponseNotFoundError(InvalidRequestError):
    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"previous response {response_id[:100]!r} not found: it was deleted, has expired, was sent with "
            "store: false, or belongs to another API key; send the whole conversation as input",
            "previous_response_id",
        )


class BodyTimeoutError(RequestError):
    status = 408


class SlowReaderError(RequestError):
    status = 408


class ConflictError(RequestError):
    status = 409
    code = "conflict"


class BodyTooLargeError(RequestError):
    status = 413


class MediaTypeError(RequestError):
    status = 415


class WebSocketError(RequestError):
    status = 426


class OverloadedError(RequestError):
    status = 429
    code = "rate_limit_exceeded"
    retry_after_s = 1  # a step takes milliseconds, so the queue is shorter after a second


class KeyLimitError(OverloadedError):
    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class McpError(RequestError):
    status = 424
    code = "mcp_server_error"

    def __init__(self, message: str, details: dict[str, Any] | None = None, param: str | None = None) -> None:
        """``details``: the error as an mcp_call item of OpenAI has it; None: there is only the message."""
        super().__init__(message, param)
        self.details = details


class HeadersTooLargeError(RequestError):
    status = 431


class AbortedError(RequestError):
    status = 499
    code = "request_aborted"


class ClientDisconnectedError(RequestError):
    status = 499


class ServerError(LightserveError):
    pass


class NotComputableError(ServerError):
    code = "not_computable"


class UnavailableError(ServerError):
    status = 503
    code = "service_unavailable"


class DeadlineError(ServerError):
    status = 504
    code = "timeout"


class WorkerDiedError(ServerError):
    status = 503


class WorkerCallError(ServerError):
    """A rank failed in a call of worker_calls.py, or the ranks disagree."""


class ModelFilesError(ServerError):
    docs = "model_files.md"


class UnsupportedModelTypeError(ModelFilesError):
    docs = "models.md"


class OptionError(ServerError):
    """A flag, or a value in --config."""

    docs = "command_line.md"


class CheckpointError(ModelFilesError):
    pass


class AdapterError(ModelFilesError):
    docs = "lora.md"


_BY_STATUS: dict[int, type[LightserveError]] = {
    400: InvalidRequestError,
    404: ModelNotFoundError,
    409: ConflictError,
    429: OverloadedError,
    500: NotComputableError,
    503: UnavailableError,
    504: DeadlineError,
}


def error_from_status(status: int, message: str) -> LightserveError:
    """The exception for an error that another process reported."""
    return _BY_STATUS.get(status, ServerError)(message)


def with_docs(error: BaseException, text: str | None = None) -> str:
    """``text``, or else the error's, for the operator, with the page that explains more, if there is one."""
    text = str(error) if text is None else text
    page = docs_page(error)
    return f"{text} (see docs/{page})" if page else text


def docs_page(error: BaseException) -> str | None:
    """The page under docs/ about the error, or about the error that caused it: that one is more precise."""
    page = None
    cause: BaseException | None = error
    while cause is not None:
        page = getattr(cause, "docs", None) or page
        cause = cause.__cause__
    return page
