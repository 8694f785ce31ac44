"""The audio tower of Qwen2-Audio: Whisper's encoder, means of two neighbours, and a linear.

Modules have the names of the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.media.layout import ImageLayout
from lightserve.model_files.config.images import ImageFiles
from lightserve.vision.attention import Segments
from lightserve.vision.siglip import SiglipAttention
from lightserve.vision.tower import ImageTiles, LinearProjector, VisionTower, split_rows
from lightserve.vision.vit import activation

PARTS = ("audio_tower.", "multi_modal_projector.")
EPS = 1e-5  # torch's
HALF_MARGIN = 1000.0  # below the largest number of float16, where transformers cuts


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """``audio_config`` of config.json, with what transformers takes for Qwen2-Audio if a value is left out."""

    size: int
    inside: int  # of the feed-forward
    layers: int
    heads: int
    mels: int
    positions: int
    activation: str

    @classmethod
    def read(cls, audio: Mapping[str, Any]) -> WhisperConfig:
        return cls(
            audio.get("d_model", 1280),
            audio.get("encoder_ffn_dim", 5120),
            audio.get("encoder_layers", 32),
            audio.get("encoder_attention_heads", 20),
            audio.get("num_mel_bins", 128),
            audio.get("max_source_positions", 1500),
            audio.get("activation_function", "gelu"),
        )


class WhisperAttention(SiglipAttention):
    """Its keys have no bias."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__(size, heads)
        self.k_proj = nn.Linear(size, size, bias=False)


class WhisperLayer(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.self_attn = WhisperAttention(config.size, config.heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.size, eps=EPS)
        self.fc1 = nn.Linear(config.size, config.inside)
        self.fc2 = nn.Linear(config.inside, config.size)
        self.final_layer_norm = nn.LayerNorm(config.size, eps=EPS)
        self._activation = activation(config.activation)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), segments)
        x = x + self.fc2(self._activation(self.fc1(self.final_layer_norm(x))))
        if x.dtype == torch.float16:
            most = torch.finfo(x.dtype).max - HALF_MARGIN
            x = x.clamp(-most, most)
        return x


class WhisperEncoder(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(config.mels, config.size, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.size, config.size, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.positions, config.size)
        self.layers = nn.ModuleList([WhisperLayer(config) for _ in range(config.layers)])
        self.layer_norm = nn.LayerNorm(config.size, eps=EPS)

    def forward(self, sounds: Sequence[tuple[Tensor, int]]) -> Sequence[Tensor]:
        """``[tokens, size]`` of each. ``sounds``: features ``[frames, mels]``, and how many frames are no silence."""
        states = [self._convolved(features, frames) for features, frames in sounds]
        lengths = [len(state) for state in states]
        x, segments = torch.cat(states), Segments(lengths, states[0].device)
        for layer in self.layers:
            x = layer(x, segments)
        pairs = [state[: len(state) // 2 * 2].view(-1, 2, state.shape[1]).mean(1) for state in split_rows(x, lengths)]
        return [self.layer_norm(each) for each in pairs]

    def _convolved(self, features: Tensor, frames: int) -> Tensor:
        """``[positions, size]`` without those of silence, which no other one may see."""
        x = features.T[None].to(self.conv1.weight.dtype)
        x = F.gelu(self.conv2(F.gelu(self.conv1(x))))[0].T[: (frames + 1) // 2]
        return x + self.embed_positions.weight[: len(x)]


class Qwen2AudioTower(VisionTower):
    prefixes = PARTS

    def __init__(self, config: WhisperConfig, out_size: int) -> None:
        super().__init__()
        self.audio_tower = WhisperEncoder(config)
        self.multi_modal_projector = LinearProjector(config.size, out_size)

    @classmethod
    def read(cls, files: ImageFiles, layout: ImageLayout) -> Qwen2AudioTower:
        return cls(WhisperConfig.read(files.audio), files.text_size)

    def own_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return name if name.startswith(PARTS) else None

    @property
    def row_width(self) -> int:
        return self.multi_modal_projector.out_size

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageTiles]) -> Sequence[Tensor]:
        """The features of sounds, whose height says how many of their frames are no silence."""
        encoded = self.audio_tower([(sound.tiles[0], sound.height) for sound in images])
        return [self.multi_modal_projector(each) for each in encoded]
