"""A collector that is away, and profiles that cannot be written or overlap."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from lightserve.httpserver.tracing.exporter import has_otlp
from test.api.server import STOP_S
from test.api.test_faults import Client
from test.faults.case import Case
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import STREAMS_CONTINUE, Reaction, responds, same_text, streams_continue
from test.faults.start_case import Start, StartCase

START, STOP = "/start_profile", "/stop_profile"
FOLDER = Path(tempfile.gettempdir()) / f"ls-faults-profiles-{os.getpid()}"  # tests may run in several processes
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
NO_COLLECTOR = "http://127.0.0.1:1"  # nobody listens on this port
TRACES = ("--otlp_endpoint", NO_COLLECTOR) if has_otlp() else ()
FLAGS = ("--null_step_ms", "5", "--profile_dir", str(FOLDER), *TRACES)
SMALL_FOLDER = ("unshare", "--mount", "sh", "-c")
MOUNT = 'mkdir -p "$0" && mount -t tmpfs -o size=64k none "$0" && exec "$@"'


def serve_without_a_collector(context: FaultContext) -> None:
    """Every request makes spans that nobody takes."""
    for i in range(8):
        context.complete_text({"prompt": [100 * i + 100], "max_tokens": 4})


def _spans_dropped(context: FaultContext) -> None:
    streams_continue(context)
    context.wait_until(lambda: context.server.metrics()["otlp_spans_dropped_total"] >= 8 * 4)


def start_twice(context: FaultContext) -> None:
    assert context.client.post(START, {})[0] == 200
    context.statuses.append(context.client.post(START, {})[0])
    assert context.client.post(STOP, {})[0] == 200
    context.statuses.append(context.client.post(STOP, {})[0])


def profile_under_load(context: FaultContext) -> None:
    assert context.client.post(START, {"max_seconds": 60})[0] == 200
    for stream in context.streams:
        stream.read_events(8)
    assert context.client.post(STOP, {})[0] == 200


def replace_folder_by_a_file(context: FaultContext) -> None:
    """As if the disk were gone: the profile can be neither written nor started again."""
    assert context.client.post(START, {})[0] == 200
    shutil.rmtree(FOLDER)
    FOLDER.write_text("no folder")
    context.exits.callback(FOLDER.unlink)
    context.statuses.append(context.client.post(STOP, {})[0])
    context.statuses.append(context.client.post(START, {})[0])


def kill_the_profiled_worker(context: FaultContext) -> None:
    assert context.client.post(START, {"max_seconds": 60})[0] == 200
    worker = context.server.processes()["ls-worker"][0]
    worker.kill()


def _continues_and_says_what_is_missing(context: FaultContext) -> None:
    streams_continue(context)
    status, response = context.client.post(STOP, {})
    assert status == 200, response
    assert response["missing"], response


def full_folder(start: Start) -> None:
    server = start.launch(
        "--profile_dir", str(start.base / "profiles"), under=(*SMALL_FOLDER, MOUNT, f"{start.base}/profiles")
    )
    start.check_serves(server)
    client = Client(server)
    status, response = client.post(START, {})
    assert status == 500
    assert "MiB left" in json.dumps(response)
    assert client.golden()
    client.close()
    assert server.stop() == 0


def folder_that_is_a_file(start: Start) -> None:
    (start.base / "file").write_text("no folder")
    server = start.launch("--profile_dir", str(start.base / "file"))
    assert server.process.wait(STOP_S) == 2
    assert server.log.count("\n") == 1
    assert "--profile_dir" in server.log


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        command = [*SMALL_FOLDER, MOUNT, folder, "true"]
        return subprocess.run(command, capture_output=True).returncode == 0


CASES = [
    Case("a profile is started and stopped twice", start_twice, responds(409), flags=FLAGS),
    Case("a profile of streams", profile_under_load, STREAMS_CONTINUE, during=STREAMING, flags=FLAGS, is_long=True),
    Case("the profile folder becomes a file", replace_folder_by_a_file, responds(500), flags=FLAGS),
    Case(
        "kill -9 ls-worker during a profile",
        kill_the_profiled_worker,
        Reaction("streams go on; the profile says what is missing", _continues_and_says_what_is_missing, same_text),
        during=STREAMING,
        flags=FLAGS,
        restarts=1,
        is_long=True,
    ),
]
if has_otlp():
    CASES.append(
        Case(
            "the collector of traces is away",
            serve_without_a_collector,
            Reaction("streams go on; dropped spans are counted", _spans_dropped, same_text),
            during=STREAMING,
            flags=FLAGS,
            within_s=20.0,
        )
    )
START_CASES = [StartCase("--profile_dir is a file", folder_that_is_a_file, "one line, exit code 2")]
if can_mount():
    START_CASES.append(StartCase("the disk of --profile_dir is full", full_folder, "500 for the profile; serves"))
