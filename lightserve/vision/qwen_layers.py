"""The layers of the towers of Qwen2-VL and Qwen2.5-VL. Modules have the names of the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.common import ops
from lightserve.common.ops import RotaryAngles
from lightserve.vision.attention import Segments, packed_attention
from lightserve.vision.rms_norm import RmsNorm

EPS = 1e-6
TILE = 64  # of a matmul, in columns


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3 * self.heads, -1)
        query, keys_and_values = qkv[:, : self.heads], qkv[:, self.heads :]
        ops.rotary(query, keys_and_values[:, : self.heads], *angles)
        attended = packed_attention(query, keys_and_values, segments)
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

    def packed(self) -> PackedGatedMlp:
        """The same product, computed faster."""
        padding = -self.down_proj.in_features % TILE
        gate_up = _joined([_padded(each, padding) for each in (self.gate_proj, self.up_proj)])
        return PackedGatedMlp(gate_up, _linear(F.pad(self.down_proj.weight, (0, padding)), self.down_proj.bias))


class PackedGatedMlp(nn.Module):
    """Gate and up in one product, with zeros between them up to whole tiles.

    Qwen2.5-VL has 3,420 columns inside, which is no multiple of 16 bytes: on an H200, such products take twice as long.
    """

    def __init__(self, gate_up: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down_proj

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))
        return out


def _padded(linear: nn.Linear, rows: int) -> nn.Linear:
    return _linear(F.pad(linear.weight, (0, 0, 0, rows)), F.pad(linear.bias, (0, rows)))


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    return _linear(torch.cat([each.weight for each in linears]), torch.cat([each.bias for each in linears]))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    return made


class Block(nn.Module):
    def __init__(self, norms: tuple[nn.Module, nn.Module], attn: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = attn
        self.mlp = mlp

    def forward(self, x: Tensor, angles: RotaryAngles, segments: Segments) -> Tensor:
        attended = self.attn(self.norm1(x), angles, segments)
        if isinstance(self.norm2, RmsNorm):
            normed = self.norm2.of_sum(attended, x)
        else:
            x = x + attended
            normed = self.norm2(x)
        out: Tensor = x + self.mlp(normed)
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
