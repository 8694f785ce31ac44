"""Attention inside segments, on any device and by the kernel of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightserve.vision.attention import Segments, flash_attention, grouped_attention, segment_attention

LENGTHS = [16, 64, 16, 5, 64, 1]
HEADS = 4


def values(head_dim: int) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side, as a tower computes them."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(sum(LENGTHS), 3, HEADS, head_dim, generator=generator).unbind(1)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One segment after the other."""
    parts: Any = [tensor.split_with_sizes(LENGTHS) for tensor in (query, key, value)]
    out = [
        F.scaled_dot_product_attention(*(tensor.transpose(0, 1) for tensor in part)).transpose(0, 1)
        for part in zip(*parts, strict=True)
    ]
    return torch.cat(out)


def test_a_token_attends_to_its_segment() -> None:
    query, key, value = values(8)

    out = segment_attention(query, key, value, Segments(LENGTHS, query.device))

    torch.testing.assert_close(out, attended(query, key, value))


def test_a_cpu_has_no_flash_attention() -> None:
    assert flash_attention(torch.device("cpu"), torch.bfloat16, 80) is None


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_the_kernel_of_a_gpu_equals_the_definition(head_dim: int) -> None:
    device = torch.device("cuda", 0)
    query, key, value = (tensor.to(device, torch.bfloat16) for tensor in values(head_dim))
    segments = Segments(LENGTHS, device)
    attend = flash_attention(device, torch.bfloat16, head_dim)

    assert attend is not None
    wanted = grouped_attention(query, key, value, segments)
    torch.testing.assert_close(attend(query, key, value, segments), wanted, atol=2e-2, rtol=2e-2)
