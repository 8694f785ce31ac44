"""How the models of the Qwen family read a video: which frames, their size, and their places in time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightserve.errors import InvalidRequestError
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.media.sources import MAX_FRAMES
from lightserve.model_files.config.images import ImageFiles

if TYPE_CHECKING:
    from lightserve.media.video_file import VideoHeader

FPS = 2.0
MIN_FRAMES, DEFAULT_MAX_FRAMES = 4, 768
FRAME_PIXELS = 128 * 28 * 28, 768 * 28 * 28  # of a frame of Qwen2-VL and Qwen2.5-VL, if the files do not say
VIDEO_PIXELS = 128 * 32 * 32, 768 * 32 * 32  # of all frames of Qwen3-VL
TOKENS_PER_SECOND = 4  # what transformers takes if config.json leaves it out; published files say 2


@dataclass(frozen=True, slots=True)
class QwenVideo:
    """The numbers of video_preprocessor_config.json, or transformers' for files without one."""

    min_pixels: int
    max_pixels: int
    counts_all_frames: bool  # in these; then each pair of frames has its time as a text before it (Qwen3-VL)
    side: int  # pixels of a token's side
    frames: int  # of a token
    fps: float  # wanted
    min_frames: int
    max_frames: int
    tokens_per_second: float | None  # how far positions of time lie apart (Qwen2.5-VL); None: one for each pair
    max_tokens: int  # of a video

    @classmethod
    def read(cls, files: ImageFiles, side: int, max_tokens: int) -> QwenVideo:
        given, is_third = files.video, files.model_type not in ("qwen2_vl", "qwen2_5_vl")
        size = given.get("size") or {}
        least, most = VIDEO_PIXELS if is_third else FRAME_PIXELS
        has_seconds = files.model_type == "qwen2_5_vl"
        return cls(
            min_pixels=int(given.get("min_pixels") or size.get("shortest_edge") or least),
            max_pixels=int(given.get("max_pixels") or size.get("longest_edge") or most),
            counts_all_frames=is_third,
            side=side,
            frames=int(files.vision.get("temporal_patch_size", 2)),
            fps=float(given.get("fps") or FPS),
            min_frames=int(given.get("min_frames") or MIN_FRAMES),
            max_frames=min(int(given.get("max_frames") or DEFAULT_MAX_FRAMES), MAX_FRAMES),
            tokens_per_second=_tokens_per_second(files.vision) if has_seconds else None,
            max_tokens=max_tokens,
        )

    def size_of(self, video: VideoHeader, is_sampled: bool) -> ImageSize:
        """``is_sampled``: a client has chosen the frames."""
        if is_sampled and video.num_frames > self.max_frames:
            raise InvalidRequestError(
                f"the video has {video.num_frames} frames; the limit is {self.max_frames}; send fewer"
            )
        numbers = list(range(video.num_frames)) if is_sampled else self._sampled(video)
        height, width = self._resized(video.size, len(numbers))
        rows, columns = height // self.side, width // self.side
        groups = -(-len(numbers) // self.frames)
        if groups * rows * columns > self.max_tokens:
            raise InvalidRequestError(
                f"the video has {groups * rows * columns:,} tokens; the limit is {self.max_tokens:,} (those of the "
                "largest image, see --max_image_tokens); send fewer frames"
            )
        seconds = self.frames * video.num_frames / (video.fps * len(numbers))  # from one group to the next
        return ImageSize(
            height,
            width,
            (rows * columns,) * groups,
            rows,
            columns,
            texts=self._texts(numbers, video.fps) if self.counts_all_frames else (),
            frames=tuple(numbers),
            times=() if self.counts_all_frames else self._times(groups, seconds),
        )

    def _sampled(self, video: VideoHeader) -> list[int]:
        """As the video processors of transformers choose them, with ``do_sample_frames``."""
        total = video.num_frames
        wanted = total / video.fps * self.fps
        if self.counts_all_frames:
            count = min(max(int(wanted), self.min_frames), self.max_frames, total)
            return [round(number * (total - 1) / max(count - 1, 1)) for number in range(count)]
        most = min(self.max_frames, total) // self.frames * self.frames
        count = int(min(max(wanted, self.min_frames), most, total)) // self.frames * self.frames
        return [int(number * total / count) for number in range(count)] if count else list(range(total))

    def _resized(self, size: ImageHeader, count: int) -> tuple[int, int]:
        """Height and width of all frames."""
        height, width, side = size.height, size.width, self.side
        if max(height, width) > 200 * min(height, width):
            raise InvalidRequestError(
                f"the video has {width} x {height} pixels; one side is more than 200 times the other; crop it"
            )
        frames = 1.0
        if self.counts_all_frames:
            if min(height, width) < side:
                scale = max(side / height, side / width)
                height, width = int(height * scale), int(width * scale)
            frames = round(count / self.frames) * self.frames or self.frames
        most = self._most_pixels(count)
        rounded = round(height / side) * side, round(width / side) * side
        pixels = height * width * (count if self.counts_all_frames else 1)
        if frames * rounded[0] * rounded[1] > most:
            shrink = math.sqrt(pixels / most)
            return max(side, int(height / shrink / side) * side), max(side, int(width / shrink / side) * side)
        if frames * rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / pixels)
            return math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        return rounded

    def _most_pixels(self, count: int) -> int:
        """Of a frame, or of all; the tokens of a video are limited too."""
        of_tokens = self.max_tokens * self.side**2 * self.frames
        if self.counts_all_frames:
            return min(self.max_pixels, of_tokens)
        return max(min(self.max_pixels, of_tokens // max(count, self.frames)), self.min_pixels)

    def _times(self, groups: int, seconds: float) -> tuple[int, ...]:
        step = 1.0 if self.tokens_per_second is None else self.tokens_per_second * seconds
        return tuple(int(number * step) for number in range(groups))

    def _texts(self, numbers: Sequence[int], fps: float) -> tuple[str, ...]:
        """Before each group of frames: the mean of the times of the first and the last one."""
        last = numbers[-1]
        padded = [*numbers, *[last] * (-len(numbers) % self.frames)]
        firsts, lasts = padded[:: self.frames], padded[self.frames - 1 :: self.frames]
        times = [(begin / fps + end / fps) / 2 for begin, end in zip(firsts, lasts, strict=True)]
        return tuple(f"<{time:.1f} seconds>" for time in times)


def _tokens_per_second(vision: Mapping[str, Any]) -> float:
    return float(vision.get("tokens_per_second") or TOKENS_PER_SECOND)
