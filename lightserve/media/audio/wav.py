"""Opens WAV files of clients, within limits that the header is checked against before any sample is decoded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightserve.errors import InvalidRequestError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # format tags
WIDTHS = {PCM: (1, 2, 3, 4), FLOAT: (4, 8)}  # bytes of a sample
RATES = 1_000, 384_000  # samples a second
MAX_CHANNELS = 16
MAX_CHUNKS = 64  # before the samples
STREAMED = 0xFFFFFF00  # programs that write to a pipe do not know the length, and say so or more
REMEDY = "send PCM: ffmpeg -i IN -c:a pcm_s16le OUT.wav"

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WavHeader:
    rate: int  # samples a second
    channels: int
    tag: int  # PCM or FLOAT
    width: int  # bytes of a sample
    start: int  # of the samples in the file
    num_samples: int  # of a channel

    @property
    def seconds(self) -> float:
        return self.num_samples / self.rate


def read_header(data: bytes) -> WavHeader:
    """Of a file within the limits."""
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise InvalidRequestError(f"not a WAV file; {REMEDY}")
    encoding = None
    for name, start, length in _chunks(data):
        if name == b"fmt ":
            encoding = _encoding(data[start : start + length])
        elif name == b"data":
            if encoding is None:
                break
            return _with_samples(data, encoding, start, length)
    raise InvalidRequestError("the WAV file is damaged or incomplete: it has no samples; send it again")


def decode(data: bytes) -> tuple[Samples, int]:
    """The mean of all channels, from -1 to 1, and how many samples a second has."""
    header = read_header(data)
    return samples_of(raw_samples(data, header, 0, header.num_samples), header), header.rate


def raw_samples(data: bytes, header: WavHeader, begin: int, end: int) -> bytes:
    """The bytes of some samples of all channels."""
    frame = header.channels * header.width
    return data[header.start + begin * frame : header.start + end * frame]


def samples_of(raw: bytes, header: WavHeader) -> Samples:
    """The mean of all channels, from -1 to 1."""
    samples = _floats(raw, header) if header.tag == FLOAT else _scaled(raw, header.width)
    return np.asarray(samples.reshape(-1, header.channels).mean(axis=1, dtype=np.float32).clip(-1, 1))


def file_of(raw: bytes, header: WavHeader) -> bytes:
    """A WAV file with these samples, of the format that ``header`` has."""
    frame = header.channels * header.width
    form = struct.pack(
        "<HHIIHH", header.tag, header.channels, header.rate, header.rate * frame, frame, 8 * header.width
    )
    content = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(raw)) + raw
    return b"RIFF" + struct.pack("<I", len(content)) + content


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and length of each."""
    start = 12
    for _ in range(MAX_CHUNKS):
        if start + 8 > len(data):
            return
        name, length = struct.unpack_from("<4sI", data, start)
        yield name, start + 8, length
        start += 8 + length + length % 2


def _encoding(chunk: bytes) -> tuple[int, int, int, int]:
    """Format tag, channels, rate, and bytes of a sample."""
    if len(chunk) < 16:
        raise InvalidRequestError("the header of the WAV file is damaged; send it again")
    tag, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == EXTENSIBLE and len(chunk) >= 26:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    width = bits // 8
    if tag not in WIDTHS or width not in WIDTHS[tag] or bits % 8:
        raise InvalidRequestError(f"the samples of the WAV file have format {tag} and {bits} bits; {REMEDY}")
    if not 0 < channels <= MAX_CHANNELS or frame != channels * width:
        raise InvalidRequestError(
            f"the WAV file has {channels} channels of {bits} bits in {frame} bytes; a file has 1 to {MAX_CHANNELS} "
            "channels"
        )
    if not RATES[0] <= rate <= RATES[1]:
        raise InvalidRequestError(f"the WAV file has {rate:,} samples a second; wanted {RATES[0]:,} to {RATES[1]:,}")
    return tag, channels, rate, width


def _with_samples(data: bytes, encoding: tuple[int, int, int, int], start: int, length: int) -> WavHeader:
    tag, channels, rate, width = encoding
    there = len(data) - start
    if length > there and length < STREAMED:
        raise InvalidRequestError(
            f"the WAV file is incomplete: {there:,} of its {length:,} bytes of samples are there; send it again"
        )
    num_samples = min(length, there) // (channels * width)
    if not num_samples:
        raise InvalidRequestError("the WAV file has no samples")
    return WavHeader(rate, channels, tag, width, start, num_samples)


def _floats(raw: bytes, header: WavHeader) -> Samples:
    samples = np.frombuffer(raw, dtype=f"<f{header.width}")
    if not np.isfinite(samples).all():
        raise InvalidRequestError("the WAV file has samples that are no finite numbers; send it again")
    return np.asarray(samples.clip(-1, 1), dtype=np.float32)


def _scaled(raw: bytes, width: int) -> Samples:
    """Of integers. Those of one byte have no sign."""
    if width == 1:
        return np.asarray((np.frombuffer(raw, dtype=np.uint8).astype(np.float32) - 128) / 128, dtype=np.float32)
    if width == 3:
        padded = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
        padded[:, 1:] = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3)
        raw, width = padded.tobytes(), 4
    scale = np.float32(2.0 ** (1 - 8 * width))
    return np.frombuffer(raw, dtype=f"<i{width}").astype(np.float32) * scale
