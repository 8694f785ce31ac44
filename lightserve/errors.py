"""What can go wrong, by whose fault it is.

LightserveError
├── RequestError               the client's fault: 4xx, told to the client as it is
│   ├── InvalidRequestError        400
│   ├── PromptTooLongError         400
│   └── OverloadedError            429
└── ServerError                ours: 5xx, logged with its traceback, told to the client without it
    ├── WorkerDiedError            503
    └── ModelFilesError            at start only: one line that names the file, what is wrong and what to do
        └── CheckpointError            the same about a tensor
"""

from __future__ import annotations


class LightserveError(Exception):
    status = 500


class RequestError(LightserveError):
    status = 400


class InvalidRequestError(RequestError):
    pass


class PromptTooLongError(RequestError):
    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"the prompt has {length} tokens; at most {limit} are possible")


class OverloadedError(RequestError):
    status = 429


class ServerError(LightserveError):
    pass


class WorkerDiedError(ServerError):
    status = 503


class ModelFilesError(ServerError):
    pass


class CheckpointError(ModelFilesError):
    pass
