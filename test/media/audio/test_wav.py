"""WAV files of clients: read within limits, or refused with a reason."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest

from lightserve.errors import InvalidRequestError
from lightserve.media.audio.wav import decode, read_header
from test.media.audio.sounds import chunk, fmt_chunk, riff, tone, wav


@pytest.mark.parametrize(
    ("bits", "is_float", "atol"),
    [(8, False, 1e-2), (16, False, 1e-4), (24, False, 1e-6), (32, False, 1e-6), (32, True, 0), (64, True, 0)],
)
def test_samples_of_every_kind_are_read(bits: int, is_float: bool, atol: float) -> None:
    samples = tone(0.1, 8000)

    found, rate = decode(wav(samples, 8000, bits, is_float))

    assert rate == 8000
    np.testing.assert_allclose(found, samples, rtol=0, atol=atol)


def test_samples_are_those_that_the_standard_library_reads() -> None:
    file = wav(np.stack((tone(0.2, seed=1), tone(0.2, seed=2)), axis=1))
    with wave.open(io.BytesIO(file)) as reader:
        values = np.frombuffer(reader.readframes(reader.getnframes()), dtype="<i2").reshape(-1, 2)

    np.testing.assert_allclose(decode(file)[0], (values / 32768).mean(1), rtol=0, atol=1e-7)


def test_the_header_tells_the_length() -> None:
    header = read_header(wav(np.zeros((1000, 2), dtype=np.float32), 44_100))

    assert (header.num_samples, header.channels, header.rate) == (1000, 2, 44_100)
    assert header.seconds == 1000 / 44_100


def test_other_chunks_and_the_extensible_format_are_read() -> None:
    samples = tone(0.05)
    raw = (samples * 32767).round().astype("<i2").tobytes()
    fmt = fmt_chunk(0xFFFE, 1, 16_000, 16) + struct.pack("<HHIH14s", 22, 16, 4, 1, b"\0" * 14)

    file = riff(fmt, raw, before=chunk(b"LIST", b"odd"))

    np.testing.assert_allclose(decode(file)[0], samples, rtol=0, atol=1e-4)


def test_a_file_that_a_pipe_wrote_has_the_samples_that_are_there() -> None:
    file = bytearray(wav(tone(0.05)))
    place = file.index(b"data") + 4
    file[place : place + 4] = struct.pack("<I", 2**32 - 1)

    assert read_header(bytes(file)).num_samples == 800


def test_samples_beyond_the_range_are_cut() -> None:
    assert decode(wav(np.array([3.0, -1e30], dtype=np.float32), bits=32, is_float=True))[0].tolist() == [1, -1]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "not a WAV file; send PCM"),
        (b"ID3" + bytes(100), "not a WAV file"),
        (riff(fmt_chunk(85, 1, 16_000, 16), bytes(10)), "have format 85 and 16 bits"),
        (riff(fmt_chunk(1, 1, 16_000, 12), bytes(10)), "have format 1 and 12 bits"),
        (riff(fmt_chunk(1, 0, 16_000, 16), bytes(10)), "has 0 channels"),
        (riff(fmt_chunk(1, 17, 16_000, 16), bytes(340)), "a file has 1 to 16 channels"),
        (riff(fmt_chunk(1, 1, 0, 16), bytes(10)), "has 0 samples a second"),
        (riff(fmt_chunk(1, 1, 10**9, 16), bytes(10)), "has 1,000,000,000 samples a second"),
        (riff(fmt_chunk(1, 1, 16_000, 16), b""), "has no samples"),
        (riff(fmt_chunk(1, 1, 16_000, 16)[:10], bytes(10)), "header of the WAV file is damaged"),
        (wav(tone(0.1))[:-100], "3,100 of its 3,200 bytes"),
        (wav(tone(0.1))[:40], "has no samples"),
        (wav(np.array([np.nan], dtype=np.float32), bits=32, is_float=True), "no finite numbers"),
    ],
)
def test_files_that_cannot_be_read_are_refused(file: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        decode(file)


@pytest.mark.parametrize("bits", [8, 24])
def test_every_beginning_of_a_file_and_every_damaged_header_is_read_or_refused(bits: int) -> None:
    file = wav(tone(0.01), bits=bits)
    random = np.random.default_rng(bits)
    damaged = [bytearray(file) for _ in range(300)]
    for each in damaged:
        each[random.integers(0, 44)] = random.integers(0, 256)

    for broken in [*(file[:end] for end in range(len(file))), *map(bytes, damaged)]:
        try:
            samples, _ = decode(broken)
        except InvalidRequestError:
            continue
        assert np.isfinite(samples).all()
        assert abs(samples).max() <= 1
