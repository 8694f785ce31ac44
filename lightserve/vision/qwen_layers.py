"""The layers of the towers of Qwen2-VL and Qwen2.5-VL. Modules have the names of the checkpoint's tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.common import ops
from lightserve.common.ops import RotaryAngles
from lightserve.vision.attention import Segments, segment_attention

EPS = 1e-6


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        query, key, value = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        ops.rotary(query, key, *angles)
        attended = segment_attention(query, key, value, segments)
        projected: Tensor = self.proj(attended.flatten(1))
        return projected


class QuickGeluMlp(nn.Module):
    def __init__(self, size: int, inside: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, inside)
        self.fc2 = nn.Linear(inside, size)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.fc1(x)
        out: Tensor = self.fc2(inside * torch.sigmoid(1.702 * inside))
        return out


class GatedMlp(nn.Module):
    def __init__(self, size: int, inside: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inside)
        self.up_proj = nn.Linear(size, inside)
        self.down_proj = nn.Linear(inside, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, norms: tuple[nn.Module, nn.Module], attn: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = attn
        self.mlp = mlp

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), angles, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Merger(nn.Module):
    """A square of patches becomes the embedding of a token."""

    def __init__(self, norm: nn.Module, size: int, out_size: int, patches: int) -> None:
        super().__init__()
        self.ln_q = norm
        self.mlp = nn.Sequential(
            nn.Linear(size * patches, size * patches), nn.GELU(), nn.Linear(size * patches, out_size)
        )
        self._patches = patches

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ln_q(x).view(len(x) // self._patches, -1))
        return out
