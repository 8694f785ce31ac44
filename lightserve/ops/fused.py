"""Fused operators that aten lacks, as ``torch.ops.lightserve``. They have no backward pass, and torch says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops

FUSED: list[str] = []


def _define(name: str, schema: str, mutates: tuple[str, ...], shape: Callable[..., Any]) -> None:
    """Register the op of this name. ``shape``: what it returns, for ``torch.compile``."""
    called = ops.OPS[name]

    def compute(*args: Any) -> Any:
        out = called(*args)
        return None if schema.endswith("()") else out

    torch.library.custom_op(f"lightserve::{name}", compute, mutates_args=mutates, schema=schema).register_fake(shape)
    FUSED.append(name)


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _half(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _nothing(*_: Any) -> None:
    """It writes in place."""


NORM, ADD_NORM = "(Tensor x, Tensor weight, float eps)", "(Tensor x, Tensor(a!) residual, Tensor weight, float eps)"
LIMITS = "(Tensor(a!) logits, Tensor b_top_k, Tensor b_top_p, Tensor b_min_p) -> ()"
SAMPLE = "(Tensor logits, Tensor b_temperature, Tensor b_seed, Tensor b_position) -> Tensor"

_define("rms_norm", f"{NORM} -> Tensor", (), _like_first)
_define("add_rms_norm", f"{ADD_NORM} -> Tensor", ("residual",), _like_first)
_define("layer_norm", "(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", (), _like_first)
for _gated in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "relu2_and_mul"):
    _define(_gated, "(Tensor gate_up) -> Tensor", (), _half)
_define("rotary", "(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()", ("q", "k"), _nothing)
_define(
    "vocab_embedding",
    "(Tensor ids, Tensor table, int first_id) -> Tensor",
    (),
    lambda ids, table, first_id: table.new_empty((len(ids), table.shape[1])),
)
_define("top_k_top_p_min_p", LIMITS, ("logits",), _nothing)
_define("sample", SAMPLE, (), lambda logits, *_: logits.new_empty(len(logits), dtype=torch.int64))
