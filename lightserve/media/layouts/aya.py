"""How Aya Vision and Cohere's Command A Vision read an image: as squares and the whole, each with a text of its own."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.media.layouts.internvl import InternVLImages
from lightserve.model_files.config.images import ImageFiles

START, END, BREAK, WHOLE = "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL"
SIDE, PATCH = 224, 16  # of SigLIP, if the files do not say


@dataclass(frozen=True, slots=True)
class AyaImages(InternVLImages):
    marker = "<image>"

    @classmethod
    def tile_tokens_of(cls, files: ImageFiles) -> int:
        patches: int = files.vision.get("image_size", SIDE) // files.vision.get("patch_size", PATCH)
        side: int = patches // files.hf.get("downsample_factor", 2)
        return side**2

    def runs(self, count: int) -> tuple[int, ...]:
        return (self.tile_tokens,) * count

    def texts(self, count: int) -> tuple[str, ...]:
        first, *others = [*(f"TILE_{number}" for number in range(1, count)), WHOLE]
        return (START + first, *others, END)


@dataclass(frozen=True, slots=True)
class CohereImages(AyaImages):
    marker = None  # type: ignore[assignment]  # the texts of its chat template are those of its tokens

    def texts(self, count: int) -> tuple[str, ...]:
        return (START, *[BREAK] * (count - 1), BREAK + END)

    def best_grid(self, height: int, width: int) -> tuple[int, int]:
        """The one to which the image grows least, or if it must shrink, shrinks least."""
        scales = {grid: min(grid[0] * self.side / height, grid[1] * self.side / width) for grid in self.grids()}
        larger = {grid: scale for grid, scale in scales.items() if scale >= 1}
        if larger:
            return min(larger, key=larger.__getitem__)
        return max(scales, key=scales.__getitem__)
