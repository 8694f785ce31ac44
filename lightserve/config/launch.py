"""Options of the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightserve.config.option import FlagGroup, check_options, option
from lightserve.utils.logger import LogFormat

Switch = Literal["on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Options of the launcher."""

    drain_timeout: float = option(
        30.0, "seconds for running requests to finish after SIGTERM", group=FlagGroup.FAULTS, at_least=0
    )
    restart_worker: Switch = option(
        "on", "replace model workers and HTTP processes that die; off: the server ends instead", group=FlagGroup.FAULTS
    )
    process_timeout: float = option(
        60.0,
        "seconds without a heartbeat after which a process is killed, a worker after half of that; 0: never",
        group=FlagGroup.FAULTS,
        at_least=0,
    )
    profile_dir: str | None = option(
        None,
        "folder for the profiles of POST /start_profile; default: no profile can be taken",
        group=FlagGroup.OBSERVABILITY,
    )
    log_format: LogFormat | None = option(
        None,
        "text: lines for people; json: an object per line, for programs; default: $LIGHTSERVE_LOG_FORMAT or text",
        group=FlagGroup.OBSERVABILITY,
    )
    null_worker: bool = option(
        False,
        "run without a model: the worker returns made-up tokens, to measure the rest of the server",
        group=FlagGroup.DEVELOPMENT,
    )
    null_step_ms: float = option(
        0.0, "milliseconds that a step of the null worker takes", group=FlagGroup.DEVELOPMENT, at_least=0
    )
    null_token_us: float = option(
        0.0, "microseconds that each token adds to a step of the null worker", group=FlagGroup.DEVELOPMENT, at_least=0
    )

    def __post_init__(self) -> None:
        check_options(self)
