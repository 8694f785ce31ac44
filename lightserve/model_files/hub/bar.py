"""The progress of several downloads as one bar, in the form in which huggingface_hub reports it."""

from __future__ import annotations

import threading
from typing import Any, Self

from lightserve.utils.progress import Progress


class StoppedError(Exception):
    """Another download has failed, or the operator has stopped the server."""


def bar_class(progress: Progress, stop: threading.Event) -> type[Any]:
    """A class with those methods of tqdm that huggingface_hub calls. It adds all files to ``progress``."""
    lock = threading.Lock()

    class Bar:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise StoppedError
            with lock:
                progress.advance(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes received, which ``update`` counts too when they are written."""

        def set_postfix_str(self, *_: object, **__: object) -> None:
            pass

        set_transfer_postfix_str = set_postfix_str

        def refresh(self) -> None:
            pass

        def close(self) -> None:
            pass

    return Bar
