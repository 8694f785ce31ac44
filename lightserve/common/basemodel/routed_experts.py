"""Which experts the layers have chosen for each token, by KV slot: trainers route their tokens the same way (R3).

A slot has the choices of the token whose KV it holds. So those of a cached prefix are there already, and a step only
writes them, also inside a captured graph. They are read for the requests that want them.

A stage of a pipeline sends those of its layers, and of the layers before, behind the hidden states of a step. So the
last stage, which returns tokens, has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightserve.common.basemodel.spec import LayerSpec
from lightserve.errors import ServerError

if TYPE_CHECKING:
    from lightserve.common.basemodel.pipeline import HiddenStateLink

UINT8_EXPERTS = 256


class ExpertsShape(NamedTuple):
    num_layers: int  # of the model
    layers: tuple[int, ...]  # those with experts
    top_k: int  # experts of a token in each of them
    num_experts: int  # in each of them, at most


class RoutedExperts:
    def __init__(self, slots: int, shape: ExpertsShape, device: torch.device, own_layers: range) -> None:
        """``own_layers``: those of this pipeline stage. The table has all layers of the model."""
        dtype = torch.uint8 if shape.num_experts <= UINT8_EXPERTS else torch.int16
        self.table = torch.zeros(slots, len(shape.layers), shape.top_k, dtype=dtype, device=device)
        before, computed = (sum(layer < end for layer in shape.layers) for end in (own_layers.start, own_layers.stop))
        self._of_stages_before = self.table[:, :before]
        self._of_stages_so_far = self.table[:, :computed]

    @property
    def bytes_per_slot(self) -> int:
        return self.table[0].nbytes

    def writer(self, slots: Tensor, first_row: int = 0) -> ExpertsWriter:
        """For a step that fills these KV slots. Its tokens begin at ``first_row`` of those that choose experts."""
        return ExpertsWriter(self.table, slots.long(), first_row, self._of_stages_before.shape[1])

    def for_next_stage(self, slots: Tensor) -> list[Tensor]:
        """What it does not know of the tokens in these slots, ``[tokens, layers, bytes]``, if there is something."""
        chosen = self._of_stages_so_far
        return [chosen[slots.long()].view(torch.uint8)] if chosen.shape[1] else []  # NCCL has no int16

    def receive(self, slots: Tensor, link: HiddenStateLink) -> None:
        """What the stage before has sent: see ``for_next_stage``."""
        chosen = self._of_stages_before
        if chosen.shape[1]:
            received = chosen.new_empty(len(slots), *chosen.shape[1:])
            link.receive_into(received.view(torch.uint8))
            chosen.index_copy_(0, slots.long(), received)


class ExpertsWriter:
    """Of one step. Its layers with experts write one after the other."""

    def __init__(self, table: Tensor, slots: Tensor, first_row: int, first_layer: int) -> None:
        self._table = table
        self._slots = slots
        self._rows = slice(first_row, first_row + len(slots))
        self._next_layer = first_layer  # among those with experts

    def write(self, ids: Tensor) -> None:
        """``ids``: ``[rows, top_k]`` of the next layer, also those of other attention groups."""
        of_layer = self._table[:, self._next_layer]
        of_layer.index_copy_(0, self._slots, ids[self._rows].to(of_layer.dtype))
        self._next_layer += 1


def routed_experts_shape(specs: Sequence[LayerSpec]) -> ExpertsShape:
    """``specs``: of all layers."""
    moes = {spec.layer_num: spec.moe for spec in specs if spec.moe is not None}
    top_k = {moe.route.top_k for moe in moes.values()}
    if len(top_k) != 1:
        numbers = ", ".join(map(str, sorted(top_k))) or "no"
        raise ServerError(
            f"enable_return_routed_experts: the layers choose {numbers} experts for a token, but all should choose "
            "equally many; leave it out"
        )
    num_experts = max(moe.num_experts for moe in moes.values())
    return ExpertsShape(len(specs), tuple(moes), top_k.pop(), num_experts)
