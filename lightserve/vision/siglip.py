"""A SigLIP tower: layers with biases, a norm before each part, and gelu in its tanh form."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.vision.attention import Segments, segment_attention


class SiglipAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        query, key, value = (
            projection(x).view(len(x), self.heads, -1) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.out_proj(segment_attention(query, key, value, segments).flatten(1))
        return out


class SiglipMlp(nn.Module):
    def __init__(self, size: int, inside: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, inside)
        self.fc2 = nn.Linear(inside, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class SiglipLayer(nn.Module):
    def __init__(self, size: int, inside: int, heads: int, eps: float) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size, eps=eps)
        self.self_attn = SiglipAttention(size, heads)
        self.layer_norm2 = nn.LayerNorm(size, eps=eps)
        self.mlp = SiglipMlp(size, inside)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), segments)
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out
