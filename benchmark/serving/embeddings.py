"""Measures /v1/embeddings under load: requests and tokens per second, and latencies.

    python -m benchmark.serving.embeddings --shape minilm --clients 64 [flags of the server]
    python -m benchmark.serving.embeddings --model_dir FOLDER --clients 8 --beside_sentence_transformers

``--shape`` serves random weights of a known shape, with a tokenizer of words. ``--beside_sentence_transformers``
measures that library on the same texts in the same run, before and after the server. It must be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import orjson

from benchmark.serving.embedding_shapes import SHAPES, WORDS, save_shape
from benchmark.serving.server import Server

START_S = 300.0
WARM_UP_S = 2.0
MAX_CLIENTS = 2048


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that send requests one after another until the end."""

    clients: int
    inputs: int  # texts of a request
    words: tuple[int, int]  # of a text: at least and at most
    seconds: float
    sends_ids: bool = False  # token ids in place of texts


@dataclass(frozen=True, slots=True)
class Measured:
    requests: int
    tokens: int
    seconds: float
    latencies_s: list[float]

    def line(self, name: str) -> str:
        p50, p99 = np.percentile(self.latencies_s, (50, 99)) * 1e3
        rates = f"{self.requests / self.seconds:8,.1f} requests/s {self.tokens / self.seconds:10,.0f} tokens/s"
        return f"{name:32} {rates}   p50 {p50:7.1f} ms   p99 {p99:7.1f} ms"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    model.add_argument("--model_dir", help="folder of a model")
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    parser.add_argument("--processes", type=int, default=1, help="client processes that share them")
    parser.add_argument("--inputs", type=int, default=1, help="texts of a request")
    parser.add_argument("--words", type=int, nargs=2, default=(62, 62), help="words of a text, at least and at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the measurement")
    parser.add_argument("--ids", action="store_true", help="send token ids, not texts")
    parser.add_argument("--beside_sentence_transformers", action="store_true")
    args, flags = parser.parse_known_args(argv)
    load = Load(min(args.clients, MAX_CLIENTS), args.inputs, tuple(args.words), args.seconds, args.ids)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            save_shape(Path(folder), args.shape)
            flags += ["--model_dir", folder, "--load_format", "dummy"]
        else:
            flags += ["--model_dir", args.model_dir]
        run(load, args.processes, flags, args.model_dir if args.beside_sentence_transformers else None)


def run(load: Load, processes: int, flags: list[str], beside: str | None) -> None:
    if beside:
        _measure_library(beside, load)
    server = Server(flags)
    try:
        url = server.wait_until_ready(START_S)
        _send(url, load, processes, WARM_UP_S)
        before = server.cpu_s()
        measured = _send(url, load, processes, load.seconds)
        print(measured.line(f"lightserve, {load.clients} clients"), flush=True)
        used = {name: seconds - before.get(name, 0.0) for name, seconds in server.cpu_s().items()}
        shares = ", ".join(f"{name} {seconds / measured.seconds:.0%}" for name, seconds in sorted(used.items()))
        print(f"CPU: {shares}", flush=True)
    finally:
        server.stop()
    if beside:
        _measure_library(beside, load)


def texts_of(client: int, load: Load, count: int) -> list[str]:
    rng = np.random.default_rng(client)
    lengths = rng.integers(load.words[0], load.words[1] + 1, count)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def bodies_of(client: int, load: Load) -> list[bytes]:
    """A few different ones, which a client sends in turn."""
    bodies = []
    for number in range(8):
        texts: list[str] | list[list[int]] = texts_of(client * 8 + number, load, load.inputs)
        if load.sends_ids:
            rng = np.random.default_rng(client * 8 + number)
            lengths = rng.integers(load.words[0], load.words[1] + 1, load.inputs)
            texts = [rng.integers(100, 1000, length).tolist() for length in lengths]
        bodies.append(orjson.dumps({"input": texts, "encoding_format": "base64"}))
    return bodies


