"""How Gemma 3 reads an image: as a square, and crops of a long one too, if its files want it (pan and scan)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from PIL.Image import Image

from lightserve.media.image_file import Pixels, resized
from lightserve.media.layouts.square import SquareImages
from lightserve.media.pictures import check_max_tokens, check_ratio, resampling_of, side_of
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles

BILINEAR = 2  # PIL.Image.Resampling
TOKENS = 256
START, END = "\n\n<start_of_image>", "<end_of_image>\n\n"
WHOLE, PARTS = "Here is the original image ", " and here are some crops to help you see better "
# of pan and scan, if the files do not say
MIN_CROP, MAX_CROPS, MIN_RATIO = 256, 4, 1.2


@dataclass(frozen=True, slots=True)
class Crops:
    least: int  # pixels of a side
    most: int  # of an image
    ratio: float  # of its sides, from which on it has some

    def of(self, header: ImageHeader) -> int:
        """How many stand beside one another along the longer side; 0: only the whole image is shown."""
        longer, shorter = max(header.width, header.height), min(header.width, header.height)
        if longer / shorter < self.ratio:
            return 0
        count = min(longer // self.least, math.floor(longer / shorter + 0.5))
        count = min(max(count, 2), self.most)
        return 0 if min(math.ceil(longer / count), shorter) < self.least else count


@dataclass(frozen=True, slots=True)
class Gemma3Images(SquareImages):
    """The chat template writes the token before an image; the other tokens are added to the text."""

    crops: Crops | None = None  # None: the files want none

    marker = "<start_of_image>"

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> Gemma3Images:
        given = files.preprocessor
        num_tokens = int(files.hf.get("mm_tokens_per_image", TOKENS))
        check_max_tokens(num_tokens, max_tokens)
        side, resample = side_of(given.get("size"), "height"), resampling_of(given, BILINEAR)
        patch, crops = int(files.vision.get("patch_size", 16)), _crops_of(files)
        if crops is not None and max_tokens is not None and num_tokens * (1 + crops.most) > max_tokens:
            most = max_tokens // num_tokens - 1
            crops = Crops(crops.least, most, crops.ratio) if most > 0 else None
        return cls(side, patch, num_tokens, *files.colors(), resample, texts=(START, END), crops=crops)

    @property
    def largest(self) -> ImageSize:
        return self._size(1, 1 if self.crops is None else self.crops.most)

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        count = 0 if is_low or self.crops is None else self.crops.of(header)
        if not count:
            return self._size(1, 1)
        return self._size(1, count) if header.width >= header.height else self._size(count, 1)

    def _size(self, rows: int, columns: int) -> ImageSize:
        """Of the crops; one is the whole image."""
        count = 0 if rows * columns == 1 else rows * columns
        texts: tuple[str, ...] = (START, END)
        if count:
            texts = (WHOLE + START, END + PARTS + START, *[END + " " + START] * (count - 1), END)
        return ImageSize(self.side * rows, self.side * columns, (self.num_tokens,) * (1 + count), texts=texts)

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        """The whole image first."""
        shown = [image]
        rows, columns = height // self.side, width // self.side
        if rows * columns > 1:
            high, wide = math.ceil(image.height / rows), math.ceil(image.width / columns)
            corners = [(left * wide, top * high) for top, left in product(range(rows), range(columns))]
            shown += [
                image.crop((left, top, min(left + wide, image.width), min(top + high, image.height)))
                for left, top in corners
            ]
        return [resized(each, self.side, self.side, self.resample) for each in shown]


def _crops_of(files: ImageFiles) -> Crops | None:
    given = files.preprocessor
    if not given.get("do_pan_and_scan"):
        return None
    return Crops(
        int(given.get("pan_and_scan_min_crop_size") or MIN_CROP),
        int(given.get("pan_and_scan_max_num_crops") or MAX_CROPS),
        float(given.get("pan_and_scan_min_ratio_to_activate") or MIN_RATIO),
    )
