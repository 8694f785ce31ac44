"""How InternVL reads an image: in a grid of squares with nearly its ratio, and the whole of it in one more square."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from PIL.Image import Image

from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.pictures import check_max_tokens, check_ratio, resampling_of, side_of, tiles
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

TEXTS = ("<img>", "</img>")
TILE_TOKENS = 256
MAX_TILES = 12
MIN_COVERED = 0.5  # of a larger grid of the same ratio, for it to be taken


@dataclass(frozen=True, slots=True)
class InternVLImages(ImageLayout):
    """The numbers of preprocessor_config.json and config.json."""

    side: int  # pixels of a square
    patch: int
    tile_tokens: int
    min_tiles: int
    max_tiles: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> InternVLImages:
        preprocessor = files.preprocessor
        patch = files.vision.get("patch_size", 14)
        tile_tokens = cls.tile_tokens_of(files)
        most = int(preprocessor.get("max_patches") or MAX_TILES)
        check_max_tokens(tile_tokens, max_tokens)
        if max_tokens is not None:
            most = max(min(most, max_tokens // tile_tokens - 1), 1)
        return cls(
            side_of(preprocessor.get("size"), "height"),
            int(patch[0] if isinstance(patch, list) else patch),
            tile_tokens,
            min(int(preprocessor.get("min_patches") or 1), most),
            most,
            *files.colors(),
            resampling_of(preprocessor),
        )

    @classmethod
    def tile_tokens_of(cls, files: ImageFiles) -> int:
        return int(files.hf.get("image_seq_length", TILE_TOKENS))

    def runs(self, count: int) -> tuple[int, ...]:
        """``count``: squares."""
        return (count * self.tile_tokens,)

    def texts(self, count: int) -> tuple[str, ...]:
        return TEXTS

    @property
    def largest(self) -> ImageSize:
        return self._size(1, self.max_tiles)

    @property
    def patches_per_token(self) -> int:
        return -(-((self.side // self.patch) ** 2) // self.tile_tokens)

    def _size(self, rows: int, columns: int) -> ImageSize:
        count = rows * columns + (rows * columns > 1)
        return ImageSize(rows * self.side, columns * self.side, self.runs(count), texts=self.texts(count))

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        return self._size(1, 1) if is_low else self._size(*self.best_grid(header.height, header.width))

    def best_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns. Of those with the nearest ratio, the largest that the image covers well."""
        best, best_difference = (1, 1), float("inf")
        for rows, columns in self.grids():
            difference = abs(width / height - columns / rows)
            covers = width * height > MIN_COVERED * self.side**2 * rows * columns
            if difference < best_difference or (difference == best_difference and covers):
                best, best_difference = (rows, columns), difference
        return best

    def grids(self) -> Iterator[tuple[int, int]]:
        """The smallest first, of one size those with fewer columns."""
        sides = range(1, self.max_tiles + 1)
        grids = [(rows, columns) for columns in sides for rows in sides]
        fitting = (grid for grid in grids if self.min_tiles <= grid[0] * grid[1] <= self.max_tiles)
        return iter(sorted(fitting, key=lambda grid: grid[0] * grid[1]))

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        """The whole image last."""
        squares = list(tiles(resized(image, height, width, self.resample), self.side))
        if len(squares) == 1:
            return squares
        return [*squares, resized(image, self.side, self.side, self.resample)]
