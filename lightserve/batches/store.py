"""Files and batches in --batch_dir: SQLite for what is known of them, plain files for what they contain.

A result is written in the same transaction as the counts of its batch, once for each line. The result files are
complete on the disk before the transaction that names them. So a server that is killed at any moment loses no finished
line and repeats none.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from lightserve.batches.entry import Entry
from lightserve.batches.folder import BatchDirError, locked_folder
from lightserve.batches.records import OF_MESSAGES, OPEN, Batch, Status, StoredFile, Totals
from lightserve.batches.usage import NO_USAGE, Usage
from lightserve.errors import UnavailableError

DATABASE = "batches.sqlite"
FILES = "files"
BUSY_S = 30.0  # a commit waits for the disk
RESULTS = ("completed", "failed", "expired", "cancelled")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, api TEXT NOT NULL,
    endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, status TEXT NOT NULL, total INTEGER NOT NULL, completed INTEGER NOT NULL,
    failed INTEGER NOT NULL, metadata TEXT, output_file_id TEXT, error_file_id TEXT, output_expires_s INTEGER,
    errors TEXT NOT NULL, times TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS results (
    batch_id TEXT NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (batch_id, line)
);
CREATE TABLE IF NOT EXISTS usage (
    batch_id TEXT PRIMARY KEY, input INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL,
    reasoning INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS totals (result TEXT PRIMARY KEY, requests INTEGER NOT NULL);
"""
_FILE_COLUMNS = "id, owner, filename, purpose, bytes, created_at, expires_at"
_BATCH_COLUMNS = (
    "id, owner, api, endpoint, input_file_id, completion_window, created_at, expires_at, status, total, completed, "
    "failed, metadata, output_file_id, error_file_id, output_expires_s, errors, times"
)
_USAGE = "(SELECT json_array(input, cached, output, reasoning) FROM usage WHERE batch_id = batches.id)"
_SELECT_BATCH = f"SELECT {_BATCH_COLUMNS}, {_USAGE} FROM batches"
_OPEN = ", ".join(f"'{status}'" for status in OPEN)


