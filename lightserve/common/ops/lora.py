"""LoRA: what adapters add to the output of a linear, for a batch whose rows use different adapters or none.

An adapter on the device has a slot. The slots of a linear are stacked: ``a`` and ``b`` of `LoraWeights` hold those of
all slots. A step says in `LoraRows` which of its rows use which slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightserve.common.ops.linear import linear, linear_float32
from lightserve.common.ops.norm import add_rms_norm
from lightserve.common.ops.registry import op

NO_LORA = -1  # the slot of a row without an adapter
MIN_LORA_RANK = 16  # of a slot: the shortest sum of a matmul on tensor cores


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """A linear whose output consists of parts, such as q, k and v. Each part has its own A and B.

    The output of part ``p`` grows by ``b[slot, columns of p] @ a[slot, p * rank : (p + 1) * rank] @ x``. The scale of
    an adapter is a factor of its ``b``. An adapter of a lower rank has zeros behind.
    """

    a: Tensor  # [slots, parts * rank, in]
    b: Tensor  # [slots, out, rank]
    part_ends: tuple[int, ...]  # the output column behind each part

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    @property
    def num_parts(self) -> int:
        return len(self.part_ends)

    def parts(self) -> list[slice]:
        """The output columns of each part."""
        return [slice(begin, end) for begin, end in zip((0, *self.part_ends), self.part_ends, strict=False)]


@dataclass(frozen=True, slots=True, eq=False)
class LoraRows:
    """The rows of a step that use adapters, in groups of one adapter."""

    rows: Tensor  # [tokens] int32: row numbers, those of a group next to each other
    groups: Tensor  # [3, groups] int32: slot, first and last + 1 in ``rows``; unused groups have the slot NO_LORA
    max_group: int  # the most rows of a group, a power of 2


@dataclass(frozen=True, slots=True, eq=False)
class LoraLinear:
    """A linear with the adapters of a step."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    lora: LoraWeights
    rows: LoraRows


def lora_group_rows(tokens: int) -> int:
    """The most rows of a group, for a step of so many tokens: it depends on the shape of the step alone.

    16 rows fit the 8 streams of each of 8 adapters. Prompts have more rows of one adapter, and larger groups read its
    weights less often.
    """
    return 16 if tokens <= 512 else 64


def max_lora_groups(tokens: int, slots: int, group_rows: int) -> int:
    """The most groups that a step of so many tokens can need: each slot may have one that is not full."""
    partial = min(tokens, slots)
    return partial + (tokens - partial) // group_rows


@op
def add_lora(out: Tensor, x: Tensor, weights: LoraWeights, lora_rows: LoraRows) -> None:
    """Add to ``out`` ``[tokens, out]``, in place, what the adapters of its rows make of ``x`` ``[tokens, in]``.

    Rows that are in no group stay as they are.
    """
    rank = weights.rank
    for slot, begin, end in lora_rows.groups.T.tolist():
        if slot == NO_LORA:
            continue
        rows = lora_rows.rows[begin:end].long()
        hidden, sums = linear_float32(x[rows], weights.a[slot]), out[rows].float()
        for part_idx, columns in enumerate(weights.parts()):
            part_hidden = hidden[:, part_idx * rank : (part_idx + 1) * rank]
            sums[:, columns] += linear_float32(part_hidden, weights.b[slot, columns])
        out[rows] = sums.to(out.dtype)


@op
def lora_linear(x: Tensor, layer: LoraLinear) -> Tensor:
    """``linear`` of ``x`` ``[tokens, in]``, with what the adapters of its rows add."""
    out = linear(x, layer.weight, layer.bias)
    add_lora(out, x, layer.lora, layer.rows)
    return out


@op
def add_rms_norm_lora_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, layer: LoraLinear
) -> tuple[Tensor, Tensor]:
    """``lora_linear`` of ``add_rms_norm``, and the sum, which is the new residual.

    The sum may be in the memory of ``residual`` or elsewhere. Do not read ``residual`` afterwards.
    """
    normed = add_rms_norm(x, residual, norm_weight, eps)
    return lora_linear(normed, layer), residual
