"""Numbers of a few bits in int32 words."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """uint8, ``32 / bits`` numbers for each word along ``dim``; the first one is in the lowest bits."""
    words = words.movedim(dim, -1).contiguous()
    numbers = words.view(torch.uint8)  # the machine is little-endian: the lowest bits are the first byte
    if bits == 4:
        numbers = torch.stack((numbers & 0x0F, numbers >> 4), dim=-1).flatten(-2)
    return numbers.movedim(-1, dim)