class BatchStore:
    """Every HTTP process has one. Its methods wait for the disk: call them in a thread."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._path = Path(folder) / DATABASE
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """At the start, before other processes use the folder. Files that no row names are of writes that were cut."""
        try:
            (Path(self.folder) / FILES).mkdir(mode=0o700, exist_ok=True)
            with self._transaction() as db:
                if (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise sqlite3.DatabaseError(problem)
                known = {row[0] for row in db.execute("SELECT id FROM files")}
        except (sqlite3.Error, OSError, UnavailableError) as error:
            remedy = "restore it from a backup, or move the folder away to start with an empty one"
            raise BatchDirError(f"--batch_dir {self.folder}: {DATABASE} is damaged ({error}); {remedy}") from error
        for path in (Path(self.folder) / FILES).iterdir():
            if path.name not in known:
                path.unlink()
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def new_path(self) -> tuple[str, Path]:
        """The id of a new file, and where its content is to be written before ``add_file``."""
        file_id = f"file-{uuid.uuid4().hex}"
        return file_id, self.path_of(file_id)

    def path_of(self, file_id: str) -> Path:
        return Path(self.folder) / FILES / file_id

    def add_file(self, file: StoredFile) -> None:
        with self._transaction() as db:
            _insert_file(db, file)

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        select = f"SELECT {_FILE_COLUMNS} FROM files WHERE owner = ? AND id = ?"
        rows = self._rows(select, (owner, file_id))
        return StoredFile(*rows[0]) if rows else None

    def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        where = "owner = ? AND (purpose = ? OR (? IS NULL AND purpose <> ?))"
        values = owner, purpose, purpose, OF_MESSAGES
        rows = self._page("files", _FILE_COLUMNS, (where, values), after, (limit, newest_first))
        return [StoredFile(*row) for row in rows]

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Whether there was one."""
        with self._transaction() as db:
            cursor = db.execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, file_id))
        self.path_of(file_id).unlink(missing_ok=True) if cursor.rowcount else None
        return cursor.rowcount > 0

    def delete_expired_files(self, now: int) -> None:
        in_use = f"SELECT input_file_id FROM batches WHERE status IN ({_OPEN})"
        expired = f"SELECT owner, id FROM files WHERE expires_at <= ? AND id NOT IN ({in_use})"
        for owner, file_id in self._rows(expired, (now,)):
            self.delete_file(owner, file_id)

    def total_bytes(self) -> int:
        return int(self._rows("SELECT coalesce(sum(bytes), 0) FROM files")[0][0])

    def add_batch(self, batch: Batch) -> None:
        marks = ", ".join("?" * len(_BATCH_COLUMNS.split(", ")))
        with self._transaction() as db:
            db.execute(f"INSERT INTO batches ({_BATCH_COLUMNS}) VALUES ({marks})", _batch_row(batch))

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        rows = self._rows(f"{_SELECT_BATCH} WHERE owner = ? AND id = ?", (owner, batch_id))
        return _batch(rows[0]) if rows else None

    def batches(self, owner: str, api: str, after: str | None, limit: int, newest_first: bool = True) -> list[Batch]:
        where = "owner = ? AND api = ?", (owner, api)
        columns = f"{_BATCH_COLUMNS}, {_USAGE}"
        return [_batch(row) for row in self._page("batches", columns, where, after, (limit, newest_first))]

    def open_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        rows = self._rows(f"{_SELECT_BATCH} WHERE status IN ({_OPEN}) ORDER BY number")
        return [_batch(row) for row in rows]

    def batch_of_input(self, file_id: str) -> str | None:
        """An open batch that reads this file."""
        rows = self._rows(f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({_OPEN})", (file_id,))
        return rows[0][0] if rows else None

    def change_status(self, batch_id: str, expected: Status, new: Status, now: int) -> bool:
        """Whether the status was the expected one: a client may have cancelled the batch meanwhile."""
        update = "UPDATE batches SET status = ?, times = json_set(times, ?, ?) WHERE id = ? AND status = ?"
        with self._transaction() as db:
            return db.execute(update, (new, f"$.{new}", now, batch_id, expected)).rowcount > 0

    def begin(self, batch_id: str, total: int, now: int) -> bool:
        """The batch was checked and is run from now on. False: it was cancelled."""
        with self._transaction() as db:
            db.execute("UPDATE batches SET total = ? WHERE id = ?", (total, batch_id))
        return self.change_status(batch_id, Status.VALIDATING, Status.IN_PROGRESS, now)

    def fail(self, batch_id: str, errors: list[dict[str, Any]], now: int) -> None:
        """The batch cannot be run."""
        update = "UPDATE batches SET status = ?, errors = ?, times = json_set(times, '$.failed', ?) WHERE id = ?"
        with self._transaction() as db:
            db.execute(update, (Status.FAILED, orjson.dumps(errors).decode(), now, batch_id))
            db.execute("DELETE FROM results WHERE batch_id = ?", (batch_id,))

    def delete_batch(self, owner: str, batch_id: str) -> None:
        with self._transaction() as db:
            if db.execute("DELETE FROM batches WHERE owner = ? AND id = ?", (owner, batch_id)).rowcount:
                db.execute("DELETE FROM usage WHERE batch_id = ?", (batch_id,))

    def add_results(self, batch_id: str, entries: Iterable[tuple[int, Entry]]) -> None:
        """Results by line. A line that has one already keeps it."""
        insert = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)"
        counts, usage = {False: 0, True: 0}, NO_USAGE
        with self._transaction() as db:
            for line, entry in entries:
                if db.execute(insert, (batch_id, line, entry.is_error, entry.text)).rowcount:
                    counts[entry.is_error] += 1
                    usage = usage.plus(entry.usage)
            _add_usage(db, batch_id, usage)
            update = "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE id = ?"
            db.execute(update, (counts[False], counts[True], batch_id))
            _count(db, "completed", counts[False])
            _count(db, "failed", counts[True])

    def finished_lines(self, batch_id: str) -> set[int]:
        return {row[0] for row in self._rows("SELECT line FROM results WHERE batch_id = ?", (batch_id,))}

    def results(self, batch_id: str) -> Iterator[tuple[int, Entry]]:
        """In the order of their lines; a few at a time."""
        last = 0
        select = "SELECT line, is_error, content FROM results WHERE batch_id = ? AND line > ? ORDER BY line LIMIT 256"
        while rows := self._rows(select, (batch_id, last)):
            for line, is_error, content in rows:
                yield line, Entry(bool(is_error), content)
            last = rows[-1][0]

    def finish(self, batch: Batch, status: Status, files: list[StoredFile], num_unfinished: int, now: int) -> None:
        """The batch has ended, and its result files are on the disk: ``batch`` has their ids."""
        update = (
            "UPDATE batches SET status = ?, output_file_id = ?, error_file_id = ?, times = json_set(times, ?, ?) "
            "WHERE id = ?"
        )
        with self._transaction() as db:
            for file in files:
                _insert_file(db, file)
            values = (status, batch.output_file_id, batch.error_file_id, f"$.{status}", now, batch.id)
            db.execute(update, values)
            db.execute("DELETE FROM results WHERE batch_id = ?", (batch.id,))
            _count(db, str(status), num_unfinished) if num_unfinished else None

    def totals(self) -> Totals:
        statuses = dict(self._rows("SELECT status, count(*) FROM batches GROUP BY status"))
        requests = dict(self._rows("SELECT result, requests FROM totals"))
        pending = self._rows(
            f"SELECT coalesce(sum(total - completed - failed), 0) FROM batches WHERE status IN ({_OPEN})"
        )
        return Totals(
            {str(status): statuses.get(status, 0) for status in Status},
            {result: requests.get(result, 0) for result in RESULTS},
            pending[0][0],
            self.total_bytes(),
        )

    def _page(
        self, table: str, columns: str, where: tuple[str, tuple[Any, ...]], after: str | None, page: tuple[int, bool]
    ) -> list[Any]:
        limit, newest_first = page
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        condition, values = where
        if after is not None:
            condition += f" AND number {sign} (SELECT number FROM {table} WHERE id = ?)"
            values = (*values, after)
        return self._rows(
            f"SELECT {columns} FROM {table} WHERE {condition} ORDER BY number {order} LIMIT ?", (*values, limit)
        )

    def _rows(self, select: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._transaction() as db:
            return db.execute(select, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock, self._connect() as db:
                yield db
        except sqlite3.Error as error:
            raise UnavailableError(f"the batch store cannot be used: {error} (--batch_dir {self.folder})") from error

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path, timeout=BUSY_S, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a finished line survives a power failure too
            connection.executescript(_SCHEMA)
            self._connection = connection
        return self._connection


@contextlib.contextmanager
def opened_folder(folder: str) -> Iterator[None]:
    """Check the folder, and keep other servers out of it until the end of the block."""
    with locked_folder(folder):
        BatchStore(folder).check()
        yield


def sync_file(path: Path) -> None:
    """The content and the name of a file are on the disk when this returns."""
    for target, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        descriptor = os.open(target, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _insert_file(db: sqlite3.Connection, file: StoredFile) -> None:
    values = (file.id, file.owner, file.filename, file.purpose, file.bytes, file.created_at, file.expires_at)
    db.execute(f"INSERT INTO files ({_FILE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def _count(db: sqlite3.Connection, result: str, requests: int) -> None:
    upsert = (
        "INSERT INTO totals VALUES (?, ?) ON CONFLICT (result) DO UPDATE SET requests = requests + excluded.requests"
    )
    db.execute(upsert, (result, requests))


def _add_usage(db: sqlite3.Connection, batch_id: str, usage: Usage) -> None:
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in Usage._fields)
    upsert = f"INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (batch_id) DO UPDATE SET {sums}"
    db.execute(upsert, (batch_id, *usage))


def _batch(row: tuple[Any, ...]) -> Batch:
    head, (metadata, output, error_file, output_expires_s, errors, times, usage) = row[:12], row[12:]
    batch = Batch(*head)
    batch.status = Status(batch.status)
    batch.metadata = None if metadata is None else orjson.loads(metadata)
    batch.output_file_id, batch.error_file_id, batch.output_expires_s = output, error_file, output_expires_s
    batch.errors, batch.times = orjson.loads(errors), orjson.loads(times)
    batch.usage = NO_USAGE if usage is None else Usage(*orjson.loads(usage))
    return batch


def _batch_row(batch: Batch) -> tuple[Any, ...]:
    def encoded(value: Any) -> str:
        return orjson.dumps(value).decode()

    metadata = None if batch.metadata is None else encoded(batch.metadata)
    values = [getattr(batch, name) for name in _BATCH_COLUMNS.split(", ")[:12]]
    ids = batch.output_file_id, batch.error_file_id, batch.output_expires_s
    return (*values, metadata, *ids, encoded(batch.errors), encoded(batch.times))
