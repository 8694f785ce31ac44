"""The vision tower of SmolVLM and Idefics3: SigLIP over each tile, whose squares of patches become tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.tiles import IMAGE_SIZE, PATCH_SIZE, TiledImages
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments
from lightserve.vision.siglip import SiglipLayer
from lightserve.vision.tower import ImageTiles, VisionTower, split_rows

COLORS = 3


@dataclass(frozen=True, slots=True)
class Idefics3Vision:
    """``vision_config`` of config.json. Published files leave out values that are the defaults of transformers."""

    size: int
    inside: int  # of the feed-forward
    depth: int
    heads: int
    patch: int
    positions: int  # a side of the square of learned positions
    eps: float
    out_size: int  # hidden_size of the text model

    @classmethod
    def read(cls, files: ImageFiles) -> Idefics3Vision:
        vision = files.vision
        files.check_gelu_tanh()
        patch = int(vision.get("patch_size", PATCH_SIZE))
        return cls(
            size=vision.get("hidden_size", 1152),
            inside=vision.get("intermediate_size", 3072),
            depth=vision.get("num_hidden_layers", 12),
            heads=vision.get("num_attention_heads", 16),
            patch=patch,
            positions=int(vision.get("image_size", IMAGE_SIZE)) // patch,
            eps=vision.get("layer_norm_eps", 1e-6),
            out_size=files.hf["hidden_size"],
        )


class TileEmbeddings(nn.Module):
    def __init__(self, config: Idefics3Vision) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(COLORS * config.patch**2, config.size)
        self.position_embedding = nn.Embedding(config.positions**2, config.size)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        embedded: Tensor = self.patch_embedding(patches.to(self.patch_embedding.weight.dtype))
        return embedded.add_(self.position_embedding(places))


class TileTransformer(nn.Module):
    """SigLIP. The patches of a tile attend to one another."""

    def __init__(self, config: Idefics3Vision) -> None:
        super().__init__()
        layers = [SiglipLayer(config.size, config.inside, config.heads, config.eps) for _ in range(config.depth)]
        self.embeddings = TileEmbeddings(config)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = nn.LayerNorm(config.size, eps=config.eps)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """``[tiles * patches, size]``, from ``[tiles, patches, pixels]``."""
        segments = Segments([patches.shape[1]] * len(patches), patches.device)
        x = self.embeddings(patches, places).flatten(0, 1)
        for layer in self.encoder["layers"].children():
            x = layer(x, segments)
        out: Tensor = self.post_layernorm(x)
        return out


class Connector(nn.Module):
    def __init__(self, config: Idefics3Vision, patches: int) -> None:
        super().__init__()
        proj = nn.Linear(config.size * patches, config.out_size, bias=False)
        self.modality_projection = nn.ModuleDict({"proj": proj})


class Idefics3Tower(VisionTower):
    prefixes = ("model.", "")

    def __init__(self, config: Idefics3Vision, images: TiledImages) -> None:
        super().__init__()
        self.config = config
        self.images = images
        self.vision_model = TileTransformer(config)
        self.connector = Connector(config, images.scale**2)

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Idefics3Tower:
        assert isinstance(layout, TiledImages)
        return cls(Idefics3Vision.read(files), layout)

    @property
    def row_width(self) -> int:
        return self.config.out_size

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return name if name.startswith(("vision_model.", "connector.")) else None

    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        rows = self(torch.stack([tile for image in images for tile in image.tiles]))
        return split_rows(rows.flatten(0, 1), [len(image.tiles) * rows.shape[1] for image in images])

    @torch.inference_mode()
    def forward(self, tiles: Tensor) -> Tensor:
        """``[tiles, tokens, out_size]``, from pixels ``[tiles, side, side, 3]`` uint8."""
        side = tiles.shape[1] // self.config.patch
        x = self.vision_model(self._patches(tiles), _places(side, self.config.positions).to(tiles.device))
        projected: Tensor = self.connector.modality_projection["proj"](
            self._squares(x.view(len(tiles), side, side, -1))
        )
        return projected

    def _patches(self, tiles: Tensor) -> Tensor:
        """``[tiles, patches, colors * patch * patch]`` float32, normalised."""
        mean, std = (torch.tensor(values, device=tiles.device) for values in (self.images.mean, self.images.std))
        side, patch = tiles.shape[1] // self.config.patch, self.config.patch
        values = (tiles[:, : side * patch, : side * patch].float() / 255 - mean) / std
        squares = values.view(len(tiles), side, patch, side, patch, COLORS)
        return squares.permute(0, 1, 3, 5, 2, 4).reshape(len(tiles), side**2, -1)

    def _squares(self, x: Tensor) -> Tensor:
        """Pixel shuffle: the vectors of a square of patches one after another."""
        scale, side = self.images.scale, x.shape[1] // self.images.scale
        squares = x.view(len(x), side, scale, side, scale, -1).transpose(2, 3)
        return squares.reshape(len(x), side**2, -1)


def _places(side: int, positions: int) -> Tensor:
    """The learned position of each patch. Tiles may have fewer patches than there are positions.

    In float32 step by step, as the model was trained: where a patch lies on a border, rounding decides.
    """
    borders = torch.arange(1 / positions, 1.0, 1 / positions)
    fractions = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    buckets = torch.bucketize(fractions, borders, right=True)
    return (buckets[:, None] * positions + buckets).flatten()
