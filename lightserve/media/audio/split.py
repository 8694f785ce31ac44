"""Divides a long sound where it is quiet, into parts that a model hears at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lightserve.media.audio.wav import WavHeader, file_of, raw_samples, read_header, samples_of

SEARCHED_S = 5.0  # at the end of a part, for its quietest place
QUIET_S = 0.1  # how long that is; no part is shorter


def parts_of(data: bytes, max_seconds: float) -> list[bytes]:
    """WAV files. Together they have the samples of ``data``."""
    header = read_header(data)
    most, least = int(max_seconds * header.rate), max(int(QUIET_S * header.rate), 1)
    borders = [0]
    while header.num_samples - borders[-1] > most:
        last = min(borders[-1] + most, header.num_samples - least)
        first = max(last - int(SEARCHED_S * header.rate), borders[-1] + least, last - most // 2)
        borders.append(_quietest(data, header, first, last, least))
    borders.append(header.num_samples)
    if len(borders) == 2:
        return [data]
    return [file_of(raw_samples(data, header, begin, end), header) for begin, end in pairwise(borders)]


def _quietest(data: bytes, header: WavHeader, first: int, last: int, length: int) -> int:
    """The middle of the ``length`` samples with the least energy in this range."""
    samples = samples_of(raw_samples(data, header, first, last), header).astype(np.float64)
    sums = np.concatenate(([0.0], np.cumsum(samples**2)))
    if len(sums) <= length:
        return last
    return first + int(np.argmin(sums[length:] - sums[:-length])) + length // 2
