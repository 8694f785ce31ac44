"""How Llama 4 reads an image: on a canvas of squares, with margins below and on the right, and then as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from PIL.Image import Image

from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.pictures import check_max_tokens, check_ratio, resampling_of, side_of, tiles
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

BILINEAR = 2  # PIL.Image.Resampling
MAX_TILES = 16  # if the files do not say
WHOLE, START, END = "<|image|>", "<|image_start|>", "<|image_end|>"
TILE_END, ROW_END = "<|tile_x_separator|>", "<|tile_y_separator|>"
Size = tuple[int, int]  # pixels, or squares: height and width


@dataclass(frozen=True, slots=True)
class Llama4Images(ImageLayout):
    """The numbers of preprocessor_config.json and config.json. The chat template writes ``WHOLE`` for an image."""

    side: int  # pixels of a square
    patch: int
    tile_tokens: int
    max_tiles: int
    enlarges: bool  # small images: they get the largest canvas
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    marker = WHOLE

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> Llama4Images:
        given, vision = files.preprocessor, files.vision
        side, patch = side_of(given.get("size"), "height"), int(vision.get("patch_size", 14))
        tile_tokens = round((side // patch) ** 2 * float(vision.get("pixel_shuffle_ratio", 0.5)) ** 2)
        check_max_tokens(tile_tokens, max_tokens)
        most = int(given.get("max_patches") or MAX_TILES)
        if max_tokens is not None:
            most = max(min(most, max_tokens // tile_tokens - 1), 1)
        enlarges = bool(given.get("resize_to_max_canvas"))
        return cls(side, patch, tile_tokens, most, enlarges, *files.colors(), resampling_of(given, BILINEAR))

    @property
    def largest(self) -> ImageSize:
        return self._size((self.max_tiles, 1))

    @property
    def patches_per_token(self) -> int:
        return -(-((self.side // self.patch) ** 2) // self.tile_tokens)

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        return self._size((1, 1) if is_low else self._canvas(header.height, header.width))

    def _size(self, canvas: Size) -> ImageSize:
        """Of so many squares."""
        (rows, columns), texts = canvas, [START]
        if rows * columns > 1:
            row = [*[TILE_END] * (columns - 1), ROW_END]
            texts = [START, *row * rows]
        texts[-1] += WHOLE
        runs = (self.tile_tokens,) * len(texts)
        return ImageSize(rows * self.side, columns * self.side, runs, texts=(*texts, END))

    def _canvas(self, height: int, width: int) -> Size:
        """On which the image is enlarged least, or else made smaller least; of these the smallest.

        In float32, as the processor of transformers compares them.
        """
        sides = range(1, self.max_tiles + 1)
        canvases = np.array([canvas for canvas in product(sides, sides) if math.prod(canvas) <= self.max_tiles])
        scales = (canvases * self.side / np.array((height, width))).astype(np.float32).min(axis=1)
        enlarging = scales[scales >= 1]
        scale = enlarging.min() if len(enlarging) and not self.enlarges else scales.max()
        rows, columns = min(canvases[scales == scale].tolist(), key=math.prod)
        return rows, columns

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        """The whole image last."""
        out = np.zeros((height, width, 3), dtype=np.uint8)
        shown = self._shown((image.height, image.width), (height, width))
        out[: shown[0], : shown[1]] = resized(image, *shown, self.resample)
        squares = list(tiles(out, self.side))
        return squares if len(squares) == 1 else [*squares, resized(image, self.side, self.side, self.resample)]

    def _shown(self, size: Size, canvas: Size) -> Size:
        """The size of the image on a canvas, without margins."""
        if not self.enlarges:  # but up to a square
            canvas = min(max(size[0], self.side), canvas[0]), min(max(size[1], self.side), canvas[1])
        scale_height, scale_width = canvas[0] / size[0], canvas[1] / size[1]
        if scale_width < scale_height:
            return max(min(math.floor(size[0] * scale_width), canvas[0]), 1), canvas[1]
        return canvas[0], max(min(math.floor(size[1] * scale_height), canvas[1]), 1)
