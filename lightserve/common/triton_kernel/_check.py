"""Checks of the wrappers before a launch. Kernels assume that the last dimension has stride 1."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from lightserve.common.ops import AttnBatch, Penalties


def check_last_contiguous(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{op}: the last dimension of {name} must be contiguous, found stride {tensor.stride(-1)}; "
                "call contiguous() first"
            )


def check_heads_side_by_side(op: str, **tensors: Tensor) -> None:
    """For ``[tokens, heads, dim]``: kernels compute the place of a head from its number alone."""
    for name, tensor in tensors.items():
        if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
            check_last_contiguous(op, **{name: tensor})
            raise ValueError(
                f"{op}: the heads of {name} must lie side by side, found strides {tensor.stride()}; call contiguous()"
            )


def check_has_bits(op: str, bitmask: Tensor, vocab: int) -> None:
    if 32 * bitmask.shape[1] < vocab:
        raise ValueError(f"{op}: a bitmask of {bitmask.shape[1]} words has no bit for each of {vocab} tokens")


def tensors_of(struct: AttnBatch | Penalties) -> dict[str, Tensor]:
    values = {field.name: getattr(struct, field.name) for field in fields(struct)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def rows_in_place(op: str, name: str, x: Tensor) -> Tensor:
    """``x`` as ``[rows, width]`` in the same memory."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.data_ptr() != x.data_ptr():
        raise ValueError(
            f"{op}: {name} is written in place, and cannot be viewed as rows with its strides {x.stride()}"
        )
    return rows
