"""A batch that is being run: which of its lines come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lightserve.batches.line import NumberedLine, read_lines
from lightserve.batches.records import Batch
from lightserve.batches.store import BatchStore


class OpenBatch:
    def __init__(self, batch: Batch, store: BatchStore) -> None:
        self.batch = batch
        self.in_flight = 0
        self._finished = store.finished_lines(batch.id)
        self._returned: deque[NumberedLine] = deque()
        self._unread: Iterator[NumberedLine] = read_lines(store.path_of(batch.input_file_id))
        self._has_unread = True

    def next_line(self) -> NumberedLine | None:
        """None: all lines have begun."""
        if self._returned:
            return self._returned.popleft()
        for line in self._unread:
            if line.number not in self._finished:
                return line
        self._has_unread = False
        return None

    def give_back(self, line: NumberedLine) -> None:
        """It was stopped, or the engine could not take it: it begins again later."""
        self._returned.append(line)

    @property
    def has_ended(self) -> bool:
        """Every line has a result."""
        return not self._has_unread and not self._returned and not self.in_flight
