"""The contract between a layer's experts and the formats in which their weights are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from lightserve.common.checkpoint.piece import Piece, StoredSize, size_of_pieces
from lightserve.common.ops import ExpertActivation, GatedSilu
from lightserve.common.quantization.linear_method import length


class ExpertsLayout(Enum):
    """How a checkpoint stores the experts of a layer."""

    # three linears for each expert, or two without a gate: PREFIX.3.gate_proj.weight [width, hidden]
    EACH = "each"
    STACKED = "stacked"  # gate_up [experts, 2 * width, hidden], all gates first; down [experts, hidden, width]
    # gate_up [experts, hidden, 2 * width], gates and ups alternate; down [experts, width, hidden]
    TRANSPOSED = "transposed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of the linears of an expert; of all experts, if the checkpoint stores them together."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"  # if they are stored together
    down: str = "down_proj"

    def inputs(self, activation: ExpertActivation) -> tuple[str, ...]:
        """The linears whose outputs are units, in the order of a unit's rows."""
        return (self.gate, self.up) if activation.rows_per_unit == 2 else (self.up,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of a layer as one rank computes them. Shared experts follow the others."""

    prefix: str  # their name in the checkpoint: model.layers.0.mlp.experts
    num_experts: int  # of the whole layer, without shared ones
    hidden_size: int
    width: int  # of each whole expert
    expert_range: slice  # the experts of this rank, shared ones included
    units: slice  # of each of its experts that this rank computes
    layout: ExpertsLayout = ExpertsLayout.EACH
    names: ExpertNames = field(default_factory=ExpertNames)
    num_shared: int = 0  # stored as one expert of their width together, with the names of an expert
    shared_prefix: str = ""
    has_bias: bool = False  # in the checkpoint
    adds_bias: bool = True  # of down, on this rank; False: another rank adds it
    activation: ExpertActivation = field(default_factory=GatedSilu)

    @property
    def gate_up_modules(self) -> list[str]:
        """The names of gate and up in the checkpoint, of all experts."""
        if self.layout is not ExpertsLayout.EACH:
            return [f"{self.prefix}.{self.names.gate_up}"]
        names = self.names.inputs(self.activation)
        return [f"{prefix}.{name}" for prefix in self._prefixes() for name in names]

    @property
    def down_modules(self) -> list[str]:
        if self.layout is not ExpertsLayout.EACH:
            return [f"{self.prefix}.{self.names.down}"]
        return [f"{prefix}.{self.names.down}" for prefix in self._prefixes()]

    def _prefixes(self) -> list[str]:
        each = [f"{self.prefix}.{expert}" for expert in range(self.num_experts)]
        return [*each, self.shared_prefix] if self.num_shared else each

    @property
    def num_own(self) -> int:
        return length(self.expert_range)

    def slot_of(self, expert: int) -> int | None:
        """The index of an expert among those of this rank; None: it is on another one."""
        experts = self.expert_range
        return expert - experts.start if experts.start <= expert < experts.stop else None

    @property
    def num_units(self) -> int:
        return length(self.units)


class ExpertsMethod(ABC):
    """Owns the tensors of a layer's experts on one rank, and computes with them.

    The constructor takes an ``ExpertsSpec``, the dtype of the activations and the device, and allocates; the device may
    be ``meta``.
    """

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The checkpoint tensors, with shape and dtype, and how this rank's part is cut out of each."""

    @abstractmethod
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As ``ops.experts``; ``ids`` count this rank's experts."""

    def stored_size(self) -> StoredSize:
        return size_of_pieces(self.pieces())

    def restore_weights_before_loading(self) -> None:  # noqa: B027  most need nothing
        """Called before the pieces are filled, for the first time or again. Tensors that steps read must not move."""

    def process_weights_after_loading(self) -> None:  # noqa: B027  most need nothing
        """Called once all pieces are filled. What is derived from them is written to the memory of the load before."""

    @abstractmethod
    def kernel_key(self) -> Hashable:
        """Equal for methods that launch the same kernels."""
