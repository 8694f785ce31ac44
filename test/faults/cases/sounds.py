"""Requests with sounds: files that are damaged, hostile or no WAV files."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import numpy as np

from test.api.server import ServerProcess
from test.audio_model import save_audio_model
from test.faults.start_case import Start, StartCase
from test.media.audio.sounds import chunk, fmt_chunk, riff, tone, wav
from test.waiting import wait_until

PROCESSES = ("ls-encoder", "ls-worker", "ls-detokenizer", "ls-router", "ls-httpserver")
FLAGS = ("--device", "cpu", "--max_total_token_num", "2000", "--embed_cache_gb", "0.01", "--max_audio_mb", "1")


def ask(server: ServerProcess, file: bytes) -> int:
    audio = {"data": base64.b64encode(file).decode(), "format": "wav"}
    messages = [{"role": "user", "content": [{"type": "input_audio", "input_audio": audio}]}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})[0]


def refused_files() -> Iterator[bytes]:
    whole = wav(tone(0.2))
    yield from (whole[:end] for end in (0, 3, 11, 12, 20, 35, 43, 44, 45, 1000, len(whole) - 1))
    yield from (magic + bytes(200) for magic in (b"ID3", b"OggS", b"fLaC", b"RIFF", b"\x1aE\xdf\xa3", b"\xff\xfb"))
    yield wav(tone(0.01))  # too short to have a token
    yield wav(tone(3.1))  # longer than the model hears
    yield whole + bytes(10**6)  # more than --max_audio_mb
    yield riff(fmt_chunk(1, 1, 1000, 8), bytes(900_000))  # a quarter of an hour
    yield riff(fmt_chunk(1, 255, 16_000, 16), bytes(51_000))
    yield riff(fmt_chunk(1, 1, 2_000_000_000, 16), bytes(1000))
    yield riff(fmt_chunk(1, 1, 16_000, 16), b"", before=chunk(b"data", b""))
    yield wav(np.full(8000, np.inf, dtype=np.float32), bits=32, is_float=True)
    yield b"RIFF" + struct.pack("<I", 2**32 - 1) + b"WAVE" + chunk(b"LIST", b"") * 1000 + whole[12:]


def flipped_files() -> Iterator[bytes]:
    """One byte of the header is another."""
    random = np.random.default_rng(1)
    for place in range(44):
        file = bytearray(wav(tone(0.2)))
        file[place] = int(random.integers(0, 256))
        yield bytes(file)


def pids_of(server: ServerProcess) -> dict[str, list[int]]:
    """Processes that compile grammars begin when there is time."""
    found = server.processes()
    return {name: [process.pid for process in found[name]] for name in PROCESSES}


def send_damaged_files(start: Start) -> None:
    """Every one is refused, and all processes live on."""
    folder = start.base / "model"
    folder.mkdir()
    path, _ = save_audio_model(folder)
    server = Start(start.base, (), start.exits).launch("--model_dir", path, *FLAGS)
    start.wait_ready(server)
    wait_until(server.is_healthy)
    before = pids_of(server)

    assert {ask(server, file) for file in refused_files()} == {400}
    assert {ask(server, file) for file in flipped_files()} <= {200, 400}
    assert ask(server, wav(tone(0.3))) == 200

    after = pids_of(server)
    assert after == before, (before, after)
    assert server.stop() == 0


START_CASES = [StartCase("damaged sound files", send_damaged_files, "400 each, and no process ends", 60.0)]
