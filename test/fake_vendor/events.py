"""What was used of this package, for tests: a line in the file ``$FAKE_VENDOR_EVENTS``, once for each process."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

VARIABLE = "FAKE_VENDOR_EVENTS"


@cache
def record(event: str) -> None:
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(f"{event}\n")
