"""Changes how many samples a second has, by a windowed sinc: the default of torchaudio.functional.resample."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lightserve.media.audio.wav import Samples

ZERO_CROSSINGS = 6  # of the sinc, on each side
ROLLOFF = 0.99  # of the highest frequency that both rates have
BLOCK = 2**13  # samples that are computed at once: each reads up to 300


def num_resampled(num_samples: int, rate: int, wanted: int) -> int:
    """How many samples there are afterwards."""
    return -(-num_samples * wanted // rate)


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    if rate == wanted:
        return samples
    divisor = math.gcd(rate, wanted)
    old, new = rate // divisor, wanted // divisor  # so many samples become so many
    weights, reach = _weights(old, new)
    padded = np.pad(samples, (reach, reach + old + 1))
    out = np.empty(num_resampled(len(samples), rate, wanted), dtype=np.float32)
    taps = np.arange(weights.shape[1])
    for begin in range(0, len(out), BLOCK):
        number = np.arange(begin, min(begin + BLOCK, len(out)), dtype=np.int64)
        windows = padded[(number * old // new)[:, None] + taps]
        out[begin : begin + BLOCK] = np.einsum("nt,nt->n", windows, weights[number % new])
    return out


def _weights(old: int, new: int) -> tuple[npt.NDArray[np.float32], int]:
    """Of the samples around each new one, ``[new, samples]``, and how many of them are before its place."""
    band = min(old, new) * ROLLOFF
    reach = math.ceil(ZERO_CROSSINGS * old / band)
    places = np.arange(new) * old % new / new  # of a new sample behind the old one before it
    distance = (np.arange(-reach, reach + 1) - places[:, None]) * (band / old)
    window = np.cos(distance.clip(-ZERO_CROSSINGS, ZERO_CROSSINGS) * (math.pi / ZERO_CROSSINGS / 2)) ** 2
    return (np.sinc(distance) * window * (band / old)).astype(np.float32), reach
