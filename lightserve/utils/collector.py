"""How often Python's garbage collector runs in a process that serves requests."""

from __future__ import annotations

import gc

# Objects that may be added before a collection; Python's default is 700. A step of 256 streams adds a few thousand for
# a moment, and counting references frees them. What needs a collection is rare: an exception that knows its frames.
YOUNG_OBJECTS = 10_000


def collect_rarely() -> None:
    """To be called once, when the process is ready: what exists now lives until the end, so no collection visits it."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
