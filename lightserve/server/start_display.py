"""The progress of a start: one line on a terminal, which the banner replaces; plain lines in a log."""

from __future__ import annotations

import sys
from contextlib import suppress

import msgspec

from lightserve.messages.control import StartupProgress
from lightserve.utils.progress import ProgressState, StreamOutput


class StartDisplay:
    def __init__(self) -> None:
        self._output = StreamOutput(sys.stderr, keeps_lines=False)

    def show(self, progress: StartupProgress) -> None:
        with suppress(OSError, ValueError):  # a full disk or a closed pipe must not stop the server
            self._output.show(ProgressState(**msgspec.structs.asdict(progress)))
