"""Attention inside segments of a sequence, not causal: the patches of an image, or of a window in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Groups = list[Tensor]  # [segments, length] int64 each: the tokens of all segments of one length


def segment_groups(lengths: Sequence[int], device: torch.device) -> Groups:
    """Consecutive segments, by their lengths. Segments of the same length are computed together."""
    starts, begin = dict[int, list[int]](), 0
    for length in lengths:
        starts.setdefault(length, []).append(begin)
        begin += length
    return [
        torch.tensor(begins, device=device)[:, None] + torch.arange(length, device=device)
        for length, begins in starts.items()
    ]


def segment_attention(query: Tensor, key: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """``[tokens, heads, head_dim]`` each. A token attends to all tokens of its segment."""
    out = torch.empty_like(query)
    for index in groups:
        q, k, v = (tensor[index].transpose(1, 2) for tensor in (query, key, value))  # [segments, heads, length, dim]
        attended = F.scaled_dot_product_attention(q, k, v)
        out[index.flatten()] = attended.transpose(1, 2).flatten(0, 1)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions over the whole head, in float32. ``cos`` and ``sin``: ``[tokens, 1, head_dim / 2]``."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def axial_angles(rows: Tensor, columns: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Half of a head's pairs rotate by the row of a patch, half by its column."""
    pairs = head_dim // 4
    frequencies = theta ** -(torch.arange(pairs, device=rows.device).float() / pairs)
    angles = torch.cat((rows[:, None] * frequencies, columns[:, None] * frequencies), dim=-1)
    return angles.cos()[:, None], angles.sin()[:, None]
