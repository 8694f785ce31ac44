"""A real server in its own processes, started like a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from test.waiting import wait_until

START_S = 600.0  # a real model of 1.5B parameters on a loaded machine
STOP_S = 120.0  # a server that ends takes a second of a free core
RESPONSE_S = 300.0
SAMPLE = re.compile(r"^([\w:]+)\{(.*)\} (\S+)$", re.MULTILINE)  # every sample has the label model_name
LABEL = re.compile(r'(\w+)="([^"]*)"')
SHOWN_LABELS = ("finished_reason", "le", "tier", "group", "kv_group", "kind", "stage", "reason")
SAMPLED_S = 3.0  # the router sends its metrics once a second, later on a loaded machine


@dataclass
class Computed:
    tokens: int = 0


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    log_path: Path
    tls: ssl.SSLContext | None = None  # for its clients

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"ready at (https?://\S+)", self.log)
        assert found, self.log
        return found[1]

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=RESPONSE_S, context=self.tls):
                return True
        except urllib.error.HTTPError:
            return False

    def wait_for_log(self, text: str) -> None:
        """Its log, or that of one of its processes, may come later than what it is about."""
        with suppress(TimeoutError):
            wait_until(lambda: text in self.log or self.has_ended)
        assert text in self.log, self.log

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Child processes by the name that ps shows."""
        found: dict[str, list[psutil.Process]] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since
                found.setdefault(child.name(), []).append(child)
        return found

    def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Status and JSON of the response."""
        headers |= {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=RESPONSE_S, context=self.tls) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def metrics(self) -> dict[str, float]:
        """The metrics of at most a second ago, without the prefix; distinguishing labels follow a slash.

        An HTTP process that is not ready yet, such as a second one or the next, has only engine_up: ask again.
        """
        found: dict[str, float] = {}

        def is_complete() -> bool:
            found.update(self._read_metrics())
            return "num_requests_running" in found

        wait_until(is_complete)
        return found

    def _read_metrics(self) -> dict[str, float]:
        """prometheus_client parses a page in 15 ms, and many tests read pages until something is on them."""
        found = {}
        for name, written, value in SAMPLE.findall(self.metrics_text()):
            labels = dict(LABEL.findall(written))
            values = [f"/{labels[label]}" for label in SHOWN_LABELS if label in labels]
            found["".join([name.removeprefix("lightserve_"), *values])] = float(value)
        return found

    def metrics_text(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=RESPONSE_S, context=self.tls) as response:
            text: str = response.read().decode()
            return text

    def wait_until_idle(self) -> None:
        """No request runs or waits, and none holds KV: one snapshot may show its end before its memory is free."""
        names = ("num_requests_running", "num_requests_waiting", "kv_used_tokens")

        def is_idle() -> bool:
            seen = self.metrics()
            return all(seen[name] == 0 for name in names)

        wait_until(is_idle)

    def settled_metrics(self) -> dict[str, float]:
        """The metrics once they have not changed for longer than the sampling interval: they are up to date."""
        seen, since_s = self.metrics(), time.monotonic()

        def has_settled() -> bool:
            nonlocal seen, since_s
            now = self.metrics()
            if now != seen:
                seen, since_s = now, time.monotonic()
            return time.monotonic() - since_s > SAMPLED_S

        wait_until(has_settled, pause_s=0.1)  # the servers of other tests need the cores too
        return seen

    @contextmanager
    def computing(self) -> Iterator[Computed]:
        """Counts the tokens that the worker computes inside the block. No other client may send requests."""
        computed = Computed()
        before = self.settled_metrics()
        yield computed
        after = self.settled_metrics()
        computed.tokens = int(after["iteration_tokens_total_sum"] - before["iteration_tokens_total_sum"])

    def stop(self) -> int:
        if not self.has_ended:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


MODULE = ("-m", "lightserve.server.api_server")
NOT_DEFAULT = {"--model_dir", "--null_worker", "--quantization"}


@contextmanager
def running_server(
    log_path: Path,
    *flags: str,
    program: tuple[str, str] = MODULE,
    env: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[ServerProcess]:
    """A server with the default model, unless the flags say otherwise, on a free port. ``env`` extends os.environ.

    The weights of the default model are expanded, so that it generates the text of transformers. Its sampling defaults
    are the API's own. ``tls`` is the context for its clients.
    """
    if not NOT_DEFAULT & {*flags}:
        flags = ("--quantization", "none", "--generation_config", "none", *flags)
    server = start_server(log_path, [sys.executable, *program, "--port", "0", *flags], env)
    server.tls = tls
    try:
        wait_until(lambda: "ready at" in server.log or server.has_ended, START_S)
        assert not server.has_ended, server.log
        wait_until(server.is_healthy)  # an HTTP process may become ready a little later than the log says
        yield server
    finally:
        if not server.has_ended:
            server.process.kill()  # its child processes exit too
            server.process.wait(STOP_S)


def start_server(log_path: Path, command: Sequence[str], env: Mapping[str, str] | None = None) -> ServerProcess:
    """Start a server without waiting for it. The caller ends it."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with log_path.open("wb") as log:
        return ServerProcess(
            subprocess.Popen(command, stdout=log, stderr=log, env=inherited | dict(env or {})), log_path
        )
