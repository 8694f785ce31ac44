"""How GLM-4.1V, 4.5V and 4.6V read an image: as the Qwen family does, but limits of pixels are those of two frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.qwen import QwenImages
from lightserve.media.sizes import ImageHeader, ImageSize, PixelLimits
from lightserve.model_files.config.images import PREPROCESSOR, ImageFiles

PATCH = 14


class Glm4vImages(QwenImages):
    kinds = ("image",)

    @classmethod
    def read(cls, files: ImageFiles, max_tokens: int | None) -> Glm4vImages:
        size = files.preprocessor.get("size") or {}
        least, most = size.get("shortest_edge"), size.get("longest_edge")
        if not least or not most:
            raise ModelFilesError(f"{PREPROCESSOR} has no shortest_edge and longest_edge in size; fetch it again")
        if not _has_axes(files.hf):
            raise ModelFilesError("config.json: rope_parameters has no mrope_section; fetch it again")
        patch, merge = int(files.vision.get("patch_size", PATCH)), int(files.vision.get("spatial_merge_size", 2))
        frames = int(files.vision.get("temporal_patch_size", 2))  # an image is all of them
        most = int(most) // frames
        if max_tokens is not None:
            most = min(most, max_tokens * (patch * merge) ** 2)
        return cls(-(-int(least) // frames), most, patch, merge, *files.colors())

    def size_of(self, header: ImageHeader, is_low: bool = False) -> ImageSize:
        height, width = header.height, header.width
        if min(height, width) < self.side:
            scale = max(self.side / height, self.side / width)
            height, width = int(height * scale), int(width * scale)
        return super().size_of(ImageHeader(width, height), is_low)

    def within(self, limits: PixelLimits) -> ImageLayout:
        """Its limits have other names."""
        return ImageLayout.within(self, limits)


def _has_axes(hf: Mapping[str, Any]) -> bool:
    tables = (hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {})
    return any("mrope_section" in table for table in tables)