def _send(url: str, load: Load, processes: int, seconds: float) -> Measured:
    """From several processes: one of Python writes some thousand requests per second."""
    context = multiprocessing.get_context("spawn")
    shares = [len(range(index, load.clients, processes)) for index in range(processes)]
    tasks = [(url, load, index * MAX_CLIENTS, share, seconds) for index, share in enumerate(shares) if share]
    with context.Pool(len(tasks)) as pool:
        parts = pool.starmap(_run_clients, tasks)
    return Measured(
        sum(one.requests for one in parts),
        sum(one.tokens for one in parts),
        max(one.seconds for one in parts),
        [latency for one in parts for latency in one.latencies_s],
    )


def _run_clients(url: str, load: Load, first: int, count: int, seconds: float) -> Measured:
    return asyncio.run(_clients(url, load, range(first, first + count), seconds))


async def _clients(url: str, load: Load, clients: range, seconds: float) -> Measured:
    begin_s = time.monotonic()
    end_s = begin_s + seconds
    results = await asyncio.gather(*(_client(url, bodies_of(client, load), end_s) for client in clients))
    latencies = [latency for own, _ in results for latency in own]
    return Measured(len(latencies), sum(tokens for _, tokens in results), time.monotonic() - begin_s, latencies)


async def _client(url: str, bodies: list[bytes], end_s: float) -> tuple[list[float], int]:
    """The latencies of one client, and the tokens of its requests."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    latencies: list[float] = []
    tokens = 0
    try:
        while time.monotonic() < end_s:
            body = bodies[len(latencies) % len(bodies)]
            begin_s = time.monotonic()
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            tokens += orjson.loads(await _response(reader))["usage"]["prompt_tokens"]
            latencies.append(time.monotonic() - begin_s)
    finally:
        writer.close()
    return latencies, tokens


async def _response(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].partition("\r\n")[0])
    content = await reader.readexactly(length)
    if " 200 " not in head.partition("\r\n")[0]:
        raise RuntimeError(f"{head.partition(chr(13))[0]}: {content[:300]!r}")
    return content


def _measure_library(model_dir: str, load: Load) -> None:
    """sentence-transformers in a process of its own, as a program would use it."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        for line in pool.apply(_run_library, (model_dir, load)):
            print(line, flush=True)


def _run_library(model_dir: str, load: Load) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor
    from importlib import import_module

    model = import_module("sentence_transformers").SentenceTransformer(model_dir, device="cpu")

    def encode(client: int, size: int) -> tuple[list[float], int]:
        texts = [text for number in range(8) for text in texts_of(client * 8 + number, load, load.inputs)]
        counts = [sum(one) for one in model.tokenize(texts)["attention_mask"].tolist()]
        latencies: list[float] = []
        tokens = 0
        while time.monotonic() < end_s:
            begin_s = time.monotonic()
            places = [(len(latencies) * size + i) % len(texts) for i in range(size)]
            model.encode([texts[place] for place in places], show_progress_bar=False)
            tokens += sum(counts[place] for place in places)
            latencies.append(time.monotonic() - begin_s)
        return latencies, tokens

    lines = []
    model.encode(texts_of(0, load, 8), show_progress_bar=False)
    for name, threads, size in (
        (f"sentence-transformers, {load.clients} threads", load.clients, load.inputs),
        (f"sentence-transformers, batches of {load.clients}", 1, load.clients * load.inputs),
    ):
        begin_s = time.monotonic()
        end_s = begin_s + load.seconds
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(lambda client, size=size: encode(client, size), range(threads)))
        seconds = time.monotonic() - begin_s
        latencies = [latency for own, _ in results for latency in own]
        requests = len(latencies) * size // load.inputs
        lines.append(Measured(requests, sum(tokens for _, tokens in results), seconds, latencies).line(name))
    return lines


if __name__ == "__main__":
    main()
