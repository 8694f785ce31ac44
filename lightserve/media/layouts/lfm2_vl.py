"""How LFM2-VL reads an image: in nearly its own ratio, or a large one in a grid of squares, and then as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image

from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.pictures import check_max_tokens, check_ratio, resampling_of, tiles
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

BILINEAR = 2  # PIL.Image.Resampling
START, END, WHOLE = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
# if the files do not say
DEFAULTS: dict[str, Any] = {
    "do_image_splitting": True,
    "use_thumbnail": True,
    "downsample_factor": 2,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "min_tiles": 2,
    "max_tiles": 10,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "max_pixels_tolerance": 2.0,
}
MIN_COVERED = 0.5  # of a larger grid of the same ratio, for it to be taken
Size = tuple[int, int]  # height and width


@dataclass(frozen=True, slots=True)
class Lfm2VlImages(ImageLayout):
    """The numbers of preprocessor_config.json."""

    patch: int
    merge: int  # a token is a square of so many patches a side
    tile: int  # pixels of a square of the grid
    min_tiles: int
    max_tiles: int  # 1: no image has a grid
    shows_whole: bool  # behind a grid
    least: int  # tokens of an image without a grid, or of the whole behind one
    most: int
    tolerance: float  # an image with so many times more pixels than ``most`` tokens has a grid
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> Lfm2VlImages:
        given = {**DEFAULTS, **{name: value for name, value in files.preprocessor.items() if value is not None}}
        check_max_tokens(1, max_tokens)
        patch, merge, tile = int(given["encoder_patch_size"]), int(given["downsample_factor"]), int(given["tile_size"])
        most, max_tiles = int(given["max_image_tokens"]), int(given["max_tiles"]) if given["do_image_splitting"] else 1
        if max_tokens is not None:
            most = min(most, max_tokens)
            max_tiles = min(max_tiles, (max_tokens - most) // (tile // patch // merge) ** 2)
        return cls(
            patch,
            merge,
            tile,
            max(int(given["min_tiles"]), 2),
            max_tiles,
            bool(given["use_thumbnail"]),
            min(int(given["min_image_tokens"]), most),
            most,
            float(given["max_pixels_tolerance"]),
            *files.colors(),
            resampling_of(files.preprocessor, BILINEAR),
        )

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def has_grids(self) -> bool:
        return self.max_tiles >= self.min_tiles

    @property
    def largest(self) -> ImageSize:
        if not self.has_grids:
            return self._size((self.most * self.side, self.side))
        return self._size((self.most * self.side, self.side), (1, self.max_tiles))

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        whole = self._whole(header.height, header.width)
        if is_low or not self._is_large(header.height, header.width):
            return self._size(whole)
        return self._size(whole, self._best_grid(header.height, header.width))

    def _size(self, whole: Size, grid: Size = (1, 1)) -> ImageSize:
        """``grid``: rows and columns."""
        tokens = whole[0] * whole[1] // self.side**2
        if grid == (1, 1):
            return ImageSize(*whole, (tokens,), texts=(START, END))
        rows, columns = grid
        texts = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        runs = [(self.tile // self.side) ** 2] * len(texts)
        texts[0] = START + texts[0]
        if self.shows_whole:
            texts, runs = [*texts, WHOLE], [*runs, tokens]
        return ImageSize(rows * self.tile, columns * self.tile, tuple(runs), texts=(*texts, END))

    def _is_large(self, height: int, width: int) -> bool:
        rounded = (max(self.patch, round(length / self.side) * self.side) for length in (height, width))
        return self.has_grids and math.prod(rounded) > self.most * self.side**2 * self.tolerance

    def _whole(self, height: int, width: int) -> Size:
        """The size of an image without a grid: both sides multiples of a token's."""
        side, most, least = self.side, self.most * self.side**2, self.least * self.side**2
        rounded = max(side, round(height / side) * side), max(side, round(width / side) * side)
        if rounded[0] * rounded[1] > most:
            shrink = math.sqrt(height * width / most)
            rounded = max(side, int(height / shrink / side) * side), max(side, int(width / shrink / side) * side)
        elif rounded[0] * rounded[1] < least:
            grow = math.sqrt(least / (height * width))
            rounded = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        # the shorter side is at least one token, and then the longer one has only as many as are left
        height, width = (min(length, most // side**2 * side) for length in rounded)
        return min(height, most // width // side * side), min(width, most // height // side * side)

    def _best_grid(self, height: int, width: int) -> Size:
        """Of those with the nearest ratio, the largest that the image covers well."""
        best, best_difference = (1, 1), float("inf")
        for columns, rows in self._grids():
            difference = abs(width / height - columns / rows)
            covers = width * height > MIN_COVERED * self.tile**2 * rows * columns
            if difference < best_difference or (difference == best_difference and covers):
                best, best_difference = (rows, columns), difference
        return best

    def _grids(self) -> Iterator[Size]:
        """Columns and rows; the smallest first."""
        sides = range(1, self.max_tiles + 1)
        grids = {(columns, rows) for columns in sides for rows in sides}
        fitting = (grid for grid in grids if self.min_tiles <= grid[0] * grid[1] <= self.max_tiles)
        return iter(sorted(fitting, key=lambda grid: (grid[0] * grid[1], grid)))

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        """The whole image last."""
        whole = self._whole(image.height, image.width)
        if (height, width) == whole:
            return [resized(image, *whole, self.resample)]
        squares = list(tiles(resized(image, height, width, self.resample), self.tile))
        return [*squares, resized(image, *whole, self.resample)] if self.shows_whole else squares

    def blank(self) -> list[Pixels]:
        """The whole of no real image has so many tokens beside a grid of so many squares."""
        whole = np.zeros((self.most * self.side, self.side, 3), dtype=np.uint8)
        if not self.has_grids:
            return [whole]
        squares = [np.zeros((self.tile, self.tile, 3), dtype=np.uint8) for _ in range(self.max_tiles)]
        return [*squares, whole] if self.shows_whole else squares
