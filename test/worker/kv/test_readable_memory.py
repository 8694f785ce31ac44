"""Memory of another process, read by a transfer engine: what it refuses, and what happens when that process dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
import pytest
import torch

from lightserve.errors import ServerError
from lightserve.worker.kv.transfer import nixl
from lightserve.worker.kv.transfer.pipe import KvTransferError, ReadTimeoutError
from lightserve.worker.kv.transfer.transfer import readable_memory
from lightserve.worker.kv.transfer.transport import ReadableMemory, address_of
from test.waiting import wait_until
from test.worker.kv.test_kv_transfer import NEEDS, READ_BY

HOST = "127.0.0.1"
BYTES = 1 << 26
LONG_S = 60.0
IDLE_S = 2.0
MODULES = {"nixl": "nixl._api"}
SENDER = f"""
import sys, torch
from lightserve.worker.kv.transfer.transfer import readable_memory
memory, chunk = readable_memory(sys.argv[1]), torch.full(({BYTES},), 7, dtype=torch.uint8)
memory.register([chunk])
print("memory", memory.introduction("{HOST}").hex(), chunk.data_ptr(), flush=True)
sys.stdin.read()
"""


class Sender(NamedTuple):
    process: subprocess.Popen[str]
    introduction: bytes
    address: int


@pytest.fixture
def sender(request: pytest.FixtureRequest) -> Iterator[Sender]:
    command = [sys.executable, "-c", SENDER, request.getfixturevalue("transport")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("memory "))  # libraries print too
        _, introduction, address = line.split()
        yield Sender(process, bytes.fromhex(introduction), int(address))
        process.kill()


def registered(transport: str, size: int = BYTES) -> tuple[ReadableMemory, memoryview]:
    chunk = torch.zeros(size, dtype=torch.uint8)
    memory = readable_memory(transport)
    assert memory is not None
    memory.register([chunk])
    return memory, chunk.numpy().data


@pytest.mark.parametrize("transport", MODULES)
def test_a_library_that_cannot_be_loaded_is_an_error_at_the_start(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[transport], None)

    with pytest.raises(ServerError, match=f"kv_transport={transport}: .* does not start"):
        readable_memory(transport)


@pytest.mark.parametrize("transport", READ_BY)
def test_only_registered_memory_can_be_read(transport: str) -> None:
    (source, blocks), (target, place) = registered(transport, 4096), registered(transport, 4096)
    stranger = memoryview(bytearray(4096))
    blocks[:] = bytes(range(256)) * 16
    memory = target.open(HOST, source.introduction(HOST))

    with pytest.raises(KvTransferError):
        memory.read([address_of(stranger)], [place])
    memory.read([address_of(blocks)], [place])

    assert place == blocks


@pytest.mark.slow
@pytest.mark.parametrize("transport", READ_BY)
def test_memory_that_nobody_reads_takes_no_core(transport: str, sender: Sender) -> None:
    process = psutil.Process(sender.process.pid)
    begin_s, begin_used_s = time.monotonic(), sum(process.cpu_times()[:2])
    wait_until(lambda: time.monotonic() - begin_s > IDLE_S)

    used_s = sum(process.cpu_times()[:2]) - begin_used_s
    assert used_s < 0.2 * (time.monotonic() - begin_s), transport


@pytest.mark.slow
@pytest.mark.parametrize("transport", READ_BY)
def test_a_sender_that_dies_while_it_is_read_ends_the_read(transport: str, sender: Sender) -> None:
    target, place = registered(transport)
    memory = target.open(HOST, sender.introduction)
    memory.read([sender.address], [place[:4096]])
    sender.process.send_signal(signal.SIGSTOP)

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(memory.read, [sender.address], [place])
        wait_until(reading.running)
        sender.process.kill()
        with pytest.raises(KvTransferError):
            reading.result(LONG_S)

    assert bytes(place[:4096]) == b"\7" * 4096


@pytest.mark.slow
@pytest.mark.parametrize("transport", [pytest.param("nixl", marks=NEEDS["nixl"])])
def test_a_sender_that_hangs_while_it_is_read_ends_the_read_and_the_memory_is_written_to_until_it_goes_on(
    transport: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # shared memory needs no help of the sender
    monkeypatch.setattr(nixl, "READ_S", 0.2)
    sender: Sender = request.getfixturevalue("sender")
    target, place = registered(transport)
    memory = target.open(HOST, sender.introduction)
    memory.read([sender.address], [place[:4096]])
    sender.process.send_signal(signal.SIGSTOP)

    with pytest.raises(ReadTimeoutError) as late:
        memory.read([sender.address], [place])
    memory.close()
    with pytest.raises(KvTransferError, match="1 frames of the sender are still being read"):
        target.open(HOST, sender.introduction)

    assert bytes(place[-1:]) == b"\0"
    sender.process.send_signal(signal.SIGCONT)
    late.value.wait()
    assert bytes(place[-1:]) == b"\7"
    target.open(HOST, sender.introduction).close()
