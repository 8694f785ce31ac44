"""The load in several processes, for servers that are faster than one client process.

Each process gets a share of the requests and of the concurrency. The processes exchange msgpack over pipes.
"""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import threading
import time
from typing import BinaryIO, cast

import msgspec

from lightserve.bench.client.load import LoadResult, OnDone, Plan, run_load
from lightserve.bench.client.record import Record
from lightserve.utils.net import raise_fd_limit

COMMAND = [sys.executable, "-m", "lightserve.bench.client.processes"]
START_S = 0.05  # after all processes are ready, so that every one has read the time of the start
_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.encode


class _Finished(msgspec.Struct, tag=True):
    cpu_s: float


_decode = msgspec.msgpack.Decoder(Record | _Finished).decode


def shares_of(plan: Plan, processes: int) -> list[Plan]:
    """Request i goes to process i modulo their number. No process gets a concurrency of 0."""
    count = max(1, min(processes, len(plan.requests), plan.concurrency or processes))
    return [
        msgspec.structs.replace(
            plan,
            requests=plan.requests[i::count],
            concurrency=None if plan.concurrency is None else math.ceil((plan.concurrency - i) / count),
        )
        for i in range(count)
    ]


def run_in_processes(plan: Plan, processes: int, on_done: OnDone) -> LoadResult:
    shares = shares_of(plan, processes)
    if len(shares) == 1:
        return run_load(plan, on_done)
    children = [_Child(share) for share in shares]
    for child in children:
        child.wait_until_ready()
    start = time.monotonic() + START_S
    for child in children:
        child.run(start, on_done)
    cpu_s = sum(child.wait() for child in children)
    records = sorted((record for child in children for record in child.records), key=lambda record: record.index)
    return LoadResult(start, records, cpu_s)


class _Child:
    """A process that runs one share. A thread reads what it writes."""

    def __init__(self, plan: Plan) -> None:
        self.records: list[Record] = []
        self._cpu_s: float | None = None
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._in = cast(BinaryIO, self._process.stdin)
        self._out = cast(BinaryIO, self._process.stdout)
        _write_frame(self._in, _encode(plan))

    def wait_until_ready(self) -> None:
        if not _read_frame(self._out):
            raise RuntimeError(f"a client process did not start: status {self._process.wait()}")

    def run(self, start: float, on_done: OnDone) -> None:
        _write_frame(self._in, _encode(start))
        self._thread = threading.Thread(target=self._read, args=(on_done,))
        self._thread.start()

    def wait(self) -> float:
        """Until it has sent all its requests. Returns its CPU seconds."""
        self._thread.join()
        self._in.close()
        self._out.close()
        status = self._process.wait()
        if self._cpu_s is None:
            raise RuntimeError(f"a client process ended with status {status}")
        return self._cpu_s

    def _read(self, on_done: OnDone) -> None:
        while data := _read_frame(self._out):
            message = _decode(data)
            if isinstance(message, _Finished):
                self._cpu_s = message.cpu_s
            else:
                self.records.append(message)
                on_done(message)


def _read_frame(pipe: BinaryIO) -> bytes:
    head = pipe.read(_LENGTH.size)
    return pipe.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


def _write_frame(pipe: BinaryIO, data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def main() -> None:
    """Run the plan from the standard input. Writes each record when it is complete, then the CPU seconds."""
    raise_fd_limit()
    read, write = sys.stdin.buffer, sys.stdout.buffer
    plan = msgspec.msgpack.decode(_read_frame(read), type=Plan)
    _write_frame(write, b"ready")
    start = msgspec.msgpack.decode(_read_frame(read), type=float)
    result = run_load(plan, lambda record: _write_frame(write, _encode(record)), start)
    _write_frame(write, _encode(_Finished(result.cpu_s)))


if __name__ == "__main__":
    main()
