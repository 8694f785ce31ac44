"""Models that see every image as one square of a fixed size: LLaVA 1.5, Gemma 3 and PaliGemma."""

from __future__ import annotations

from dataclasses import dataclass

from PIL.Image import Image

from lightserve.errors import ModelFilesError
from lightserve.media.image_file import Pixels, resized
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.pixtral import PixtralImages
from lightserve.media.pictures import (
    BICUBIC,
    center,
    check_max_tokens,
    check_ratio,
    padded_to_square,
    resampling_of,
    side_of,
)
from lightserve.media.sizes import ImageHeader, ImageSize
from lightserve.model_files.config.images import ImageFiles


@dataclass(frozen=True, slots=True)
class SquareImages(ImageLayout):
    """The numbers of preprocessor_config.json."""

    side: int  # pixels
    patch: int
    num_tokens: int  # of every image
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int
    short_side: int | None = None  # the shorter side becomes so long, and the middle is cut out; None: both are resized
    is_padded: bool = False  # to a square, before it is resized
    texts: tuple[str, ...] = ()

    @property
    def largest(self) -> ImageSize:
        return ImageSize(self.side, self.side, (self.num_tokens,), texts=self.texts)

    @property
    def patches_per_token(self) -> int:
        return -(-((self.side // self.patch) ** 2) // self.num_tokens)

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        check_ratio(header)
        return self.largest

    def pixels(self, image: Image, height: int, width: int) -> list[Pixels]:
        if self.is_padded:
            image = padded_to_square(image, self.mean)
        if self.short_side is None:
            return [resized(image, height, width, self.resample)]
        shorter = min(image.size)
        longer = int(self.short_side * max(image.size) / shorter)
        wide = image.width > image.height
        new_height, new_width = (self.short_side, longer) if wide else (longer, self.short_side)
        return [center(resized(image, new_height, new_width, self.resample), height, width)]


class LlavaImages(SquareImages):
    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> ImageLayout:
        """Pixtral's first files are of this family too."""
        preprocessor = files.preprocessor
        if files.vision.get("model_type") == "pixtral":
            return PixtralImages.read(files, max_tokens)
        crop = preprocessor.get("crop_size") if preprocessor.get("do_center_crop", True) else None
        size = preprocessor.get("size")
        short_side = side_of(size, "shortest_edge", "height")
        side = short_side if crop is None else side_of(crop, "height")
        if side > short_side:
            raise ModelFilesError(f"preprocessor_config.json: crop_size {side} is larger than size {short_side}")
        patch = int(files.vision.get("patch_size", 32))
        num_tokens = (side // patch) ** 2 + class_tokens(files)
        check_max_tokens(num_tokens, max_tokens)
        is_cropped = crop is not None and isinstance(size, dict) and "shortest_edge" in size
        return cls(
            side,
            patch,
            num_tokens,
            *files.colors(),
            resampling_of(preprocessor),
            short_side=short_side if is_cropped else None,
            is_padded=bool(preprocessor.get("do_pad")),
        )


def class_tokens(files: ImageFiles) -> int:
    """How many tokens an image has more than patches: those of CLIP have one, and the first may be left out."""
    has_class = files.vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    return int(has_class) - int(files.hf.get("vision_feature_select_strategy", "default") == "default")


class PaliGemmaImages(SquareImages):
    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> PaliGemmaImages:
        side = side_of(files.preprocessor.get("size"), "height")
        patch = int(files.vision.get("patch_size", 16))
        num_tokens = (side // patch) ** 2
        check_max_tokens(num_tokens, max_tokens)
        return cls(side, patch, num_tokens, *files.colors(), resampling_of(files.preprocessor, BICUBIC))
