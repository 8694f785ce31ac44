"""The end of a batch: its result files, and what became of requests that were not run."""

from __future__ import annotations

import time
from collections.abc import Iterator

from lightserve.batches.entry import Entry, Unfinished, unfinished_entry
from lightserve.batches.line import parse_line, read_lines
from lightserve.batches.records import OF_MESSAGES, Batch, Status, StoredFile
from lightserve.batches.store import BatchStore
from lightserve.httpserver.batches.storage import write_lines

_REASONS: dict[Status, Unfinished] = {Status.EXPIRED: "expired", Status.CANCELLED: "cancelled"}


def finish_batch(store: BatchStore, batch: Batch, status: Status) -> None:
    """Write the result files, then make them and the end of the batch known in one transaction."""
    missing = _Unfinished(store, batch, _REASONS.get(status))
    files = []
    if batch.api == "anthropic":
        texts = (entry.text for entry in _entries(store, batch, missing))
        output = write_lines(store, texts, batch.owner, (f"{batch.id}_results.jsonl", OF_MESSAGES))
        errors = None
    else:
        output = _write(store, batch, missing, "output")
        errors = _write(store, batch, missing, "error")
    files = [file for file in (output, errors) if file is not None]
    batch.output_file_id = None if output is None else output.id
    batch.error_file_id = None if errors is None else errors.id
    store.finish(batch, status, [_with_expiry(file, batch) for file in files], missing.count, int(time.time()))


def _write(store: BatchStore, batch: Batch, missing: _Unfinished, kind: str) -> StoredFile | None:
    wanted = kind == "error"
    texts = (entry.text for entry in _entries(store, batch, missing) if entry.is_error is wanted)
    return write_lines(store, texts, batch.owner, (f"{batch.id}_{kind}.jsonl", "batch_output"))


def _with_expiry(file: StoredFile, batch: Batch) -> StoredFile:
    expires_at = None if batch.output_expires_s is None else file.created_at + batch.output_expires_s
    names = file.id, file.owner, file.filename, file.purpose
    return StoredFile(*names, file.bytes, file.created_at, expires_at)


def _entries(store: BatchStore, batch: Batch, missing: _Unfinished) -> Iterator[Entry]:
    for _, entry in store.results(batch.id):
        yield entry
    yield from missing.entries()


class _Unfinished:
    """The requests that have no result."""

    def __init__(self, store: BatchStore, batch: Batch, reason: Unfinished | None) -> None:
        self.count = 0 if reason is None else batch.total - batch.completed - batch.failed  # 0 of an unchecked file
        self._store = store
        self._batch = batch
        self._reason = reason

    def entries(self) -> Iterator[Entry]:
        path = self._store.path_of(self._batch.input_file_id)
        if self._reason is None or not self.count or not path.exists():
            return
        finished = self._store.finished_lines(self._batch.id)
        for number, text in read_lines(path):
            if number not in finished:
                yield unfinished_entry(self._batch.api, parse_line(text).custom_id, self._reason)
