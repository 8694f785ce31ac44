"""The tower of Llama 4: squares of one size, a class token behind the patches, rotary positions.

Modules have the names of the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.common import ops
from lightserve.common.ops import RotaryAngles
from lightserve.media.layout import ImageLayout
from lightserve.media.layouts.llama4 import Llama4Images
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments, axial_angles, segment_attention
from lightserve.vision.tower import ImageTiles, PackedPart, VisionTower, split_rows
from lightserve.vision.vit import COLORS, VitMlp, squares_of

PARTS = ("vision_model.", "multi_modal_projector.")
EPS = 1e-5
THETA = 10_000.0
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "vision_output_dim": 7680,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "pixel_shuffle_ratio": 0.5,
}


@dataclass(frozen=True, slots=True)
class Llama4Vision:
    """``vision_config`` of config.json."""

    size: int
    inside: int
    layers: int
    heads: int
    theta: float
    adapter: tuple[int, int]  # numbers between its linears, and behind them
    merge: int  # a token is a square of so many patches a side
    projected: int  # what the projector reads
    out_size: int

    @classmethod
    def read(cls, files: ImageFiles) -> Llama4Vision:
        values = {**DEFAULTS, **files.vision}
        rope = values.get("rope_parameters") or {}
        return cls(
            values["hidden_size"],
            values["intermediate_size"],
            values["num_hidden_layers"],
            values["num_attention_heads"],
            float(rope.get("rope_theta") or values.get("rope_theta") or THETA),
            (values["projector_input_dim"], values["projector_output_dim"]),
            round(1 / values["pixel_shuffle_ratio"]),
            values["vision_output_dim"],
            files.text_size,
        )


class Llama4Attention(PackedPart):
    def __init__(self, config: Llama4Vision) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.size, config.size) for _ in range(3))
        self.o_proj = nn.Linear(config.size, config.size)
        self._heads = config.heads

    def pack(self) -> None:
        """Pair the halves of a head, as ``ops.rotary`` does: files have neighbours as pairs."""
        for tensor in (self.q_proj.weight, self.q_proj.bias, self.k_proj.weight, self.k_proj.bias):
            heads = tensor.view(self._heads, -1, 2, *tensor.shape[1:])
            tensor.copy_(heads.transpose(1, 2).reshape(tensor.shape))

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        query, key, value = (
            linear(x).view(len(x), self._heads, -1) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        ops.rotary(query, key, *angles)
        out: Tensor = self.o_proj(segment_attention(query, key, value, segments).flatten(1))
        return out


class Llama4Layer(nn.Module):
    def __init__(self, config: Llama4Vision) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.size, eps=EPS)
        self.self_attn = Llama4Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.size, eps=EPS)
        self.mlp = VitMlp(config.size, config.inside, "gelu")

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, segments)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama4Adapter(nn.Module):
    def __init__(self, config: Llama4Vision) -> None:
        super().__init__()
        inside, out_size = config.adapter
        self.fc1 = nn.Linear(config.size * config.merge**2, inside, bias=False)
        self.fc2 = nn.Linear(out_size, out_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc2(F.gelu(self.fc1(x))))


class Llama4Vit(nn.Module):
    def __init__(self, config: Llama4Vision, layout: Llama4Images) -> None:
        super().__init__()
        self.config = config
        self._side = layout.side // layout.patch
        linear = nn.Linear(COLORS * layout.patch**2, config.size, bias=False)
        self.patch_embedding = nn.ModuleDict({"linear": linear})
        self.class_embedding = nn.Parameter(torch.empty(config.size))
        self.positional_embedding_vlm = nn.Parameter(torch.empty(self._side**2 + 1, config.size))
        self.layernorm_pre = nn.LayerNorm(config.size, eps=EPS)
        layers = nn.ModuleList([Llama4Layer(config) for _ in range(config.layers)])
        self.model = nn.ModuleDict({"layers": layers})
        self.layernorm_post = nn.LayerNorm(config.size, eps=EPS)
        self.vision_adapter = nn.ModuleDict({"mlp": Llama4Adapter(config)})

    def forward(self, patches: Tensor) -> Tensor:
        """``[squares, tokens, projected]``. ``patches``: see ``squares_of``."""
        count, device = len(patches), patches.device
        x = self.patch_embedding["linear"](patches.to(self.class_embedding.dtype))
        x = torch.cat((x, self.class_embedding.expand(count, 1, -1)), dim=1) + self.positional_embedding_vlm
        length = x.shape[1]
        x = self.layernorm_pre(x).flatten(0, 1)
        angles, segments = self._angles(count, device), Segments([length] * count, device)
        layers: Any = self.model["layers"]
        for layer in layers:
            x = layer(x, angles, segments)
        features = self.layernorm_post(x).view(count, length, -1)[:, :-1]
        out: Tensor = self.vision_adapter["mlp"](self._squares(features))
        return out

    def _angles(self, count: int, device: torch.device) -> RotaryAngles:
        """Columns and rows count from one. The class token does not rotate."""
        places = torch.arange(self._side**2, device=device)
        head_dim = self.config.size // self.config.heads
        angles = axial_angles(places % self._side + 1, places // self._side + 1, head_dim, self.config.theta)
        cos, sin = (F.pad(each, (0, 0, 0, 1), value=value) for each, value in zip(angles, (1.0, 0.0), strict=True))
        return RotaryAngles(cos.repeat(count, 1), sin.repeat(count, 1))

    def _squares(self, x: Tensor) -> Tensor:
        """``[squares, tokens, size * merge * merge]``: the patches of a token side by side, row by row."""
        merge, side = self.config.merge, self._side // self.config.merge
        return x.reshape(len(x), side, merge, side, merge, -1).transpose(2, 3).flatten(3).flatten(1, 2)


class Llama4Tower(VisionTower):
    prefixes = PARTS

    def __init__(self, config: Llama4Vision, layout: Llama4Images) -> None:
        super().__init__()
        self.config = config
        self.vision_model = Llama4Vit(config, layout)
        self.multi_modal_projector = nn.ModuleDict(
            {"linear_1": nn.Linear(config.projected, config.out_size, bias=False)}
        )
        self._layout = layout

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Llama4Tower:
        assert isinstance(layout, Llama4Images)
        return cls(Llama4Vision.read(files), layout)

    def own_name(self, name: str) -> str | None:
        return name if name.startswith(PARTS) else None

    @property
    def row_width(self) -> int:
        return self.config.out_size

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        layout = self._layout
        tiles = torch.stack(list(chain.from_iterable(image.tiles for image in images)))
        features = self.vision_model(squares_of(_normalised(tiles, layout), layout.patch))
        rows = self.multi_modal_projector["linear_1"](features)
        of_images = split_rows(rows, [len(image.tiles) for image in images])
        return [of_image.flatten(0, 1) for of_image in of_images]


def _normalised(pixels: Tensor, layout: Llama4Images) -> Tensor:
    """In bfloat16, as the model was trained."""
    mean, std = (torch.tensor(each, device=pixels.device, dtype=torch.bfloat16) for each in (layout.mean, layout.std))
    return (pixels.bfloat16() * (1 / 255) - mean) / std
