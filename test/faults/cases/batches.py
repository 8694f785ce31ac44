"""The batch store (--batch_dir): servers and processes that die, a full disk, a damaged database, two servers."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from test.api.server import RESPONSE_S, STOP_S, ServerProcess
from test.faults.cases.observability import MOUNT, SMALL_FOLDER, can_mount
from test.faults.start_case import Start, StartCase
from test.waiting import wait_until

LINES = 40
STEP = ("--null_step_ms", "5", "--batch_concurrency", "4")
SMALL_DISK = MOUNT.replace("64k", "1m")


def folder_of(start: Start) -> str:
    return str(start.base / "batches")


def client_of(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=RESPONSE_S)


def begin(client: Any) -> str:
    """A batch of lines that take half a second each."""
    lines = [
        {
            "custom_id": f"{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True},
        }
        for i in range(LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file_id = client.files.create(file=("in.jsonl", content), purpose="batch").id
    return str(client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h").id)


def wait_for_results(client: Any, batch_id: str, count: int) -> None:
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed >= count)


def check_complete(client: Any, batch_id: str) -> None:
    wait_until(lambda: client.batches.retrieve(batch_id).status == "completed")
    text = client.files.content(client.batches.retrieve(batch_id).output_file_id).text
    assert Counter(json.loads(line)["custom_id"] for line in text.splitlines()) == Counter(map(str, range(LINES)))


def kill_server(start: Start) -> None:
    server = start.launch("--batch_dir", folder_of(start), *STEP)
    start.check_serves(server)
    batch_id = begin(client_of(server))
    wait_for_results(client_of(server), batch_id, 5)
    server.process.kill()
    server.process.wait()
    successor = start.launch("--batch_dir", folder_of(start), *STEP)
    start.check_serves(successor)
    check_complete(client_of(successor), batch_id)
    assert successor.stop() == 0


def kill_http_processes(start: Start) -> None:
    """One after the other, so that the one that runs batches is among them."""
    server = start.launch("--batch_dir", folder_of(start), "--httpserver_workers", "2", *STEP)
    start.check_serves(server)
    batch_id = begin(client_of(server))
    wait_for_results(client_of(server), batch_id, 5)
    for name in ("ls-httpserver", "ls-httpserver-1"):
        (process,) = server.processes()[name]
        process.kill()
        process.wait()
        wait_until(lambda: name in server.processes())  # noqa: B023  awaited at once
    check_complete(client_of(server), batch_id)
    assert server.stop() == 0


def full_disk(start: Start) -> None:
    folder = folder_of(start)
    server = start.launch("--batch_dir", folder, *STEP, under=(*SMALL_FOLDER, SMALL_DISK, folder))
    start.check_serves(server)
    client = client_of(server)
    batch_id = begin(client)
    wait_for_results(client, batch_id, 5)
    filler = Path(f"/proc/{server.process.pid}/root{folder}/filler")
    fill(filler)
    server.wait_for_log("batches wait: ")
    with pytest.raises(openai.InternalServerError, match="the batch store cannot be written"):
        client.files.create(file=("in.jsonl", b"x" * 100_000), purpose="batch")
    start.check_serves(server)
    filler.unlink()
    check_complete(client, batch_id)
    assert server.stop() == 0


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 1024)


def damaged_database(start: Start) -> None:
    folder = Path(folder_of(start))
    folder.mkdir()
    (folder / "batches.sqlite").write_bytes(os.urandom(20_000))
    server = start.launch("--batch_dir", str(folder))
    assert server.process.wait(STOP_S) == 2
    assert server.log.count("\n") == 1
    assert "batches.sqlite is damaged" in server.log


def two_servers(start: Start) -> None:
    first = start.launch("--batch_dir", folder_of(start))
    start.check_serves(first)
    second = start.launch("--batch_dir", folder_of(start))
    assert second.process.wait(STOP_S) == 2
    assert f"another server (process {first.process.pid}) has it open" in second.log
    start.check_serves(first)
    assert first.stop() == 0


START_CASES = [
    StartCase("kill -9 a server with --batch_dir", kill_server, "the next one completes the batch", 60.0),
    StartCase("kill -9 ls-httpserver with --batch_dir", kill_http_processes, "another one completes the batch", 60.0),
    StartCase("the database of --batch_dir is damaged", damaged_database, "one line, exit code 2"),
    StartCase("two servers have one --batch_dir", two_servers, "the second one: one line, exit code 2"),
]
if can_mount():
    START_CASES.append(
        StartCase("the disk of --batch_dir is full", full_disk, "503 for uploads; results wait, then complete", 60.0)
    )
