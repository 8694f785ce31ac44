"""How LLaVA-Next and LLaVA-OneVision read an image: the whole of it in one square, and its parts in a grid of squares.

The grid is one of a list. The image keeps its ratio inside of it, and the features of the margins are left out; a
learned embedding stands behind each row of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image

from lightserve.errors import ModelFilesError
from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.pictures import (
    check_max_tokens,
    check_ratio,
    padded,
    padded_to_square,
    resampling_of,
    side_of,
    tiles,
)
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

MAX_TILES = "anyres_max_"  # of vision_aspect_ratio, before a number
MUCH_LARGER = 1.1  # features of more tiles than that number are made fewer beyond this ratio
DIGITS = 7  # to which transformers rounds before it cuts off the fraction
WHOLE = (0, 0)  # in place of the size of an image of which only the whole is shown, in one square
Canvas = tuple[int, int]  # pixels: height and width


@dataclass(frozen=True, slots=True)
class Grid:
    """The features of the squares of an image, and which of them are taken."""

    tile_rows: int
    tile_columns: int
    top: int  # features in the upper margin, and as many in the lower one
    left: int
    rows: int  # of features, without margins
    columns: int
    out_rows: int  # after scaling
    out_columns: int

    @property
    def tokens(self) -> int:
        """With that at the end of each row."""
        return self.out_rows * (self.out_columns + 1)


@dataclass(frozen=True, slots=True)
class AnyresImages(ImageLayout):
    """The numbers of preprocessor_config.json and config.json."""

    side: int  # pixels of a square
    patch: int
    canvases: tuple[Canvas, ...]
    max_tiles: int | None  # so many squares' features at most, about; None: any number
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int
    # OneVision: of several images of a request, only the wholes are shown, with margins that make them squares
    shows_wholes_of_several: bool

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> AnyresImages:
        preprocessor, is_onevision = files.preprocessor, files.model_type == "llava_onevision"
        side = side_of(preprocessor.get("size"), "shortest_edge", "height")
        patch = int(files.vision.get("patch_size", 14))
        given = preprocessor.get("image_grid_pinpoints") or files.hf.get("image_grid_pinpoints")
        if not given:
            raise ModelFilesError("preprocessor_config.json has no image_grid_pinpoints; fetch it again")
        aspect = files.hf.get("vision_aspect_ratio") or f"{MAX_TILES}9"
        max_tiles = int(str(aspect).removeprefix(MAX_TILES)) if is_onevision else None
        canvases = tuple((int(height), int(width)) for height, width in given)
        layout = cls(side, patch, canvases, max_tiles, *files.colors(), resampling_of(preprocessor), is_onevision)
        return layout if max_tokens is None else layout._limited(max_tokens)

    def _limited(self, max_tokens: int) -> AnyresImages:
        check_max_tokens(self._whole.tokens, max_tokens)
        few = tuple(canvas for canvas in self.canvases if self._most_tokens(canvas) <= max_tokens)
        return replace(self, canvases=few)

    @property
    def features(self) -> int:
        """Of a side of a square."""
        return self.side // self.patch

    @property
    def _whole(self) -> ImageSize:
        return ImageSize(*WHOLE, (self.features**2 + 1,))

    def _most_tokens(self, canvas: Canvas) -> int:
        """Of an image that fills it."""
        return self.features**2 + self._grid(*canvas, canvas).tokens

    @property
    def largest(self) -> ImageSize:
        if not self.canvases:
            return ImageSize(self.side, self.side, self._whole.runs)
        canvas = max(self.canvases, key=self._most_tokens)
        return ImageSize(*canvas, (self._most_tokens(canvas),))

    @property
    def patches_per_token(self) -> int:
        """At most: features of margins are computed too."""
        return 1 if self.max_tiles is None else -(-len(self.canvases) // self.max_tiles)

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        if is_low or not self.canvases:
            return self._whole
        grid = self.grid_of(header.height, header.width)
        return ImageSize(header.height, header.width, (self.features**2 + grid.tokens,))

    def grid_of(self, height: int, width: int) -> Grid:
        return self._grid(height, width, best_canvas(height, width, self.canvases))

    def _grid(self, height: int, width: int, canvas: Canvas) -> Grid:
        tile_rows, tile_columns = canvas[0] // self.side, canvas[1] // self.side
        rows, columns = tile_rows * self.features, tile_columns * self.features
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), DIGITS))) // 2
        else:
            left = (columns - int(round(width * (rows / height), DIGITS))) // 2
        rows, columns = rows - 2 * top, columns - 2 * left
        out_rows, out_columns = rows, columns
        if self.max_tiles is not None:
            ratio = math.sqrt(rows * columns / (self.max_tiles * self.features**2))
            if ratio > MUCH_LARGER:
                out_rows, out_columns = int(rows // ratio), int(columns // ratio)
        return Grid(tile_rows, tile_columns, top, left, rows, columns, out_rows, out_columns)

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        """The whole image first."""
        if (height, width) == WHOLE or not self.canvases:
            whole = padded_to_square(image, self.mean) if self.shows_wholes_of_several else image
            return [resized(whole, self.side, self.side, self.resample)]
        canvas = best_canvas(height, width, self.canvases)
        inside = resized(image, *_inside(height, width, canvas), self.resample)
        squares = tiles(padded(inside, *canvas), self.side)
        return [resized(image, self.side, self.side, self.resample), *squares]


def best_canvas(height: int, width: int, canvases: Sequence[Canvas]) -> Canvas:
    """The one on which most pixels of the image are shown, of these the one with the smallest margins."""
    return max(canvases, key=lambda canvas: _usefulness(height, width, canvas))


def _usefulness(height: int, width: int, canvas: Canvas) -> tuple[int, int]:
    scale = min(canvas[1] / width, canvas[0] / height)
    shown = min(int(width * scale) * int(height * scale), width * height)
    return shown, shown - canvas[0] * canvas[1]


def _inside(height: int, width: int, canvas: Canvas) -> Canvas:
    """The size of the image on a canvas."""
    scale_height, scale_width = canvas[0] / height, canvas[1] / width
    if scale_width < scale_height:
        return min(math.ceil(height * scale_width), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * scale_height), canvas[1])
