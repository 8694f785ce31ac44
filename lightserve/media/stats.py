"""What an HTTP process counts of the images of requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lightserve.errors import OverloadedError, RequestError
from lightserve.messages.metrics import image_histogram
from lightserve.messages.request import ImageCounts


class ImageStats:
    def __init__(self) -> None:
        self.num_reading = 0  # requests whose images are fetched and read now
        self._fetching = self._reported = 0  # images that are fetched now, and those of the last message
        self._fetched = image_histogram()
        self._refused = Counter[str]()

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.num_reading += 1
        try:
            yield
        finally:
            self.num_reading -= 1

    @contextmanager
    def fetching(self) -> Iterator[None]:
        begin_s = time.monotonic()
        self._fetching += 1
        try:
            yield
            self._fetched.observe(time.monotonic() - begin_s)
        except RequestError as error:
            self._refused["busy" if isinstance(error, OverloadedError) else "fetch"] += 1
            raise
        finally:
            self._fetching -= 1

    def refused(self, reason: str) -> None:
        """One of IMAGE_REFUSALS."""
        self._refused[reason] += 1

    def take(self, process: int) -> ImageCounts | None:
        """Since the last call; None: nothing has changed. ``process``: the number of this one."""
        if not any(self._fetched.counts) and self._fetching == self._reported and not self._refused:
            return None
        counts = ImageCounts(process, self._fetched.counts, self._fetched.total, self._fetching, dict(self._refused))
        self._fetched, self._reported = image_histogram(), self._fetching
        self._refused.clear()
        return counts
