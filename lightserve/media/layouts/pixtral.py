"""How Pixtral and Mistral 3 read an image: in its own ratio, with a token at the end of each row of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL.Image import Image

from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.pictures import check_max_tokens, check_ratio, resampling_of, side_of
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

ROW_END, IMAGE_END = "[IMG_BREAK]", "[IMG_END]"
LOW_DETAIL_SIDE = 512  # pixels: OpenAI's ``detail: low``
LONGEST_EDGE = 1024


@dataclass(frozen=True, slots=True)
class PixtralImages(ImageLayout):
    """The numbers of preprocessor_config.json."""

    longest_edge: int
    patch: int
    merge: int  # a token is a square of so many patches a side
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> PixtralImages:
        longest = side_of(files.preprocessor.get("size", LONGEST_EDGE), "longest_edge", "height")
        patch, merge = int(files.vision.get("patch_size", 16)), int(files.hf.get("spatial_merge_size") or 1)
        if files.model_type != "mistral3":
            merge = 1
        check_max_tokens(1, max_tokens)
        if max_tokens is not None:
            longest = min(longest, math.isqrt(max_tokens) * patch * merge)
        return cls(longest, patch, merge, *files.colors(), resampling_of(files.preprocessor))

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def largest(self) -> ImageSize:
        return self.size_of(ImageHeader(self.longest_edge, self.longest_edge))

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        longest = min(self.longest_edge, LOW_DETAIL_SIDE) if is_low else self.longest_edge
        height, width = header.height, header.width
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = max(math.floor(height / ratio), 1), max(math.floor(width / ratio), 1)
        rows, columns = (height - 1) // self.side + 1, (width - 1) // self.side + 1
        texts = ("", *[ROW_END] * (rows - 1), IMAGE_END)
        return ImageSize(rows * self.side, columns * self.side, (columns,) * rows, texts=texts)

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        return [resized(image, height, width, self.resample)]
