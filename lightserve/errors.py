"""What can go wrong, by whose fault it is.

LightserveError
├── RequestError               the client's fault: 4xx, told to the client as it is
│   ├── InvalidRequestError        400
│   │   └── NotSupportedYetError       the contract names it, a later version does it
│   ├── PromptTooLongError         400
│   ├── UnauthorizedError          401
│   ├── ForbiddenError             403: the key is right, but not for this
│   ├── ModelNotFoundError         404
│   ├── ResponseNotFoundError      404: none is stored
│   ├── BodyTimeoutError           408
│   ├── UnreadResponseError        408: the client does not read the response
│   ├── BodyTooLargeError          413
│   ├── MediaTypeError             415
│   ├── OverloadedError            429
│   ├── HeadTooLargeError          431
│   ├── AbortedError               499: by /abort_request
│   └── ClientDisconnectedError    499, for the log only
└── ServerError                ours: 5xx, logged with its traceback, told to the client without it
    ├── NotComputableError         500: of this request alone, and told to the client as it is
    ├── UnavailableError           503: loading, draining or dead
    ├── DeadlineError              504: the request's time was over
    ├── WorkerDiedError            503
    └── ModelFilesError            at start only: one line that names the file, what is wrong and what to do
        └── CheckpointError            the same about a tensor
"""

from __future__ import annotations


class LightserveError(Exception):
    status = 500
    code: str | None = None  # OpenAI's machine-readable word, where there is one

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the field of the request that is to blame


class RequestError(LightserveError):
    status = 400


class InvalidRequestError(RequestError):
    pass


class NotSupportedYetError(InvalidRequestError):
    code = "not_supported"

    def __init__(self, what: str, param: str | None = None) -> None:
        super().__init__(f"{what} is not supported yet", param)


class PromptTooLongError(RequestError):
    code = "context_length_exceeded"

    def __init__(self, length: int, limit: int, new_tokens: int | None = None) -> None:
        beside = "" if new_tokens is None else f" beside {new_tokens} new ones"
        total = limit + (1 if new_tokens is None else new_tokens)
        super().__init__(
            f"This model's maximum context length is {total} tokens: "  # OpenAI's words: by them LiteLLM knows it
            f"the prompt has {length} tokens; at most {max(limit, 0)} are possible{beside}"
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

    def __init__(self, response_id: str, param: str | None = None) -> None:
        found = f"there is no response {response_id[:100]!r}: this server stores none; send the whole conversation"
        super().__init__(found, param)


class BodyTimeoutError(RequestError):
    status = 408


class UnreadResponseError(RequestError):
    status = 408


class BodyTooLargeError(RequestError):
    status = 413


class MediaTypeError(RequestError):
    status = 415


class OverloadedError(RequestError):
    status = 429
    code = "rate_limit_exceeded"


class HeadTooLargeError(RequestError):
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


class ModelFilesError(ServerError):
    pass


class CheckpointError(ModelFilesError):
    pass


_BY_STATUS: dict[int, type[LightserveError]] = {
    400: InvalidRequestError,
    429: OverloadedError,
    500: NotComputableError,
    503: UnavailableError,
    504: DeadlineError,
}


def error_of(status: int, message: str) -> LightserveError:
    """The error that another process put into words."""
    return _BY_STATUS.get(status, ServerError)(message)
