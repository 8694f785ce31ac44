"""Log-mel features as Whisper's feature extractor computes them, in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightserve.media.audio.wav import Samples
from lightserve.model_files.config.images import ImageFiles

LEAST = 1e-10  # of a power
RANGE = 8.0  # how far the values lie below the largest one, in powers of ten
BREAK_HZ, BREAK_MEL = 1000.0, 15.0  # Slaney's scale is linear below, and logarithmic above
LOG_STEP = 27.0 / np.log(6.4)

Features = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogMel:
    """The numbers of preprocessor_config.json."""

    mels: int
    rate: int  # samples a second
    hop: int  # samples from one frame to the next
    window: int  # samples of a frame
    max_seconds: int  # of a sound; a shorter one is as if silence followed

    @classmethod
    def read(cls, files: ImageFiles) -> LogMel:
        given = files.preprocessor
        return cls(
            mels=int(given.get("feature_size", 80)),
            rate=int(given.get("sampling_rate", 16_000)),
            hop=int(given.get("hop_length", 160)),
            window=int(given.get("n_fft", 400)),
            max_seconds=int(given.get("chunk_length", 30)),
        )

    @property
    def max_frames(self) -> int:
        return self.max_seconds * self.rate // self.hop

    def frames_of(self, num_samples: int) -> int:
        """Of a sound, without the silence behind it."""
        return min(-(-num_samples // self.hop), self.max_frames)

    def features(self, samples: Samples) -> Features:
        """``[frames, mels]``: those of the sound, and the first two of the silence behind it if there is any."""
        frames = min(self.frames_of(len(samples)) + 2, self.max_frames)
        most = self.max_seconds * self.rate
        padded = np.zeros(min(len(samples) + 3 * self.hop + self.window, most), dtype=np.float32)
        padded[: min(len(samples), most)] = samples[:most]
        mirrored = np.pad(padded, self.window // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(mirrored, self.window)[:: self.hop][:frames]
        weights = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        power = np.abs(np.fft.rfft(windows * weights.astype(np.float32))) ** 2
        values = np.log10(np.maximum(power @ mel_filters(self.mels, self.window, self.rate), LEAST))
        return np.asarray((np.maximum(values, values.max() - RANGE) + 4) / 4, dtype=np.float32)


@lru_cache(maxsize=4)
def mel_filters(mels: int, window: int, rate: int) -> npt.NDArray[np.float64]:
    """``[frequencies, mels]``: triangles on Slaney's scale, up to half of the rate, each with the same area."""
    corners = _hertz(np.linspace(0, _mel(rate / 2), mels + 2))
    frequencies = np.linspace(0, rate // 2, 1 + window // 2)
    slopes = corners - frequencies[:, None]
    widths = np.diff(corners)
    triangles = np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]).clip(min=0)
    filters: npt.NDArray[np.float64] = triangles * (2 / (corners[2:] - corners[:-2]))
    return filters


def _mel(hertz: float) -> float:
    if hertz < BREAK_HZ:
        return BREAK_MEL * hertz / BREAK_HZ
    return float(BREAK_MEL + np.log(hertz / BREAK_HZ) * LOG_STEP)


def _hertz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(mel < BREAK_MEL, BREAK_HZ * mel / BREAK_MEL, BREAK_HZ * np.exp((mel - BREAK_MEL) / LOG_STEP))
