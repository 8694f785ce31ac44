"""Linears: how the ranks split them. A ``LinearMethod`` stores the tensors and multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.norms import NormWeight
from lightserve.common.basemodel.layer_weights.row_map import RowMap
from lightserve.common.basemodel.layer_weights.weight import MethodWeight, WeightContext
from lightserve.common.parallel import RankGroup
from lightserve.common.quantization import LinearMethod, LinearPart, LinearSpec


class LinearWeight(MethodWeight):
    method: LinearMethod

    def __init__(self, spec: LinearSpec, context: WeightContext, *, takes_lora: bool = False) -> None:
        self.method = context.linear_method(spec)
        self.lora = context.linear_lora(spec) if takes_lora else None

    @property
    def _active_lora(self) -> tuple[ops.LoraWeights, ops.LoraRows] | None:
        """The adapters that rows of this step use; None: no row does."""
        return None if self.lora is None else self.lora.active

    def _mm(self, x: Tensor) -> Tensor:
        """The product of this rank, with what the adapters of the step add."""
        active = self._active_lora
        return self.method.mm(x) if active is None else self.method.mm_lora(x, *active)


class VocabWeight(LinearWeight):
    """One row per token, split over the ranks; the last rank's rows past the vocabulary are zero."""

    def __init__(
        self, prefix: str, vocab_size: int, hidden_size: int, context: WeightContext, *, bias: bool = False
    ) -> None:
        self._vocab_size = vocab_size
        self._tp = context.tp
        rows = -(-vocab_size // self._tp.size)
        self.first_id = self._tp.rank * rows
        self.count = count = max(min(vocab_size - self.first_id, rows), 0)  # of the tokens from ``first_id`` on
        token_ids = slice(self.first_id, self.first_id + count)
        linear_part = LinearPart(prefix, vocab_size, token_ids, padding=rows - count)
        columns = slice(0, hidden_size)
        super().__init__(LinearSpec((linear_part,), hidden_size, columns, has_bias=bias, is_vocab=True), context)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states of ``ids``, complete on every rank."""
        return self._tp.all_reduce(self.method.embed(ids, self.first_id))

    def local_logits(self, x: Tensor) -> Tensor:
        """The logits of this rank's tokens; those past ``count`` mean nothing."""
        return self.method.mm(x)

    def gather_logits(self, local: Tensor) -> Tensor:
        """The logits of the whole vocabulary, from ``local_logits`` of all ranks."""
        return self._tp.all_gather(local)[:, : self._vocab_size]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One linear of a ColumnWeight. Its ``heads * dim`` rows are split over the ranks by whole heads.

    With fewer heads than ranks, neighbouring ranks hold the same head.
    """

    prefix: str
    heads: int
    dim: int = 1
    row_map: RowMap | None = None  # where the rows are in the checkpoint's tensor; None: it has these rows only
    padding: int = 0  # rows of zeros behind them

    def part_of(self, tp: RankGroup) -> LinearPart:
        """The rows of one rank."""
        heads = tp.part_of(self.heads)
        rows = slice(heads.start * self.dim, heads.stop * self.dim)
        if self.row_map is None:
            return LinearPart(self.prefix, self.heads * self.dim, rows, self.padding)
        return LinearPart(self.prefix, self.row_map.total, self.row_map.stored_rows(rows), self.padding)


class ColumnWeight(LinearWeight):
    """Linears of the same input, computed in one matmul; their outputs are split over the ranks."""

    _is_gate: ClassVar[bool] = False  # of the LinearSpec

    def __init__(
        self,
        blocks: Sequence[Block],
        in_size: int,
        context: WeightContext,
        *,
        bias: bool = False,
        is_transposed: bool = False,
        scales_rows: bool = False,
    ) -> None:
        parts = tuple(block.part_of(context.tp) for block in blocks)
        columns = slice(0, in_size)
        spec = LinearSpec(
            parts,
            in_size,
            columns,
            has_bias=bias,
            is_transposed=is_transposed,
            is_gate=self._is_gate,
            scales_rows=scales_rows,
        )
        super().__init__(spec, context, takes_lora=True)

    def mm(self, x: Tensor) -> Tensor:
        return self._mm(x)

    def add_norm_mm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """``mm`` of ``norm.add_norm``, and the new residual, in one op where norm and method offer it.

        ``residual`` is not valid afterwards.
        """
        rms_norm, active = norm.as_rms_norm(), self._active_lora
        fused = None
        if rms_norm is not None and active is None:
            fused = self.method.add_rms_norm_mm(x, residual, rms_norm)
        elif rms_norm is not None and active is not None:
            fused = self.method.add_rms_norm_mm_lora(x, residual, rms_norm, *active)
        return fused or (self.mm(norm.add_norm(x, residual)), residual)

    def add_norm_gate_up(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """Gated SiLU of ``add_norm_mm``, for blocks that are gate and up; and the new residual."""
        rms_norm = norm.as_rms_norm() if self._active_lora is None else None  # adapters add to gate and up
        fused = None if rms_norm is None else self.method.add_rms_norm_gate_up(x, residual, rms_norm)
        if fused is not None:
            return fused
        gate_up, residual = self.add_norm_mm(x, residual, norm)
        return ops.silu_and_mul(gate_up), residual


class GateColumnWeight(ColumnWeight):
    """Narrow linears whose outputs decide how much of a state stays. Only a checkpoint's own format quantises them."""

    _is_gate = True


class RowWeight(LinearWeight):
    """A linear whose input is split over the ranks; their outputs are summed."""

    def __init__(
        self,
        prefix: str,
        in_size: int,
        out_size: int,
        context: WeightContext,
        *,
        bias: bool = False,
        is_transposed: bool = False,
    ) -> None:
        self._tp = context.tp
        columns = self._tp.part_of(in_size)
        linear_part = LinearPart(prefix, out_size, slice(0, out_size))
        adds_bias = self._tp.rank == 0  # the sum over the ranks contains it once
        spec = LinearSpec(
            (linear_part,),
            in_size,
            columns,
            gather=self._tp.all_gather if self._tp.size > 1 else None,
            has_bias=bias,
            adds_bias=adds_bias,
            is_transposed=is_transposed,
        )
        super().__init__(spec, context, takes_lora=True)

    def mm(self, x: Tensor) -> Tensor:
        """The complete output, summed over the ranks. Adapters are part of the sum: each rank has its columns of A."""
        return self._tp.all_reduce(self._mm(x))

    def silu_and_mul_mm(self, gate_up: Tensor) -> Tensor:
        """``mm`` of the gated SiLU of ``gate_up``, if the method fuses it."""
        if self._active_lora is not None:  # adapters read the input, so it is not rounded in the product
            return self.mm(ops.silu_and_mul(gate_up))
        return self._tp.all_reduce(self.method.silu_and_mul_mm(gate_up))

    def partial_mm(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, for a caller that adds several such parts before it sums over the ranks."""
        return self._mm(x)


class ReplicatedWeight(LinearWeight):
    """A linear that every rank computes as a whole."""

    def __init__(
        self,
        blocks: Sequence[Block],
        in_size: int,
        context: WeightContext,
        *,
        bias: bool = False,
        is_router: bool = False,
    ) -> None:
        parts = tuple(block.part_of(RankGroup()) for block in blocks)
        spec = LinearSpec(parts, in_size, slice(0, in_size), has_bias=bias, is_router=is_router)
        super().__init__(spec, context)

    def mm(self, x: Tensor) -> Tensor:
        return self.method.mm(x)

    def mm_float32(self, x: Tensor) -> Tensor:
        return self.method.mm_float32(x)
