"""The vision towers of Qwen2-VL and Qwen2.5-VL: patches, blocks, and a merger of squares of patches to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightserve.common.ops import RotaryAngles
from lightserve.errors import ModelFilesError
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.qwen import QwenImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments, axial_angles
from lightserve.vision.qwen_layers import EPS, Attention, Block, GatedMlp, Merger, QuickGeluMlp
from lightserve.vision.rms_norm import RmsNorm
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows

THETA = 10_000.0
COLORS = 3
Grid = tuple[int, int]  # patches: rows and columns


@dataclass(frozen=True, slots=True)
class QwenVision:
    """``vision_config`` of config.json, for both families."""

    size: int
    out_size: int
    depth: int
    heads: int
    patch: int
    times: int  # a patch has so many frames; an image is all of them
    merge: int
    inside: int  # of the feed-forward
    window: int  # tokens of a window's side; 0: all layers see the whole image
    whole_image_layers: frozenset[int]

    @classmethod
    def read(cls, files: ImageFiles) -> QwenVision:
        is_windowed, vision = files.model_type == "qwen2_5_vl", files.vision
        try:
            size = vision["hidden_size"] if is_windowed else vision["embed_dim"]
            out_size = vision["out_hidden_size"] if is_windowed else vision["hidden_size"]
            patch, merge = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2)
            return cls(
                size=size,
                out_size=out_size,
                depth=vision["depth"],
                heads=vision["num_heads"],
                patch=patch,
                times=vision.get("temporal_patch_size", 2),
                merge=merge,
                inside=vision["intermediate_size"] if is_windowed else int(size * vision["mlp_ratio"]),
                window=vision.get("window_size", 112) // merge // patch if is_windowed else 0,
                whole_image_layers=frozenset(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
            )
        except KeyError as error:
            raise ModelFilesError(f"config.json: vision_config has no {error}; fetch it again") from error


class QwenTower(VisionTower):
    prefixes = ("model.visual.", "visual.")

    def __init__(self, config: QwenVision, images: QwenImages) -> None:
        super().__init__()
        self.config = config
        self.images = images
        inputs = COLORS * config.times * config.patch**2
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(inputs, config.size, bias=False)})
        self.blocks = nn.ModuleList([self._block() for _ in range(config.depth)])
        self.merger = Merger(self._norm(), config.size, config.out_size, config.merge**2)

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> QwenTower:
        assert isinstance(layout, QwenImages)
        return cls(QwenVision.read(files), layout)

    @property
    def row_width(self) -> int:
        return self.config.out_size

    def pack(self) -> None:
        for block in self.blocks:
            if isinstance(block, Block) and isinstance(block.mlp, GatedMlp):
                block.mlp = block.mlp.packed()

    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        patches, grids = patches_and_grids(images, self.images, self.config.times)
        rows = self(patches.to(next(self.parameters()).dtype), grids)
        return split_rows(rows, token_counts(images, self.images, self.config.times))

    def _norm(self) -> nn.Module:
        return RmsNorm(self.config.size, EPS) if self.config.window else nn.LayerNorm(self.config.size, eps=EPS)

    def _block(self) -> Block:
        config = self.config
        mlp = GatedMlp(config.size, config.inside) if config.window else QuickGeluMlp(config.size, config.inside)
        return Block((self._norm(), self._norm()), Attention(config.size, config.heads), mlp)

    @torch.inference_mode()
    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[tokens, out_size]`` of all images. ``patches``: see ``patches_of``; ``grids``: of each image."""
        device, merge = patches.device, self.config.merge
        images = [rows * columns for rows, columns in grids]
        whole = Segments(images, device)
        order, windows = torch.arange(sum(images) // merge**2, device=device), whole
        if self.config.window:
            order, lengths = self._windows(grids)
            order, windows = order.to(device), Segments(lengths, device)
        angles = self._angles(grids, order)
        x = self.patch_embed["proj"](patches)
        x = x.view(len(order), merge**2, -1)[order].flatten(0, 1)
        for number, block in enumerate(self.blocks):
            x = block(x, angles, whole if number in self.config.whole_image_layers else windows)
        tokens: Tensor = self.merger(x)
        return torch.empty_like(tokens).index_copy_(0, order, tokens)

    def _angles(self, grids: Sequence[Grid], order: Tensor) -> RotaryAngles:
        """Of the patches in squares, the squares in ``order``."""
        merge = self.config.merge
        places = [patch_places(rows, columns, merge) for rows, columns in grids]
        squares = torch.cat(places).to(order.device).view(-1, merge**2, 2)[order].flatten(0, 1)
        head_dim = self.config.size // self.config.heads
        return axial_angles(squares[:, 0], squares[:, 1], head_dim, THETA)

    def _windows(self, grids: Sequence[Grid]) -> tuple[Tensor, list[int]]:
        """The tokens of all images, window by window, and the patches of each window."""
        merge, side = self.config.merge, self.config.window
        order: list[Tensor] = []
        first = 0
        for rows, columns in ((rows // merge, columns // merge) for rows, columns in grids):
            numbers = first + torch.arange(rows * columns).view(rows, columns)
            order += [tile.flatten() for band in _split(numbers, side, 0) for tile in _split(band, side, 1)]
            first += rows * columns
        return torch.cat(order), [len(tile) * merge**2 for tile in order]


def _split(x: Tensor, size: int, dim: int) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = x.split(size, dim)  # type: ignore[no-untyped-call]
    return parts


def patch_places(rows: int, columns: int, merge: int) -> Tensor:
    """Row and column of every patch, square after square: ``[patches, 2]``."""
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    squares = places.view(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


def patches_and_grids(media: Sequence[ImageTiles], images: QwenImages, times: int) -> tuple[Tensor, list[Grid]]:
    """Of each image, and of each group of frames of a video: these do not see one another."""
    groups = [group for medium in media for group in frame_groups(medium.tiles, times)]
    grids = [(group[0].shape[0] // images.patch, group[0].shape[1] // images.patch) for group in groups]
    return torch.cat([patches_of(group, images, times) for group in groups]), grids


def token_counts(media: Sequence[ImageTiles], images: QwenImages, times: int) -> list[int]:
    return [
        len(frame_groups(medium.tiles, times)) * (medium.height // images.side) * (medium.width // images.side)
        for medium in media
    ]


def frame_groups(frames: Sequence[Tensor], times: int) -> list[Sequence[Tensor]]:
    """An image is one group of one. Those of a video are full: the last frame comes again."""
    if len(frames) == 1:
        return [frames]
    padded = [*frames, *[frames[-1]] * (-len(frames) % times)]
    return [padded[first : first + times] for first in range(0, len(padded), times)]


def patches_of(frames: Sequence[Tensor], images: QwenImages, times: int) -> Tensor:
    """``[patches, colors * times * patch * patch]`` float32, normalised, of pixels ``[height, width, 3]`` uint8."""
    patch, merge = images.patch, images.merge
    pixels = torch.stack(list(frames))
    mean = torch.tensor(images.mean, device=pixels.device)
    std = torch.tensor(images.std, device=pixels.device)
    values = (pixels.float() / 255 - mean) / std
    rows, columns = pixels.shape[1] // images.side, pixels.shape[2] // images.side
    squares = values.view(len(frames), rows, merge, patch, columns, merge, patch, COLORS)
    ordered = squares.permute(1, 4, 2, 5, 7, 0, 3, 6)  # square, patch in it, color, time, pixels
    all_times = ordered.expand(*ordered.shape[:5], times, patch, patch)  # an image has one, which is shown again
    return all_times.reshape(rows * columns * merge**2, -1)
