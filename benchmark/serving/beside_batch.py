"""The TTFT of chats beside a running batch, and without one.

    python -m benchmark.serving.beside_batch --rounds 6 --chats 20 [flags of the server]

One server with the default model, or that of the flags. Rounds without and with a batch alternate. In each round one
chat follows the other after a pause of random length, as of a person who reads. Prompts differ, so nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.serving.server import Server

BATCH_LINES, BATCH_TOKENS = 2_000, 128
ANSWER_TOKENS = 8
WORDS = ("river", "stone", "paper", "cloud", "market", "window", "garden", "engine", "winter", "letter", "music")
RAMP_S = 8.0  # until a batch runs as many lines as it may
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    has_batch: bool
    ttfts_s: list[float] = field(default_factory=list)
    batch_tokens_per_s: float = 0.0

    def __str__(self) -> str:
        ms = sorted(ttft * 1e3 for ttft in self.ttfts_s)
        name = "beside a batch" if self.has_batch else "without"
        rate = f"; batch {self.batch_tokens_per_s:.0f} tokens/s" if self.has_batch else ""
        return f"{name}: TTFT median {statistics.median(ms):.1f} ms, {ms[0]:.1f} to {ms[-1]:.1f}{rate}"


class Client:
    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)

    def text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))

    def call(self, path: str, body: object = None, content_type: str = "application/json") -> Any:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": content_type})
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())

    def start_batch(self, words: int) -> str:
        lines = b"\n".join(json.dumps(self._line(number, words)).encode() for number in range(BATCH_LINES))
        form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        form += b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + lines + b"\r\n--b--\r\n"
        file = self.call("/v1/files", form, "multipart/form-data; boundary=b")
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.call("/v1/batches", fields)["id"])

    def _line(self, number: int, words: int) -> dict[str, Any]:
        body = _chat(self.text(words), BATCH_TOKENS) | {"ignore_eos": True}
        return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}

    def cancel(self, batch_id: str) -> None:
        self.call(f"/v1/batches/{batch_id}/cancel", {})
        while self.call(f"/v1/batches/{batch_id}")["status"] != "cancelled":
            time.sleep(0.1)

    def ttft_s(self, words: int) -> float:
        body = json.dumps(_chat(self.text(words), ANSWER_TOKENS) | {"stream": True}).encode()
        request = urllib.request.Request(self._url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
        begin = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            first_s = next(
                time.perf_counter() - begin for line in response if b'"content":"' in line and b'""' not in line
            )
            response.read()
        return first_s

    def generated_tokens(self) -> float:
        with urllib.request.urlopen(self._url + "/metrics") as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("lightserve_generation_tokens_total"))

    def pause(self, mean_s: float) -> None:
        time.sleep(min(self._random.expovariate(1 / mean_s), 4 * mean_s))


def _chat(text: str, max_tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}


def measure(client: Client, has_batch: bool, args: argparse.Namespace) -> Round:
    batch_id = client.start_batch(args.batch_words) if has_batch else ""
    time.sleep(RAMP_S if has_batch else 0.0)
    begin_s, tokens = time.perf_counter(), client.generated_tokens()
    ttfts_s = []
    for _ in range(args.chats):
        ttfts_s.append(client.ttft_s(args.words))
        client.pause(args.pause_s)
    seconds = time.perf_counter() - begin_s
    tokens = client.generated_tokens() - tokens - args.chats * ANSWER_TOKENS
    if has_batch:
        client.cancel(batch_id)
    return Round(has_batch, ttfts_s, tokens / seconds)


def report(rounds: Sequence[Round]) -> str:
    medians = {
        has_batch: statistics.median(ttft for each in rounds if each.has_batch is has_batch for ttft in each.ttfts_s)
        for has_batch in (False, True)
    }
    growth = medians[True] / medians[False] - 1
    return f"medians: {medians[False] * 1e3:.1f} ms without, {medians[True] * 1e3:.1f} ms beside a batch: {growth:+.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="without and with a batch by turns")
    parser.add_argument("--chats", type=int, default=20, help="in a round")
    parser.add_argument("--words", type=int, default=200, help="of a chat's prompt")
    parser.add_argument("--batch_words", type=int, default=100, help="of the prompt of a batch's line")
    parser.add_argument("--pause_s", type=float, default=0.5, help="mean time between an answer and the next chat")
    args, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        server = Server([*flags, "--batch_dir", folder])
        try:
            client = Client(server.wait_until_ready(START_S), seed=1)
            client.ttft_s(args.words)
            rounds = []
            for number in range(args.rounds):
                rounds.append(measure(client, number % 2 == 1, args))
                print(rounds[-1], flush=True)
            print(report(rounds))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
