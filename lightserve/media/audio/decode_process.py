"""Decodes a compressed sound: a file comes by stdin, and a WAV file goes to stdout. See ``compressed.py``."""

from __future__ import annotations

import io
import resource
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import soundfile

from lightserve.media.audio.compressed import DAMAGED, TOO_LONG
from lightserve.media.audio.resample import resampled
from lightserve.media.audio.wav import MAX_CHANNELS, PCM, RATES, Samples, WavHeader, file_of

RATE = 16_000  # samples a second that models of speech hear
FORMATS = ("MP3", "FLAC", "OGG")
BLOCK_S = 10  # that are decoded at once
LIMITS = {
    resource.RLIMIT_AS: 2 * 2**30,
    resource.RLIMIT_CPU: 60,
    resource.RLIMIT_FSIZE: 0,  # it writes no file
    resource.RLIMIT_CORE: 0,
}


def main(max_seconds: float) -> None:
    for name, limit in LIMITS.items():
        with suppress(ValueError, OSError):  # the system has another, or knows none
            resource.setrlimit(name, (limit, limit))
    try:
        samples, rate = _decode(sys.stdin.buffer.read(), max_seconds)
    except (soundfile.LibsndfileError, ValueError, MemoryError):
        sys.exit(DAMAGED)
    values = np.round(resampled(samples, rate, RATE) * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2")
    sys.stdout.buffer.write(file_of(values.tobytes(), WavHeader(RATE, 1, PCM, 2, 0, len(values))))


def _decode(data: bytes, max_seconds: float) -> tuple[Samples, int]:
    """The mean of all channels, and how many samples a second has. Headers may lie about the length."""
    blocks: list[Any] = [np.zeros(0, dtype=np.float32)]
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate = file.samplerate
        if file.format not in FORMATS or file.channels > MAX_CHANNELS or not RATES[0] <= rate <= RATES[1]:
            raise ValueError
        while len(block := file.read(BLOCK_S * rate, dtype="float32", always_2d=True)):
            blocks.append(block.mean(axis=1, dtype=np.float32))
            if sum(map(len, blocks)) > max_seconds * rate:
                sys.exit(TOO_LONG)
    samples = np.concatenate(blocks)
    if not np.isfinite(samples).all():
        raise ValueError
    return samples, rate


if __name__ == "__main__":
    main(float(sys.argv[1]))
