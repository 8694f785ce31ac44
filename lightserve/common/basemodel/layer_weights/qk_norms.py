"""Norms of queries and keys: over each head, or over all heads of a token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.norms import RmsNormWeight, SplitNormWeight
from lightserve.common.basemodel.layer_weights.row_map import pairs_to_halves, whole
from lightserve.common.basemodel.layer_weights.weight import Weight, WeightContext
from lightserve.common.basemodel.spec import LayerSpec, Norm, QkNorm
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.quantization import RmsNorm


class QkNormWeight(Weight):
    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """The norm of this rank's heads ``[tokens, heads, dim]``."""

    def as_rms_norm(self) -> RmsNorm | None:
        """The RMSNorm over each head that computes the same; None: there is none."""
        return None


class HeadNormWeight(QkNormWeight):
    """RMSNorm over each head, with the same weight for all heads."""

    def __init__(self, prefix: str, spec: LayerSpec, context: WeightContext) -> None:
        adds_one = spec.norm is Norm.RMS_PLUS_ONE
        self._norm = RmsNormWeight(prefix, spec.head_dim, spec.norm_eps, context, adds_one=adds_one)
        self._order = _head_order(spec)

    def pieces(self) -> Iterator[Piece]:
        for piece in self._norm.pieces():
            yield Piece(piece.name, piece.shape, piece.into, partial(_reordered, self._order))

    def process_weights_after_loading(self) -> None:
        self._norm.process_weights_after_loading()

    def norm(self, x: Tensor) -> Tensor:
        return self._norm.norm(x)

    def as_rms_norm(self) -> RmsNorm:
        return self._norm.as_rms_norm()


class PlainHeadNormWeight(QkNormWeight):
    """RMSNorm over each head, without a weight."""

    def __init__(self, spec: LayerSpec, context: WeightContext) -> None:
        self._ones = torch.ones(spec.head_dim, dtype=context.dtype, device=context.device)
        self._eps = spec.norm_eps

    def pieces(self) -> Iterator[Piece]:
        return iter(())

    def norm(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self._ones, self._eps)

    def as_rms_norm(self) -> RmsNorm:
        return RmsNorm(self._ones, self._eps)


class EachHeadNormWeight(QkNormWeight):
    """LayerNorm without bias over each head; every head has its own weight.

    Checkpoints have one tensor ``[heads, dim]``, or one tensor per head if ``{head}`` is in its name.
    """

    def __init__(self, prefix: str, num_heads: int, spec: LayerSpec, context: WeightContext) -> None:
        self._prefix, self._num_heads, self._eps = prefix, num_heads, spec.norm_eps
        self._has_tensor_per_head = "{head}" in prefix
        self._own = context.tp.part_of(num_heads)
        self._order = _head_order(spec)
        self.tensor = context.empty(self._own.stop - self._own.start, spec.head_dim)
        self._ones = torch.ones(spec.head_dim, device=context.device)
        self._zeros = torch.zeros(spec.head_dim, device=context.device)

    def pieces(self) -> Iterator[Piece]:
        dim = self.tensor.shape[1]
        if not self._has_tensor_per_head:
            reorder = partial(_reordered, self._order)
            shape = (self._num_heads, dim)
            yield Piece(f"{self._prefix}.weight", shape, self.tensor, lambda weight: reorder(weight[self._own]))
            return
        for head in range(self._num_heads):
            into = self.tensor[head - self._own.start] if head in range(self._own.start, self._own.stop) else None
            name = f"{self._prefix.format(head=head)}.weight"
            yield Piece(name, (dim,), into, partial(_reordered, self._order))

    def norm(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self._ones, self._zeros, self._eps).mul_(self.tensor)


class ProjectionNormWeight(QkNormWeight):
    """RMSNorm over all heads of a token, which the ranks share."""

    def __init__(self, prefix: str, num_heads: int, spec: LayerSpec, context: WeightContext) -> None:
        heads, dim = context.tp.part_of(num_heads), spec.head_dim
        rows = whole(num_heads, dim)
        order = pairs_to_halves(rows, num_heads, spec.rotary_dim).rows if spec.has_rope_pairs else rows.rows
        self._norm = SplitNormWeight(
            prefix,
            num_heads * dim,
            spec.norm_eps,
            context,
            indices=order[heads.start * dim : heads.stop * dim],
            copies=max(context.tp.size // num_heads, 1),
        )

    def pieces(self) -> Iterator[Piece]:
        return self._norm.pieces()

    def norm(self, x: Tensor) -> Tensor:
        return self._norm.norm(x.flatten(1)).view(x.shape)


def qk_norm_weight(prefix: str, num_heads: int, spec: LayerSpec, context: WeightContext) -> QkNormWeight | None:
    """The norm of queries or keys with ``num_heads`` heads; None: the model has none."""
    match spec.qk_norm:
        case None:
            return None
        case QkNorm.HEAD:
            return HeadNormWeight(prefix, spec, context)
        case QkNorm.HEAD_NO_WEIGHT:
            return PlainHeadNormWeight(spec, context)
        case QkNorm.EACH_HEAD:
            return EachHeadNormWeight(prefix, num_heads, spec, context)
        case QkNorm.PROJECTION:
            return ProjectionNormWeight(prefix, num_heads, spec, context)


def _head_order(spec: LayerSpec) -> Tensor | None:
    """The order of a head's numbers in which the ops rotate them; None: the checkpoint's."""
    if not spec.has_rope_pairs:
        return None
    return pairs_to_halves(whole(1, spec.head_dim), 1, spec.rotary_dim).rows


def _reordered(order: Tensor | None, tensor: Tensor) -> Tensor:
    return tensor if order is None else tensor[..., order]
