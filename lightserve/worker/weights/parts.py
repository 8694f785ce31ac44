"""What a weight update fills: the model, and the layer for drafts that its checkpoint has (MTP).

A trainer may leave that layer out: texts are right with the drafts of older weights, and fewer of them are accepted. If
some of its tensors come, the update is complete when all have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from lightserve.common.basemodel import CheckpointTensor, TpPartBaseModel
from lightserve.common.basemodel.layer_weights.loader import check_part, check_weights, load_weights
from lightserve.model_files.mtp import FORMATS, mtp_format
from lightserve.worker.speculation.heads.head import DraftHead
from lightserve.worker.speculation.heads.mtp import MtpHead, MtpWeight
from lightserve.worker.weights.load import Loadable, WeightLoad


class UpdatedPart(Loadable, Protocol):
    def reads(self, name: str) -> bool:
        """Whether a tensor of this name is loaded."""

    def check_some(self, tensors: Iterable[CheckpointTensor]) -> set[str]:
        """Check some tensors that are read, on the meta device. Returns the names of those that are used."""


class ModelPart:
    def __init__(self, model: TpPartBaseModel) -> None:
        self._model = model
        has_mtp = model.config.model_type in FORMATS
        self._mtp_prefix = mtp_format(model.config).prefix if has_mtp else None

    def reads(self, name: str) -> bool:
        return self._mtp_prefix is None or not name.startswith(self._mtp_prefix)

    def check_some(self, tensors: Iterable[CheckpointTensor]) -> set[str]:
        return self._model.check_part(tensors)

    def load_weights(
        self, checkpoint: Iterable[CheckpointTensor], report_missing: Callable[[int], None] = lambda count: None
    ) -> None:
        self._model.load_weights(checkpoint, report_missing)


class HeadPart:
    def __init__(self, head: MtpHead) -> None:
        self._head = head
        self.reads = head.reads

    def check_some(self, tensors: Iterable[CheckpointTensor]) -> set[str]:
        return check_part([self._on_meta()], self._head.checkpoint(tensors))

    def check_all(self, tensors: Iterable[CheckpointTensor]) -> None:
        check_weights([self._on_meta()], self._head.checkpoint(tensors), self._num_layers)

    def load_weights(
        self, checkpoint: Iterable[CheckpointTensor], report_missing: Callable[[int], None] = lambda count: None
    ) -> None:
        """In place, as the weights of the model."""
        tensors = self._head.checkpoint(checkpoint)
        load_weights([self._head.weights], tensors, self._num_layers, report_missing=report_missing)

    def _on_meta(self) -> MtpWeight:
        return self._head.new_weights(torch.device("meta"))

    @property
    def _num_layers(self) -> int:
        return self._head.model.config.num_layers + 1


def parts_of(model: TpPartBaseModel, head: DraftHead | None) -> list[UpdatedPart]:
    """Other heads than MTP have files of their own, and keep their weights."""
    return [ModelPart(model), *([HeadPart(head)] if isinstance(head, MtpHead) else [])]


class PartLoads:
    """One load of each part whose tensors come."""

    def __init__(self, parts: Sequence[UpdatedPart], in_thread: Callable[[], None]) -> None:
        """``in_thread``: see WeightLoad."""
        self._parts = parts
        self._in_thread = in_thread
        self._loads: dict[int, WeightLoad] = {}  # by the number of the part; that of the model is 0

    @property
    def missing(self) -> int:
        """Tensors that have not come, of the parts of which some have come."""
        return sum(load.missing or 0 for load in self._loads.values())

    @property
    def has_model(self) -> bool:
        """Whether some tensors of the model have come."""
        return 0 in self._loads

    def add(self, tensors: Sequence[CheckpointTensor]) -> None:
        """Write these tensors. Raises what ``load_weights`` raises."""
        for number, updated in enumerate(self._parts):
            read = [tensor for tensor in tensors if updated.reads(tensor.name)]
            if read and number not in self._loads:
                self._loads[number] = WeightLoad(updated, self._in_thread)
            if read:
                self._loads[number].add(read)

    def finish(self) -> None:
        for load in self._loads.values():
            load.finish()

    def cancel(self) -> None:
        for load in self._loads.values():
            load.cancel()
