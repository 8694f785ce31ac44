"""Sounds for tests, and their WAV files."""

from __future__ import annotations

import io
import struct

import numpy as np
import numpy.typing as npt
import pytest

KINDS = {"MP3": "MPEG_LAYER_III", "FLAC": "PCM_16", "OGG": "OPUS"}
Samples = npt.NDArray[np.float32]


def tone(seconds: float, rate: int = 16_000, seed: int = 0) -> Samples:
    """Some sines and a little noise."""
    random = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    waves = sum(np.sin(2 * np.pi * hertz * times) for hertz in random.uniform(80, 3000, 4))
    return np.asarray(0.1 * waves + 0.02 * random.standard_normal(len(times)), dtype=np.float32)


def wav(samples: npt.NDArray[np.float32], rate: int = 16_000, bits: int = 16, is_float: bool = False) -> bytes:
    """``[samples]`` or ``[samples, channels]``"""
    frames = samples.reshape(len(samples), -1)
    if is_float:
        raw = frames.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        raw = np.round(frames * 127 + 128).astype(np.uint8).tobytes()
    else:
        values = np.round(frames.astype(np.float64) * (2 ** (bits - 1) - 1)).astype("<i4")
        raw = values.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    return riff(fmt_chunk(3 if is_float else 1, frames.shape[1], rate, bits), raw)


def compressed(samples: npt.NDArray[np.float32], kind: str, rate: int = 16_000) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=KINDS[kind])
    return buffer.getvalue()


def fmt_chunk(tag: int, channels: int, rate: int, bits: int) -> bytes:
    width = channels * bits // 8
    return struct.pack("<HHIIHH", tag, channels, rate, rate * width, width, bits)


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def riff(fmt: bytes, raw: bytes, before: bytes = b"") -> bytes:
    content = b"WAVE" + chunk(b"fmt ", fmt) + before + chunk(b"data", raw)
    return b"RIFF" + struct.pack("<I", len(content)) + content
