"""A long mixed load: every kind of client at once, and the memory, threads and files of the server before and after.

    python -m benchmark.serving.soak --minutes 30 [--clients 16] [flags of the server]

Clients use every API, with long and short outputs, grammars and several choices. Some disconnect, some are aborted,
some send invalid requests. Every response must have the status and the end of its kind, and a known request must get
the same text every time. Unless the flags name a model, a tiny one with random weights is served. Memory is measured
while nothing runs: after a warm-up, halfway and at the end. The program exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmark.models import TINY, save_model
from benchmark.serving.server import Server
from benchmark.serving.soak_requests import KINDS, Kind
from benchmark.serving.storm import held_by, until_idle
from benchmark.serving.stream_client import DisconnectingClient, StreamClient, finish, post
from lightserve.model_files.source import resolve

RESPONSE_S = 120.0  # a request that takes longer counts as lost
GOLDEN = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
ABORT_EVERY_S = 0.2
GOLDEN_EVERY = 50  # requests
WARM_UP = 0.2  # of the time, before the figures that count
SLACK_MIB = 8.0  # that a process may grow besides 1 MiB for 1,000 requests


@dataclass
class Soak:
    """The requests sent so far, and how they ended."""

    url: str
    rng: random.Random
    golden: str = ""
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.golden = self._send_golden()

    async def run(self, clients: int, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._run_client(end_s))

    async def _run_client(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            kind = self.rng.choices(KINDS, [kind.weight for kind in KINDS])[0]
            await self._send(kind)
            if self.ends.total() % GOLDEN_EVERY == 0:
                await asyncio.to_thread(self._check_golden)

    async def _send(self, kind: Kind) -> None:
        name = f"soak-{self.rng.getrandbits(48):x}"
        path, body = kind.make(self.rng)
        raw = body if isinstance(body, bytes) else json.dumps({**body, **kind.named(name)}).encode()
        request = post(urlsplit(self.url).netloc, path, raw)
        events = kind.disconnects_after
        client = StreamClient(request) if events is None else DisconnectingClient(request, events)
        try:
            async with asyncio.timeout(RESPONSE_S), asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(finish(client, self.url))
                while kind.is_aborted and not ending.done():  # the abort may arrive before the request
                    await asyncio.to_thread(self._post, "/abort_request", {"request_id": name})
                    await asyncio.wait([ending], timeout=ABORT_EVERY_S)
        except (TimeoutError, OSError) as error:
            self.wrong.append(f"{kind.name}: {error!r}")
            return
        self.ends[kind.name] += 1
        if not kind.is_expected_end(client.status, ending.result()):
            self.wrong.append(f"{kind.name}: {client.status} {ending.result()!r}")

    def _check_golden(self) -> None:
        if (text := self._send_golden()) != self.golden:
            self.wrong.append(f"a known request returned {text!r}, not {self.golden!r}")

    def _send_golden(self) -> str:
        return str(self._post("/v1/completions", GOLDEN)["choices"][0]["text"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
            return json.load(response)


Figures = dict[str, float]


def figures_of(server: Server, url: str) -> Figures:
    """What the processes and the router hold, when nothing runs any more."""
    held = until_idle(url)
    found: Figures = {name.removeprefix("lightserve_"): value for name, value in held.items()}
    for pid, name in server.processes():
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found[f"{name} RSS MiB"] = int(status["VmRSS"].split()[0]) / 1024
        found[f"{name} threads"] = int(status["Threads"])
        found[f"{name} descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def grown(before: Figures, after: Figures, requests: int) -> Iterator[str]:
    """What is more than it may be. Threads that were started once stay, so they are judged from halfway on."""
    for name, value in after.items():
        allowed = before.get(name, 0.0) + (SLACK_MIB + requests / 1000 if name.endswith("MiB") else 0)
        if value > allowed:
            yield f"{name}: {before.get(name, 0.0):g} -> {value:g}"


def table(columns: dict[str, Figures]) -> str:
    rows = [f"{'':<30}" + "".join(f"{title:>12}" for title in columns)]
    for name in columns["end"]:
        rows.append(f"{name:<30}" + "".join(f"{column.get(name, 0.0):>12.1f}" for column in columns.values()))
    return "\n".join(rows)


def tiny_model(folder: Path) -> list[str]:
    """A model of random weights with the default model's tokenizer and chat template, and the flags that serve it."""
    save_model(folder, None, TINY)
    template = resolve(None, needs_weights=False).chat_templates()["default"]
    (folder / "chat_template.jinja").write_text(template)
    return ["--model_dir", str(folder), "--load_format", "dummy", "--max_total_token_num", "16384"]


def soak(args: argparse.Namespace, flags: list[str]) -> int:
    server = Server(flags)
    try:
        url = server.wait_until_ready()
        state = Soak(url, random.Random(args.seed))
        seconds = args.minutes * 60
        columns = {}
        for title, share in (("start", WARM_UP), ("halfway", (1 - WARM_UP) / 2), ("end", (1 - WARM_UP) / 2)):
            asyncio.run(state.run(args.clients, seconds * share))
            columns[title] = figures_of(server, url)
        wrong = state.wrong + list(grown(columns["halfway"], columns["end"], state.ends.total()))
        wrong += [f"{name} {value:g} at the end" for name, value in held_by(url).items() if value]
        wrong += [line for line in server.log().splitlines() if "Traceback" in line]
    finally:
        server.stop()
    ends = ", ".join(f"{count} {name}" for name, count in state.ends.most_common())
    print(f"{state.ends.total()} requests in {args.minutes:g} minutes by {args.clients} clients: {ends}")
    print(table(columns))
    print("\n".join(wrong) or "passed: nothing is wrong")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        has_model = any(flag.startswith(("--model", "--null_worker")) for flag in flags)
        return soak(args, flags if has_model else tiny_model(Path(folder)) + flags)


if __name__ == "__main__":
    sys.exit(main())
