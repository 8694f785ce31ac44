"""Tensors of recurrent layers in a GGUF file, as transformers stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightserve.model_files.gguf.architectures import Form, RowOrder


def _logs(rates: Tensor) -> Tensor:
    """A_log from -exp(A_log)."""
    return rates.neg().log().flatten()


FORMS: dict[Form, Callable[[Tensor], Tensor]] = {
    Form.RATES: _logs,
    Form.RATES_4D: lambda rates: _logs(rates).view(1, 1, -1, 1),
    Form.FLAT: Tensor.flatten,
    Form.CONV: lambda weight: weight.reshape(-1, 1, weight.shape[-1]),
}


def _by_key_head(tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """From the first value head of every key head, then the second of every one, to all value heads of a key head."""
    keys, values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    heads = tensor.reshape(values // keys, keys, -1, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def _last_by_key_head(tensor: Tensor, config: dict[str, Any]) -> Tensor:
    values = int(config["linear_num_value_heads"]) * int(config["linear_value_head_dim"])
    keys, last = tensor.split_with_sizes([len(tensor) - values, values])
    return torch.cat([keys, _by_key_head(last, config)])


def _columns_by_key_head(tensor: Tensor, config: dict[str, Any]) -> Tensor:
    return _by_key_head(tensor.T, config).T


TILED: dict[RowOrder | None, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    RowOrder.TILED_VALUES: _by_key_head,
    RowOrder.TILED_LAST_VALUES: _last_by_key_head,
    RowOrder.TILED_VALUE_COLUMNS: _columns_by_key_head,
}


def of_key_heads(qkv: Tensor, z: Tensor, config: dict[str, Any]) -> Tensor:
    """From all rows of q, of k and of v, and from z, to the q, k, v and z of each key head."""
    heads = int(config["linear_num_key_heads"])
    keys = heads * int(config["linear_key_head_dim"])
    blocks = qkv.split_with_sizes([keys, keys, len(qkv) - 2 * keys])
    return torch.cat([block.reshape(heads, -1, block.shape[-1]) for block in (*blocks, z)], dim=1).flatten(0, 1)
