"""How Gemma 4 reads an image: in nearly its own ratio, with as many tokens as its files allow, or a few less."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL.Image import Image

from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.pictures import check_max_tokens, check_ratio, resampling_of
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

START, END = "<|image>", "<image|>"
# if the files do not say
PATCH, POOLED, TOKENS = 16, 3, 280
LOW_TOKENS = 70  # OpenAI's ``detail: low``: the smallest number that the model was trained with


@dataclass(frozen=True, slots=True)
class Gemma4Images(ImageLayout):
    """The numbers of preprocessor_config.json."""

    patch: int
    pooled: int  # a token is a square of so many patches a side
    most: int  # tokens
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> Gemma4Images:
        given = files.preprocessor
        most = int(given.get("max_soft_tokens") or TOKENS)
        check_max_tokens(1, max_tokens)
        colors = files.colors() if given.get("do_normalize") else ((0.0,) * 3, (1.0,) * 3)
        return cls(
            int(given.get("patch_size") or PATCH),
            int(given.get("pooling_kernel_size") or POOLED),
            most if max_tokens is None else min(most, max_tokens),
            *colors,
            resampling_of(given),
        )

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.pooled

    @property
    def largest(self) -> ImageSize:
        return self._size(self.most, 1)

    @property
    def patches_per_token(self) -> int:
        return self.pooled**2

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        """Small images are enlarged."""
        check_ratio(header)
        most = min(self.most, LOW_TOKENS) if is_low else self.most
        factor = math.sqrt(most * self.side**2 / (header.height * header.width))
        rows = math.floor(factor * header.height / self.side)
        columns = math.floor(factor * header.width / self.side)
        if rows == 0:
            rows, columns = 1, max(min(header.width // header.height, most), 1)
        elif columns == 0:
            rows, columns = max(min(header.height // header.width, most), 1), 1
        return self._size(rows, columns)

    def _size(self, rows: int, columns: int) -> ImageSize:
        return ImageSize(rows * self.side, columns * self.side, (rows * columns,), texts=(START, END))

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        return [resized(image, height, width, self.resample)]
