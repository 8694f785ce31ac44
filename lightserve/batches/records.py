"""Files and batches as the store has them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from lightserve.batches.entry import Api
from lightserve.batches.usage import NO_USAGE, Usage

OF_MESSAGES = "message_batch"  # purpose of files that only Anthropic's API shows
WINDOW_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Status(enum.StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str  # see ApiKeys
    filename: str
    purpose: str
    bytes: int
    created_at: int  # Unix time
    expires_at: int | None = None


@dataclass(slots=True)
class Batch:
    id: str
    owner: str
    api: Api
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    total: int = 0
    completed: int = 0
    failed: int = 0
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_s: int | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)  # when each status began, by its name
    usage: Usage = NO_USAGE  # of the lines that have ended


@dataclass(frozen=True, slots=True)
class Totals:
    """For the metrics."""

    batches: dict[str, int]  # by status
    requests: dict[str, int]  # that ended since the folder was made, by result
    pending: int  # requests of open batches
    bytes: int  # of all files
