"""How Kimi K2.5 reads an image: in its own size if that is not too large, with margins below and on the right."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from PIL.Image import Image

from lightserve.errors import ModelFilesError
from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.pictures import MAX_RATIO, check_max_tokens, check_ratio, resampling_of
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import PREPROCESSOR, ImageFiles

PATCH, MERGE, MAX_PATCHES, MAX_SIDE = 14, 2, 16_384, 512  # if the files do not say
LOW_DETAIL_SIDE = 512  # pixels: OpenAI's ``detail: low``
Size = tuple[int, int]  # height and width


@dataclass(frozen=True, slots=True)
class KimiImages(ImageLayout):
    """The numbers of preprocessor_config.json, as published or as transformers saves them."""

    patch: int
    merge: int  # a token is a square of so many patches a side
    max_patches: int  # without those of margins, about
    max_side: int  # in patches
    most: int  # tokens
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> KimiImages:
        given = files.preprocessor.get("media_proc_cfg") or files.preprocessor
        if given.get("fixed_output_tokens") is not None:
            raise ModelFilesError(f"{PREPROCESSOR}: fixed_output_tokens is not supported; leave it out")
        check_max_tokens(1, max_tokens)
        merge = given.get("merge_kernel_size") or given.get("merge_size") or MERGE
        merge = int(merge[0] if isinstance(merge, list) else merge)
        max_patches = int(given.get("in_patch_limit") or given.get("max_patches") or MAX_PATCHES)
        size = given.get("size") or {}
        max_side = int(given.get("patch_limit_on_one_side") or size.get("max_height") or MAX_SIDE)
        most = _most_tokens(max_patches, max_side, merge)
        return cls(
            int(given.get("patch_size") or PATCH),
            merge,
            max_patches,
            max_side,
            most if max_tokens is None else min(most, max_tokens),
            *replace(files, preprocessor=given).colors(),
            resampling_of(given),
        )

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def largest(self) -> ImageSize:
        return self._size((self.most * self.side, self.side))

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        return self._size(self._shown(header.height, header.width, is_low))

    def _size(self, shown: Size) -> ImageSize:
        height, width = (math.ceil(length / self.side) * self.side for length in shown)
        return ImageSize(height, width, (height * width // self.side**2,))

    def _shown(self, height: int, width: int, is_low: bool) -> Size:
        """The size of the image without margins. It never becomes larger."""
        max_patches = min(self.max_patches, (LOW_DETAIL_SIDE // self.patch) ** 2) if is_low else self.max_patches
        longest = self.max_side * self.patch
        patches = max(height // self.patch, 1) * max(width // self.patch, 1)
        scale = min(1.0, math.sqrt(max_patches / patches), longest / height, longest / width)
        shown = min(max(int(height * scale), 1), longest), min(max(int(width * scale), 1), longest)
        while self._size(shown).tokens > self.most:  # of --max_image_tokens
            shrink = math.sqrt(self.most / (self._size(shown).tokens + 1))
            shown = max(int(shown[0] * shrink), 1), max(int(shown[1] * shrink), 1)
        return shown

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        for is_low in (False, True):
            shown = self._shown(image.height, image.width, is_low)
            size = self._size(shown)
            if (size.height, size.width) == (height, width):
                out = np.zeros((height, width, 3), dtype=np.uint8)
                out[: shown[0], : shown[1]] = resized(image, *shown, self.resample)
                return [out]
        raise ValueError(f"an image of {image.width} x {image.height} pixels is not shown as {width} x {height}")

    def blank(self) -> list[Pixels]:
        return [np.zeros((self.largest.height, self.largest.width, 3), dtype=np.uint8)]


def _most_tokens(max_patches: int, max_side: int, merge: int) -> int:
    """A bound: margins are tokens too, and what remains of a patch on a side does not count for ``max_patches``."""
    shortest = max(math.isqrt(max_patches // MAX_RATIO), 1)  # in patches, of an image that is made smaller
    area = max_patches / merge**2 * (1 + 1 / shortest) ** 2
    sides = range(1, math.ceil(max_side / merge) + 1)
    return max(rows * min(len(sides), int(area / max(rows - 1, 1)) + 1) for rows in sides)
