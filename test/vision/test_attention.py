"""Attention inside segments, on any device and by the kernel of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightserve.common.triton_kernel  # noqa: F401  registers the backend
from lightserve.common import ops
from lightserve.vision import attention
from lightserve.vision.attention import (
    Segments,
    flash_attention,
    grouped_attention,
    packed_attention,
    segment_attention,
)
from test.ops.cases import device_of

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


def test_a_tower_may_scale_its_products_itself() -> None:
    query, key, value = values(16)

    out = segment_attention(query, key, value, Segments(LENGTHS, query.device), scale=1.0)

    torch.testing.assert_close(out, attended(4 * query, key, value))


def test_a_cpu_has_no_flash_attention() -> None:
    assert flash_attention(torch.device("cpu"), torch.bfloat16, 80) is None


@pytest.mark.interpreted
def test_short_segments_are_requests_of_the_attention_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (tensor.contiguous().to(device_of("triton")) for tensor in values(80))
    monkeypatch.setattr(attention, "flash_attention", lambda *of: grouped_attention)

    for implementation in [ops.context_attention.impls[name] for name in ("torch", "triton")]:
        monkeypatch.setattr(ops, "context_attention", implementation)
        out = packed_attention(query, torch.cat((key, value), dim=1), Segments(LENGTHS, query.device))

        torch.testing.assert_close(out, attended(query, key, value))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80])
def test_windows_are_computed_on_a_gpu(head_dim: int) -> None:
    device = torch.device("cuda", 0)
    query, key, value = (tensor.to(device, torch.bfloat16) for tensor in values(head_dim))
    segments, packed = Segments(LENGTHS, device), torch.cat((key, value), dim=1)

    out = ops.context_attention.impls["triton"](
        query.contiguous(), packed, packed, segments.batch, ops.AttnOptions(head_dim**-0.5, causal=False)
    )

    torch.testing.assert_close(out, grouped_attention(query, key, value, segments), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_the_kernel_of_a_gpu_equals_the_definition(head_dim: int, scale: float | None) -> None:
    device = torch.device("cuda", 0)
    query, key, value = (tensor.to(device, torch.bfloat16) for tensor in values(head_dim))
    segments = Segments(LENGTHS, device)
    attend = flash_attention(device, torch.bfloat16, head_dim)

    assert attend is not None
    wanted = grouped_attention(query, key, value, segments, scale)
    torch.testing.assert_close(attend(query, key, value, segments, scale), wanted, atol=2e-2, rtol=2e-2)
