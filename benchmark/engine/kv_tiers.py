"""What the host memory tier saves: a prompt that was evicted is computed again, or loaded, over HTTP.

    python -m benchmark.engine.kv_tiers --model_dir DIR --prompt 6000 --streams 16 --kv_ram_gb 16

The KV pool holds two prompts and the streams. Prompts are sent one after the other, so that each evicts an older one.
The table has the time to first token of a prompt that is new and of one that comes back, without and with streams
beside it, and the time between two tokens of the streams: when nothing else runs, beside a prompt that is computed, and
beside one that is loaded. Other flags go to the server.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from statistics import mean, median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmark.serving.server import Server

START_S = 600.0
FIRST_ID, LAST_ID = 1000, 20_000  # of prompts: plain tokens of most vocabularies


class Answer(NamedTuple):
    sent_s: float
    times_s: list[float]  # of its tokens
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s


def prompt(number: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(number).integers(FIRST_ID, LAST_ID, length).tolist()
    return ids


def ask(url: str, ids: list[int], new_tokens: int, ended: threading.Event | None = None) -> Answer:
    """Stream a response. ``ended``: leave when it is set."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=START_S)
    body = {"prompt": ids, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    sent_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    times_s, cached = [], 0
    try:
        for event in _events(connection.getresponse()):
            if event["choices"]:
                times_s.append(time.perf_counter())
            elif event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            if ended is not None and ended.is_set():
                break
    finally:
        connection.close()
    return Answer(sent_s, times_s, cached)


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


class Streams:
    """Responses that run until the end of the block."""

    def __init__(self, url: str, count: int, new_tokens: int) -> None:
        self._url, self._count, self._new_tokens = url, count, new_tokens
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: list[Answer] = []

    def __enter__(self) -> Streams:
        for number in range(self._count):
            thread = threading.Thread(target=self._run, args=(prompt(10_000 + number, 32),))
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, ids: list[int]) -> None:
        self.answers.append(ask(self._url, ids, self._new_tokens, self._ended))

    def gaps_ms(self, windows: list[tuple[float, float]]) -> list[float]:
        """Times between two tokens that end in one of these times. Call it after the block."""
        return [
            (end - begin) * 1e3
            for answer in self.answers
            for begin, end in itertools.pairwise(answer.times_s)
            if any(first <= end <= last for first, last in windows)
        ]


class Prompts:
    """Every new prompt evicts an older one."""

    def __init__(self, url: str, length: int, pool: int) -> None:
        self._url, self._length = url, length
        self._between = pool // length + 1  # so many other prompts evict one
        self._numbers = itertools.count()

    def new(self) -> tuple[int, Answer]:
        number = next(self._numbers)
        return number, ask(self._url, prompt(number, self._length), 2)

    def again(self, number: int) -> Answer:
        return ask(self._url, prompt(number, self._length), 2)

    def rounds(self, runs: int) -> tuple[list[Answer], list[Answer]]:
        """Prompts that were computed, and the same when they came back after others."""
        self.new()
        computed, loaded = [], []
        for _ in range(runs):
            number, answer = self.new()
            computed.append(answer)
            for _ in range(self._between):
                self.new()
            loaded.append(self.again(number))
        return computed, loaded


def windows(answers: list[Answer]) -> list[tuple[float, float]]:
    return [(answer.sent_s, answer.times_s[0]) for answer in answers]


def show_ttft(name: str, computed: list[Answer], loaded: list[Answer]) -> None:
    old, new = median(one.ttft_s for one in computed), median(one.ttft_s for one in loaded)
    cached = min(one.cached_tokens for one in loaded)
    print(f"{name:32} {old * 1e3:10.1f} ms {new * 1e3:10.1f} ms {old / new:7.1f}x {cached:10} tokens loaded at least")


def show_itl(name: str, gaps_ms: list[float], alone_ms: float) -> None:
    if gaps_ms:
        p99 = float(np.percentile(gaps_ms, 99))
        print(f"{name:32} {mean(gaps_ms):10.2f} ms {p99:10.2f} ms {mean(gaps_ms) / alone_ms:7.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of the prompt that is evicted")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stream_tokens", type=int, default=4000, help="maximum output tokens of a stream")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone_s", type=float, default=2.0, help="seconds in which streams run alone")
    args, flags = parser.parse_known_args()
    pool = 2 * args.prompt + args.streams * (args.stream_tokens + 64) + 256
    server = Server([*flags, "--max_total_token_num", str(pool)])
    try:
        url = server.wait_until_ready(START_S)
        prompts = Prompts(url, args.prompt, pool)
        print(f"{'time to first token, median':32} {'computed':>13} {'loaded':>13} {'faster':>8}")
        show_ttft("nothing beside it", *prompts.rounds(args.runs))
        with Streams(url, args.streams, args.stream_tokens) as streams:
            time.sleep(args.alone_s / 2)  # until all of them decode
            begin = time.perf_counter()
            time.sleep(args.alone_s)
            alone = (begin, time.perf_counter())
            computed, loaded = prompts.rounds(args.runs)
        show_ttft(f"beside {args.streams} streams", computed, loaded)
        alone_ms = mean(streams.gaps_ms([alone]))
        print(f"{'time between two tokens':32} {'mean':>13} {'p99':>13} {'to alone':>8}")
        show_itl("streams alone", streams.gaps_ms([alone]), alone_ms)
        show_itl("beside a computed prompt", streams.gaps_ms(windows(computed)), alone_ms)
        show_itl("beside a loaded prompt", streams.gaps_ms(windows(loaded)), alone_ms)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
