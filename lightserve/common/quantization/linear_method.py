"""The contract between a model's linears and the formats in which their weights are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import Piece, StoredSize, size_of_pieces


def length(indices: slice | Tensor) -> int:
    size: int = indices.stop - indices.start if isinstance(indices, slice) else len(indices)
    return size


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """One linear of the checkpoint, and the output rows of it that this rank computes.

    Several parts may be rows of the same linear, such as q, k and v.
    """

    prefix: str  # its name in the checkpoint: model.layers.0.self_attn.q_proj
    out_size: int  # of the whole linear
    rows: slice | Tensor  # of this rank; a tensor holds their numbers, int64
    padding: int = 0  # rows of zeros behind them

    @property
    def num_rows(self) -> int:
        """Output rows on this rank, padding included."""
        return length(self.rows) + self.padding


@dataclass(frozen=True, slots=True, eq=False)
class LinearSpec:
    """A linear as one rank computes it: parts stacked along the output, all with the same input."""

    parts: tuple[LinearPart, ...]
    in_size: int  # of the whole linear
    columns: slice  # of the input that this rank multiplies
    gather: Callable[[Tensor], Tensor] | None = None  # from them to the whole input; None: they are the whole input
    has_bias: bool = False  # in the checkpoint
    adds_bias: bool = True  # on this rank; False: another rank adds it
    is_transposed: bool = False  # the checkpoint stores the weight as [in, out]
    is_vocab: bool = False  # the rows are tokens, and the method must also look them up (``embed``)
    is_router: bool = False  # it chooses experts, or how much of a shared one counts
    is_gate: bool = False  # it decides how much of a recurrent state stays
    scales_rows: bool = False  # rows are multiplied by factors after each load (``scale_rows``)

    @property
    def out_size(self) -> int:
        """Output rows on this rank."""
        return sum(linear_part.num_rows for linear_part in self.parts)

    @property
    def num_columns(self) -> int:
        return length(self.columns)

    def parts_with_rows(self) -> Iterator[tuple[LinearPart, slice]]:
        """Each part, and where its rows are in this rank's weight. Its padding follows them."""
        begin = 0
        for linear_part in self.parts:
            yield linear_part, slice(begin, begin + length(linear_part.rows))
            begin += linear_part.num_rows

    def padding(self) -> Iterator[slice]:
        """The rows of this rank's weight that are zeros."""
        return (
            slice(weight_rows.stop, weight_rows.stop + linear_part.padding)
            for linear_part, weight_rows in self.parts_with_rows()
            if linear_part.padding
        )


class RmsNorm(NamedTuple):
    """The parameters of an RMSNorm, for methods that compute it together with their product."""

    weight: Tensor
    eps: float


class LinearMethod(ABC):
    """Owns the tensors of one linear on one rank, and computes with them.

    The constructor takes a ``LinearSpec``, the dtype of the activations and the device, and allocates; the device may
    be ``meta``. A fused method returns None if it is not implemented. The caller then computes both parts separately.
    """

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The checkpoint tensors, with shape and dtype, and how this rank's part is cut out of each."""

    @abstractmethod
    def mm(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for ``x`` ``[tokens, columns of this rank]``."""

    def mm_float32(self, x: Tensor) -> Tensor:
        """``mm`` with a result in float32, which is not rounded in between. Only routers need it."""
        return self.mm(x).float()

    def embed(self, ids: Tensor, first_id: int) -> Tensor:
        """The weight's rows of ``ids``; row 0 is ``first_id``, and ids of other ranks give zeros."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up the rows of an embedding")

    def add_rms_norm_mm(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor] | None:
        """``mm`` of the norm of ``residual + x``, and that sum; ``residual`` is not valid afterwards."""
        return None

    def add_rms_norm_gate_up(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor] | None:
        """Gated SiLU of ``add_rms_norm_mm``, for a linear whose parts are gate and up; and the sum."""
        return None

    def mm_lora(self, x: Tensor, lora: ops.LoraWeights, rows: ops.LoraRows) -> Tensor:
        """``mm`` with what the adapters of ``rows`` add."""
        out = self.mm(x)
        ops.add_lora(out, x, lora, rows)
        return out

    def add_rms_norm_mm_lora(
        self, x: Tensor, residual: Tensor, norm: RmsNorm, lora: ops.LoraWeights, rows: ops.LoraRows
    ) -> tuple[Tensor, Tensor] | None:
        """``mm_lora`` of the norm of ``residual + x``, and that sum; ``residual`` is not valid afterwards."""
        return None

    @property
    def fuses_silu_and_mul(self) -> bool:
        """Whether ``silu_and_mul_mm`` is implemented."""
        return False

    def silu_and_mul_mm(self, gate_up: Tensor) -> Tensor:
        """``mm`` of the gated SiLU of ``gate_up``, in fewer steps."""
        raise NotImplementedError

    def bias_of_rows(self) -> Tensor | None:
        """The bias of this rank, for ``scale_rows``; None: there is none, or its rows cannot be scaled."""
        return None

    def scale_rows(self, factors: Tensor) -> None:
        """Multiply each row of the weight and its bias by a power of 2, before ``process_weights_after_loading``.

        Only for a ``LinearSpec`` with ``scales_rows``.
        """
        raise NotImplementedError

    def stored_size(self) -> StoredSize:
        return size_of_pieces(self.pieces())

    def restore_weights_before_loading(self) -> None:  # noqa: B027  most need nothing
        """Called before the pieces are filled, for the first time or again. Tensors that steps read must not move."""

    def process_weights_after_loading(self) -> None:  # noqa: B027  most need nothing
        """Called once all pieces are filled. What is derived from them is written to the memory of the load before."""

    def kernel_key(self) -> Hashable:
        """Equal for methods that launch the same kernels."""
        stored = ((piece.shape, None if piece.into is None else piece.into.dtype) for piece in self.pieces())
        return (type(self), *stored)
