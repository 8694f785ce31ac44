"""Stored responses, for previous_response_id and GET.

They are in an SQLite file in the server's run directory: every HTTP process reads and writes it, and it is removed when
the server ends. Both the number of responses and their bytes are limited; the oldest are removed first.
"""

from __future__ import annotations

import asyncio
import enum
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lightserve.httpserver.http.body import JsonObject
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

FOLDER = "responses"  # in the run directory
RUNNING = QUEUED, IN_PROGRESS = "queued", "in_progress"  # status of a response that has not ended
BUSY_S = 10.0  # how long a process waits for another one's write, which takes about a millisecond
LOST = {"code": "server_error", "message": "the HTTP process that generated this response died; send the request again"}


class State(enum.StrEnum):
    GENERATING = "generating"
    ENDED = "ended"
    LOST = "lost"  # its HTTP process died; another one may go on with its stream


_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    http_index INTEGER NOT NULL,
    state TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    response BLOB NOT NULL,
    input BLOB NOT NULL
)
"""
_CONTINUE = f"""
ON CONFLICT (id) DO UPDATE SET
    http_index = excluded.http_index, state = excluded.state, bytes = excluded.bytes, response = excluded.response
WHERE owner = excluded.owner AND state <> '{State.ENDED}'
"""
_EVICT_BY_COUNT = "DELETE FROM responses WHERE number <= (SELECT max(number) FROM responses) - ?"
# the newest rows whose bytes together are within the limit stay
_EVICT_BY_BYTES = """
DELETE FROM responses WHERE number IN (
    SELECT number FROM (SELECT number, sum(bytes) OVER (ORDER BY number DESC) AS total FROM responses) WHERE total > ?
)
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: JsonObject
    input: list[JsonObject]  # all items that the model got, with those of previous responses


class ResponseStore:
    """Its async methods run SQLite in a thread. ``owner`` is the caller's: see ApiKeys."""

    def __init__(self, run_dir: str | None, max_count: int, max_bytes: int, http_index: int = 0) -> None:
        self._path = None if run_dir is None else Path(run_dir) / FOLDER / "responses.sqlite"
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._http_index = http_index
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_enabled(self) -> bool:
        return self._path is not None and self._max_count > 0 and self._max_bytes > 0

    def fail_lost(self) -> None:
        """End the responses of the HTTP process that this one replaces: nobody generates them any more."""
        if not self.is_enabled or self._path is None or not self._path.exists():
            return
        try:
            with self._lock, self._connect() as db:
                select = "SELECT owner, response FROM responses WHERE http_index = ? AND state = ?"
                lost: list[Any] = db.execute(select, (self._http_index, State.GENERATING)).fetchall()
        except sqlite3.Error as error:  # an HTTP process can work without it
            logger.error("stored responses cannot be read: %s (%s)", error, self._path)
            return
        for owner, encoded in lost:
            self._update(owner, orjson.loads(encoded) | {"status": "failed", "error": LOST}, State.LOST)

    async def add(self, owner: str, response: JsonObject, input_items: list[JsonObject]) -> bool:
        """Whether it is stored; if not, the log says why. If its stream began in another process, it is there."""
        return await asyncio.to_thread(self._add, owner, response, input_items)

    async def update(self, owner: str, response: JsonObject) -> None:
        """Store the newer state of a response, unless it was deleted."""
        await asyncio.to_thread(self._update, owner, response)

    def update_later(self, owner: str, response: JsonObject) -> None:
        """The same for a caller that is being cancelled."""
        task = asyncio.get_running_loop().create_task(self.update(owner, response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return await asyncio.to_thread(self._get, owner, response_id) if self.is_enabled else None

    async def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one."""
        return await asyncio.to_thread(self._delete, owner, response_id) if self.is_enabled else False

    def _add(self, owner: str, response: JsonObject, input_items: list[JsonObject]) -> bool:
        encoded, encoded_input = orjson.dumps(response), orjson.dumps(input_items)
        size = len(encoded) + len(encoded_input)
        if size > self._max_bytes:
            limit = f"{self._max_bytes} (--response_store_bytes)"
            logger.warning("%s is not stored: it has %d bytes; the limit is %s", response["id"], size, limit)
            return False
        columns = "id, owner, http_index, state, bytes, response, input"
        insert = f"INSERT INTO responses ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?) {_CONTINUE}"
        state_columns = self._http_index, _state(response)
        return self._write(insert, (response["id"], owner, *state_columns, size, encoded, encoded_input))

    def _update(self, owner: str, response: JsonObject, state: State | None = None) -> None:
        encoded = orjson.dumps(response)
        new = "response = ?, bytes = ? + length(input), state = ?"
        values = encoded, len(encoded), state or _state(response)
        self._write(f"UPDATE responses SET {new} WHERE id = ? AND owner = ?", (*values, response["id"], owner))

    def _write(self, statement: str, values: tuple[Any, ...]) -> bool:
        """Whether it was written. A response reaches its client even when it cannot be stored."""
        try:
            with self._lock, self._connect() as db:
                is_written = db.execute(statement, values).rowcount > 0
                db.execute(_EVICT_BY_COUNT, (self._max_count,))
                db.execute(_EVICT_BY_BYTES, (self._max_bytes,))
        except (sqlite3.Error, OSError) as error:
            logger.error("a response is not stored: %s (%s)", error, self._path)
            return False
        return is_written

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._lock, self._connect() as db:
            select = "SELECT response, input FROM responses WHERE id = ? AND owner = ?"
            row: Any = db.execute(select, (response_id, owner)).fetchone()
        return None if row is None else StoredResponse(orjson.loads(row[0]), orjson.loads(row[1]))

    def _delete(self, owner: str, response_id: str) -> bool:
        with self._lock, self._connect() as db:
            cursor = db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))
            return cursor.rowcount > 0

    def _connect(self) -> sqlite3.Connection:
        """The connection of this process; as a context it is one transaction."""
        if self._connection is None:
            assert self._path is not None
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            connection = sqlite3.connect(self._path, timeout=BUSY_S, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # the file does not outlive the server
            connection.execute(_SCHEMA)
            self._connection = connection
        return self._connection


def _state(response: JsonObject) -> State:
    return State.GENERATING if response["status"] in RUNNING else State.ENDED
