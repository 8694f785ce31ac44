"""Sends planned requests at their times, a limited number at once, and records the responses."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

import msgspec

from lightserve.bench.client.connection import Connections, Target
from lightserve.bench.client.record import Record
from lightserve.bench.client.stream import StreamedResponse

OnDone = Callable[[Record], None]


class PlannedRequest(msgspec.Struct):
    index: int
    due_s: float  # after the start
    body: bytes


class Plan(msgspec.Struct):
    """What one process sends. It travels to other processes as msgpack."""

    target: Target
    requests: list[PlannedRequest]
    concurrency: int | None = None  # None: no limit
    stop_s: float | None = None  # no request is sent after so many seconds
    timeout_s: float = 600.0
    keeps_text: bool = False


class LoadResult(msgspec.Struct):
    """``records`` has every request that was sent, failed ones too."""

    start: float  # of time.monotonic
    records: list[Record]
    cpu_s: float  # of the client, during the load

    @property
    def seconds(self) -> float:
        """Until the last response ended."""
        return max((record.ended - self.start for record in self.records), default=0.0)


def run_load(plan: Plan, on_done: OnDone, start: float | None = None) -> LoadResult:
    """``on_done`` is called after each request. ``start``: when the first request may be sent; None: now."""
    import uvloop

    gc.collect()
    gc.freeze()  # a collection over the prompts would delay events by milliseconds
    before = time.process_time()
    start = start or time.monotonic()
    try:
        records = uvloop.run(_run(plan, start, on_done))
    finally:
        gc.unfreeze()
    return LoadResult(start, records, time.process_time() - before)


async def _run(plan: Plan, start: float, on_done: OnDone) -> list[Record]:
    connections = Connections(plan.target)
    slots = asyncio.Semaphore(plan.concurrency or len(plan.requests) or 1)
    records: list[Record] = []

    async def send(request: PlannedRequest, record: Record) -> None:
        try:
            await _send(plan, connections, request, record)
        finally:
            slots.release()
        on_done(record)

    async with asyncio.TaskGroup() as tasks:
        for request in plan.requests:
            due = start + request.due_s
            if (wait_s := due - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            await slots.acquire()
            if plan.stop_s is not None and time.monotonic() >= start + plan.stop_s:
                break
            record = Record(index=request.index, due=due)
            records.append(record)
            tasks.create_task(send(request, record))
    connections.close()
    return records


async def _send(plan: Plan, connections: Connections, request: PlannedRequest, record: Record) -> None:
    response = StreamedResponse(record, plan.keeps_text)
    record.sent = time.monotonic()
    try:
        async with asyncio.timeout(plan.timeout_s):
            await connections.send(request.body, response)
        response.finish()
    except TimeoutError:
        record.error = f"no end of the response after {plan.timeout_s:g} s (--timeout)"
    except OSError as error:  # refused, reset, closed, unknown host, TLS
        record.error = f"{type(error).__name__}: {error}"
    record.ended = time.monotonic()
