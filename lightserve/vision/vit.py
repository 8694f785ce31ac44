"""The vision towers of CLIP and SigLIP: squares of one size, learned positions, layers with norms before them.

Modules have the names of the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.errors import ModelFilesError

COLORS = 3
CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
# what transformers takes for a value that vision_config leaves out
DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    SIGLIP: {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
COMMON_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ModelFilesError(
            f"config.json: the activation {name!r} of the vision tower is not one of {[*ACTIVATIONS]}"
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True)
class VitConfig:
    """``vision_config`` of config.json."""

    size: int
    inside: int  # of the feed-forward
    layers: int
    heads: int
    image: int  # pixels of a side
    patch: int
    activation: str
    eps: float
    is_clip: bool  # with a class token, a norm before the layers, and without a bias of patches

    @classmethod
    def read(cls, vision: Mapping[str, Any], default_type: str) -> VitConfig:
        """``default_type``: if the file does not say."""
        model_type = vision.get("model_type", default_type)
        if model_type not in DEFAULTS:
            raise ModelFilesError(
                f"config.json: the vision tower {model_type!r} is not implemented for this model; "
                f"those of {', '.join(DEFAULTS)} are"
            )
        values = {**COMMON_DEFAULTS, **DEFAULTS[model_type], **vision}
        return cls(
            values["hidden_size"],
            values["intermediate_size"],
            values["num_hidden_layers"],
            values["num_attention_heads"],
            values["image_size"],
            values["patch_size"],
            values["hidden_act"],
            values["layer_norm_eps"],
            model_type == CLIP,
        )

    def layers_before(self, feature_layer: int) -> int:
        """How many layers compute a feature layer of config.json: negative numbers count from the end."""
        return self.layers + 1 + feature_layer if feature_layer < 0 else feature_layer


class VitEmbeddings(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        patches = (config.image // config.patch) ** 2
        self.patch_embedding = nn.Linear(COLORS * config.patch**2, config.size, bias=not config.is_clip)
        self.position_embedding = nn.Embedding(patches + config.is_clip, config.size)
        if config.is_clip:
            self.class_embedding = nn.Parameter(torch.empty(config.size))
        self._has_class = config.is_clip

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patch_embedding(patches)
        if self._has_class:
            x = torch.cat((self.class_embedding.expand(len(x), 1, -1), x), dim=1)
        out: Tensor = x + self.position_embedding.weight
        return out


class VitAttention(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.size, config.size)
        self.k_proj = nn.Linear(config.size, config.size)
        self.v_proj = nn.Linear(config.size, config.size)
        self.out_proj = nn.Linear(config.size, config.size)
        self._heads = config.heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return out


class VitMlp(nn.Module):
    def __init__(self, size: int, inside: int, activation_name: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, inside)
        self.fc2 = nn.Linear(inside, size)
        self._activation = activation(activation_name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self._activation(self.fc1(x)))
        return out


class VitLayer(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.size, eps=config.eps)
        self.self_attn = VitAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.size, eps=config.eps)
        self.mlp = VitMlp(config.size, config.inside, config.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class Vit(nn.Module):
    def __init__(self, config: VitConfig, counts: Sequence[int], has_last_norm: bool = False) -> None:
        """``counts``: it returns what so many layers have computed, side by side."""
        super().__init__()
        self.config = config
        self.embeddings = VitEmbeddings(config)
        if config.is_clip:
            self.pre_layrnorm = nn.LayerNorm(config.size, eps=config.eps)  # so spelt in the files
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList([VitLayer(config) for _ in range(max(counts))])})
        if has_last_norm:
            self.post_layernorm = nn.LayerNorm(config.size, eps=config.eps)
        self._counts = tuple(counts)
        self._has_last_norm = has_last_norm

    def forward(self, patches: Tensor) -> Tensor:
        """``[tiles, tokens, size * counts]``. ``patches``: see ``patches_of``."""
        x = self.embeddings(patches)
        if self.config.is_clip:
            x = self.pre_layrnorm(x)
        states = [x]
        layers: Any = self.encoder["layers"]
        for layer in layers:
            states.append(layer(states[-1]))
        out = torch.cat([states[count] for count in self._counts], dim=-1)
        return self.post_layernorm(out) if self._has_last_norm else out


def patches_of(tiles: Tensor, patch: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """``[tiles, patches, colors * patch * patch]`` float32, normalised, of ``[tiles, height, width, 3]`` uint8."""
    return squares_of(normalised(tiles, mean, std), patch)


def squares_of(values: Tensor, patch: int) -> Tensor:
    """``[tiles, patches, colors * patch * patch]`` of ``[tiles, height, width, 3]``."""
    rows, columns = values.shape[1] // patch, values.shape[2] // patch
    inside = values[:, : rows * patch, : columns * patch]
    squares = inside.reshape(len(values), rows, patch, columns, patch, COLORS).permute(0, 1, 3, 5, 2, 4)
    return squares.reshape(len(values), rows * columns, -1)


def pixel_patches(tile: Tensor, patch: int) -> Tensor:
    """``[patches, patch * patch * colors]``, row by row: the colors of a pixel stay side by side."""
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    squares = tile.view(rows, patch, columns, patch, COLORS).transpose(1, 2)
    return squares.reshape(rows * columns, -1)


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """``[..., 3]`` uint8 as float32."""
    means, stds = (torch.tensor(values, device=pixels.device) for values in (mean, std))
    return (pixels.float() / 255 - means) / stds
