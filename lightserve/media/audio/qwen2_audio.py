"""How Qwen2-Audio hears a sound: log-mel features of up to 30 seconds, and a token for each 40 ms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightserve.errors import InvalidRequestError
from lightserve.media.audio.log_mel import Features, LogMel
from lightserve.media.audio.resample import num_resampled, resampled
from lightserve.media.audio.wav import Samples, WavHeader, decode
from lightserve.media.layout import ImageLayout
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

LEAST_FRAMES = 3  # which have a token


@dataclass(frozen=True, slots=True)
class Qwen2AudioSounds(ImageLayout):
    log_mel: LogMel

    kinds = ("audio",)

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> Qwen2AudioSounds:
        """``max_tokens``: of images, which it has none of."""
        return cls(LogMel.read(files))

    @property
    def largest(self) -> ImageSize:
        return self._size(self.log_mel.max_frames)

    @property
    def patches_per_token(self) -> int:
        return 2

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        raise InvalidRequestError("this model reads no images")

    def sound_size_of(self, header: WavHeader) -> ImageSize:
        if header.seconds > self.log_mel.max_seconds:
            raise InvalidRequestError(
                f"it has {header.seconds:.1f} s; the model hears {self.log_mel.max_seconds} s at once; send it in parts"
            )
        frames = self.log_mel.frames_of(num_resampled(header.num_samples, header.rate, self.log_mel.rate))
        if frames < LEAST_FRAMES:
            raise InvalidRequestError(f"it has {header.seconds:.3f} s, which is too short to have a token")
        return self._size(frames)

    def _size(self, frames: int) -> ImageSize:
        tokens = (frames + 1) // 4  # two steps that halve the number: the first rounds up, the second down
        seconds = frames * self.log_mel.hop / self.log_mel.rate
        return ImageSize(frames, self.log_mel.mels, (tokens,), seconds=seconds)

    def opened(self, data: bytes, frames: Sequence[int]) -> Iterator[Samples]:
        samples, rate = decode(data)
        yield resampled(samples, rate, self.log_mel.rate)

    def pixels(self, image: Samples, height: int, width: int) -> list[Features]:
        """The features of a sound: see ``LogMel.features``."""
        return [self.log_mel.features(image)]

    def blank(self) -> list[Features]:
        return [np.zeros((self.log_mel.max_frames, self.log_mel.mels), dtype=np.float32)]
