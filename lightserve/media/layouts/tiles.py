"""How SmolVLM and Idefics3 read an image: as tiles of one size and, if there are several, the whole image as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightserve.errors import ModelFilesError, OptionError
from lightserve.media.layout import ImageLayout
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import PREPROCESSOR, ImageFiles

if TYPE_CHECKING:
    from PIL.Image import Image

    from lightserve.media.image_file import Pixels

LANCZOS = 1  # PIL.Image.Resampling
MAX_SIDE = 4096  # of the resized image, whatever the files say
# defaults of vision_config, which published files leave out
IMAGE_SIZE, PATCH_SIZE, SCALE_FACTOR = 224, 32, 2
FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class TiledImages(ImageLayout):
    longest: int  # side of the resized image
    tile: int  # side of a tile
    tile_tokens: int
    is_split: bool  # False: an image is one tile
    scale: int  # a token is a square of so many patches a side
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> TiledImages:
        given, vision = files.preprocessor, files.vision
        try:
            longest, tile = int(given["size"]["longest_edge"]), int(given["max_image_size"]["longest_edge"])
        except (KeyError, TypeError) as error:
            raise ModelFilesError(
                f"{PREPROCESSOR} has no longest_edge in size and max_image_size; fetch it again"
            ) from error
        scale = int(files.hf.get("scale_factor", SCALE_FACTOR))
        tile_tokens = (tile // int(vision.get("patch_size", PATCH_SIZE)) // scale) ** 2
        while max_tokens is not None and longest > tile and _most_tiles(longest, tile) * tile_tokens > max_tokens:
            longest -= tile
        if max_tokens is not None and max_tokens < tile_tokens:
            raise OptionError(f"max_image_tokens={max_tokens}: a tile of an image has {tile_tokens} tokens; raise it")
        is_split, resample = bool(given.get("do_image_splitting", True)), int(given.get("resample", LANCZOS))
        return cls(longest, tile, tile_tokens, is_split, scale, resample, *files.colors())

    @property
    def patches_per_token(self) -> int:
        return self.scale**2

    @property
    def largest(self) -> ImageSize:
        """A square."""
        return self.size_of(ImageHeader(MAX_SIDE, MAX_SIDE))

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        height, width = self._split_size(*self._resized_size(header.height, header.width))
        rows, columns = height // self.tile, width // self.tile
        if is_low or not self.is_split or rows * columns == 1:
            return ImageSize(self.tile, self.tile, (self.tile_tokens,), texts=(FAKE + WHOLE, FAKE))
        texts = [f"{FAKE}<row_{row + 1}_col_{column + 1}>" for row in range(rows) for column in range(columns)]
        for number in range(columns, len(texts), columns):
            texts[number] = "\n" + texts[number]  # after each row
        runs = (self.tile_tokens,) * (len(texts) + 1)
        return ImageSize(height, width, runs, texts=(*texts, f"\n\n{FAKE}{WHOLE}", FAKE))

    def _split_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width as multiples of a tile's side."""
        ratio, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            return math.ceil(int(width / ratio) / tile) * tile, width
        height = math.ceil(height / tile) * tile
        return height, math.ceil(int(height * ratio) / tile) * tile

    def _resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the first resizing: the longest side is given, and the other is made even."""
        ratio = width / height
        if width >= height:
            height, width = _even(int(self.longest / ratio)), self.longest
        else:
            height, width = self.longest, _even(int(self.longest * ratio))
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > MAX_SIDE:
            height, width = int(MAX_SIDE / ratio), MAX_SIDE
        elif height > width and height > MAX_SIDE:
            height, width = MAX_SIDE, int(MAX_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        """The image is resized several times, as the model was trained."""
        from lightserve.media.image_file import resized, resized_image

        tile = self.tile
        image = resized_image(image, *self._resized_size(image.height, image.width), self.resample)
        if not self.is_split:
            return [resized(image, tile, tile, self.resample)]
        image = resized_image(image, *self._split_size(image.height, image.width), self.resample)
        whole = resized(image, tile, tile, self.resample)
        if (height, width) == (tile, tile):
            return [whole]
        split = resized(image, height, width, self.resample)
        rows, columns = range(0, height, tile), range(0, width, tile)
        return [*(split[row : row + tile, column : column + tile] for row in rows for column in columns), whole]


def _most_tiles(longest: int, tile: int) -> int:
    return math.ceil(longest / tile) ** 2 + 1


def _even(length: int) -> int:
    return length + length % 2
