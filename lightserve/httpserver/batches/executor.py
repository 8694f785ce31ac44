"""Runs batches in one HTTP process of the server: that which holds the lock of the folder.

A line is run by the route of its endpoint, with the lowest priority. Its result is committed before the line counts as
finished; nothing else of a run is stored. So after a crash the next process runs exactly the lines without a result.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from lightserve.batches.entry import Entry, response_entry
from lightserve.batches.folder import elected
from lightserve.batches.line import LineError, NumberedLine, check_file, parse_line
from lightserve.batches.records import Batch, Status
from lightserve.batches.store import BatchStore
from lightserve.errors import UnavailableError
from lightserve.httpserver.batches.concurrency import ConcurrencyLimit
from lightserve.httpserver.batches.open_batch import OpenBatch
from lightserve.httpserver.batches.results import finish_batch
from lightserve.httpserver.batches.runner import LineResponse, LineRunner
from lightserve.httpserver.engine_client import EngineState, HttpServerManager
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

POLL_S = 0.5  # between looks at the store for new batches and cancelled ones
ELECTION_S = 1.0  # between attempts to take over from a process that died
RETRY_S = 2.0  # after the store or the engine refused
CLEANING_S = 60.0  # between looks for files that have expired
RETRIED = (429, 503)  # the queue is full, or the engine restarts


@dataclass(frozen=True, slots=True, eq=False)
class RunningLine:
    open_batch: OpenBatch
    line: NumberedLine


class BatchExecutor:
    def __init__(
        self, store: BatchStore, runner: LineRunner, manager: HttpServerManager, limits: tuple[int, int]
    ) -> None:
        """``limits``: requests at once, and bytes of a line."""
        self._store = store
        self._runner = runner
        self._manager = manager
        self._concurrency = ConcurrencyLimit(limits[0])
        self._max_line_bytes = limits[1]
        self._open: dict[str, OpenBatch] = {}  # by id
        self._turns: deque[str] = deque()  # ids, so that batches get lines in turn
        self._running: dict[asyncio.Task[LineResponse], RunningLine] = {}  # the oldest first
        self._unsaved: list[tuple[OpenBatch, NumberedLine, Entry]] = []
        self._problem = ""  # why batches wait
        self._looked_s = self._cleaned_s = 0.0

    async def run(self) -> None:
        """Until cancelled. While another process of the server runs batches, wait for its end."""
        while True:
            try:
                with elected(self._store.folder) as is_elected:
                    while is_elected:
                        await self._try_turn()
            except OSError as error:
                logger.error("batches wait: %s (--batch_dir %s)", error, self._store.folder)
            await asyncio.sleep(ELECTION_S)

    async def _try_turn(self) -> None:
        """A store that cannot be written stops batches, and nothing else."""
        try:
            await self._turn()
            self._problem = ""
        except (UnavailableError, OSError) as error:
            if str(error) != self._problem:  # it may last for hours
                logger.error("batches wait: %s", error)
            self._problem = str(error)
            await asyncio.sleep(RETRY_S)

    async def _turn(self) -> None:
        await self._save()
        now_s = time.monotonic()
        if now_s - self._looked_s > POLL_S:
            await self._look()
            self._looked_s = now_s
        self._concurrency.update(self._manager.stats, len(self._running))
        self._stop_newest(len(self._running) if self._is_paused else self._concurrency.num_stopped)
        while not self._is_paused and len(self._running) < self._concurrency.limit and self._start_line():
            pass
        await self._end_finished()
        if not self._running:
            await asyncio.sleep(POLL_S)
            return
        done, _ = await asyncio.wait(self._running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await self._collect(task)

    @property
    def _is_paused(self) -> bool:
        return self._manager.state is not EngineState.READY

    async def _look(self) -> None:
        """Take up new batches, and end those that were cancelled or have expired."""
        now = int(time.time())
        if now - self._cleaned_s > CLEANING_S:
            await asyncio.to_thread(self._store.delete_expired_files, now)
            self._cleaned_s = now
        if self._is_paused:
            return
        for batch in await asyncio.to_thread(self._store.open_batches):
            if batch.status is Status.CANCELLING:
                await self._end(batch, Status.CANCELLED)
            elif batch.status is Status.VALIDATING:
                await self._check(batch)
            elif batch.expires_at <= now and batch.status is not Status.FINALIZING:
                await self._end(batch, Status.EXPIRED)
            elif batch.id not in self._open:
                await self._open_batch(batch)

    async def _check(self, batch: Batch) -> None:
        path = self._store.path_of(batch.input_file_id)
        try:
            check = await asyncio.to_thread(check_file, path, batch.endpoint, self._max_line_bytes)
        except FileNotFoundError:
            await self._fail_without_input(batch)
            return
        if check.errors:
            await asyncio.to_thread(self._store.fail, batch.id, check.errors, int(time.time()))
            return
        await asyncio.to_thread(self._store.begin, batch.id, check.num_lines, int(time.time()))
        self._looked_s = 0.0  # look again at once

    async def _fail_without_input(self, batch: Batch) -> None:
        message = f"the input file {batch.input_file_id!r} is not there any more"
        error = {"code": "file_not_found", "line": None, "message": message, "param": "input_file_id"}
        await asyncio.to_thread(self._store.fail, batch.id, [error], int(time.time()))

    async def _open_batch(self, batch: Batch) -> None:
        if not self._store.path_of(batch.input_file_id).exists():
            await self._fail_without_input(batch)
            return
        self._open[batch.id] = await asyncio.to_thread(OpenBatch, batch, self._store)
        self._turns.append(batch.id)

    def _start_line(self) -> bool:
        """Whether a batch had a line to start. Each batch starts one in turn."""
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            open_batch = self._open[self._turns[-1]]
            line = open_batch.next_line()
            if line is not None:
                self._start(open_batch, line)
                return True
        return False

    def _start(self, open_batch: OpenBatch, line: NumberedLine) -> None:
        batch = open_batch.batch
        open_batch.in_flight += 1
        try:
            request = parse_line(line.text, batch.endpoint)
        except LineError as error:  # the file was changed after its check
            logger.error("%s line %d: %s", batch.id, line.number, error)
            entry = response_entry(batch.api, f"line-{line.number}", 400, "", {"error": {"message": str(error)}})
            self._unsaved.append((open_batch, line, entry))
            return
        request_id = f"{batch.id}-{line.number}"
        task = asyncio.create_task(self._runner.run(request, batch.owner, request_id))
        self._running[task] = RunningLine(open_batch, line)

    async def _collect(self, task: asyncio.Task[LineResponse]) -> None:
        """Take the response of a line."""
        running = self._running.pop(task)
        open_batch, line = running.open_batch, running.line
        response = None if task.cancelled() else task.result()
        if response is None or response.status in RETRIED:
            open_batch.in_flight -= 1
            open_batch.give_back(line)
            if response is not None:
                await asyncio.sleep(RETRY_S / 4)
            return
        custom_id = parse_line(line.text).custom_id
        entry = response_entry(open_batch.batch.api, custom_id, *response)
        self._unsaved.append((open_batch, line, entry))

    async def _save(self) -> None:
        """Commit results. They stay in memory until the disk has them, so a full disk loses none."""
        by_batch: dict[str, list[tuple[int, Entry]]] = {}
        for open_batch, line, entry in self._unsaved:
            by_batch.setdefault(open_batch.batch.id, []).append((line.number, entry))
        for batch_id, entries in by_batch.items():
            await asyncio.to_thread(self._store.add_results, batch_id, entries)
            for open_batch, _, _ in [unsaved for unsaved in self._unsaved if unsaved[0].batch.id == batch_id]:
                open_batch.in_flight -= 1
            self._unsaved = [unsaved for unsaved in self._unsaved if unsaved[0].batch.id != batch_id]

    def _stop_newest(self, count: int) -> None:
        for task in list(self._running)[len(self._running) - count :] if count else []:
            task.cancel()

    async def _end_finished(self) -> None:
        if self._unsaved:
            return
        for open_batch in [candidate for candidate in self._open.values() if candidate.has_ended]:
            batch = open_batch.batch
            now = int(time.time())
            if await asyncio.to_thread(self._store.change_status, batch.id, batch.status, Status.FINALIZING, now):
                batch.status = Status.FINALIZING  # writing its files may fail and be tried again
                await self._end(batch, Status.COMPLETED)

    async def _end(self, batch: Batch, status: Status) -> None:
        """Stop what runs of the batch, and write its files."""
        open_batch = self._open.get(batch.id)
        for task in [task for task, running in self._running.items() if running.open_batch is open_batch]:
            task.cancel()
            await asyncio.wait([task])
            await self._collect(task)
        await self._save()
        latest = await asyncio.to_thread(self._store.batch, batch.owner, batch.id)
        if latest is not None:
            await asyncio.to_thread(finish_batch, self._store, latest, status)
            logger.info("%s is %s: %d completed, %d failed", batch.id, status, latest.completed, latest.failed)
        if self._open.pop(batch.id, None) is not None:
            self._turns.remove(batch.id)
