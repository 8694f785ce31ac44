"""What a weight update fills: the model, and what drafts for it.

A trainer may leave out what drafts: texts are right with the drafts of older weights, and fewer of them are accepted.
If some of its tensors come, the update is complete when all have come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain, product
from typing import Any

from lightserve.common.basemodel import CheckpointTensor, TpPartBaseModel
from lightserve.common.checkpoint.reader import module_tensors, open_checkpoint, tensor_metadata
from lightserve.config import WorkerConfig
from lightserve.errors import ModelFilesError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.mtp import FORMATS, mtp_format
from lightserve.model_files.source import ModelSource, resolve, stored_as
from lightserve.models.served_config import read_served_config
from lightserve.worker.weights.load import WeightLoad


class UpdatedPart(ABC):
    is_of_drafts = False  # no text depends on it

    @abstractmethod
    def reads(self, name: str) -> bool:
        """Whether a tensor of this name is loaded."""

    @abstractmethod
    def check_some(self, tensors: Iterable[CheckpointTensor]) -> set[str]:
        """Check some tensors that are read, on the meta device. Returns the names of those that are used."""

    @abstractmethod
    def load_weights(
        self, checkpoint: Iterable[CheckpointTensor], report_missing: Callable[[int], None] = lambda count: None
    ) -> None:
        """Write all tensors that are read, in place."""

    @abstractmethod
    def source(self, path: str) -> ModelSource: ...

    @abstractmethod
    def check_folder(self, path: str) -> None:
        """Raises an error of the files if a folder does not fit. Nothing is changed."""

    def load_folder(self, path: str) -> None:
        self.load_weights(tensor for tensor in self._tensors(self.source(path)) if self.reads(tensor.name))

    def is_in(self, path: str) -> bool:
        """Whether a folder has tensors that are read."""
        return any(self.reads(tensor.name) for tensor in tensor_metadata(self.source(path)))

    def _tensors(self, source: ModelSource) -> Iterable[CheckpointTensor]:
        return open_checkpoint(source)


class ModelPart(UpdatedPart):
    def __init__(self, model: TpPartBaseModel, config: WorkerConfig) -> None:
        self._model = model
        self._config = config
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

    def source(self, path: str) -> ModelSource:
        return stored_as(resolve(path), self._config.quantization, packed_by_default=False)

    def check_folder(self, path: str) -> None:
        source, served = self.source(path), self._model
        config = self._read_config(source)
        metadata = tuple(chain(tensor_metadata(source), self._modules(source)))
        args = replace(served.args, config=config, tensor_metadata=metadata, checkpoint=None)
        kind = type(served)
        if config.model_type != served.config.model_type:
            raise ModelFilesError(
                f"{path} has a {config.model_type} model, but the server runs {served.config.model_type}; "
                "start another server for it"
            )
        of_folder = kind.__new__(kind)
        of_folder._init_args(args)
        check_same_model(path, served, of_folder)
        kind.unused_tensors(args)

    def _read_config(self, source: ModelSource) -> ModelConfig:
        return read_served_config(source, self._config)

    def _tensors(self, source: ModelSource) -> Iterator[CheckpointTensor]:
        return chain(open_checkpoint(source), self._modules(source))

    def _modules(self, source: ModelSource) -> Iterator[CheckpointTensor]:
        """The dense modules of a pooling model."""
        pooling = self._model.args.pooling
        return iter(()) if pooling is None else module_tensors(source.path, pooling.module_folders)


def check_same_model(path: str, served: TpPartBaseModel, of_folder: TpPartBaseModel) -> None:
    """Tensors of equal shapes may still be computed with in other ways, as with another base of the rotation."""
    if len(served.layer_specs) != len(of_folder.layer_specs):
        raise ModelFilesError(
            f"{path}: config.json has {len(of_folder.layer_specs)} layers, the server's model {len(served.layer_specs)}"
        )
    check_same(path, "the model", served.spec, of_folder.spec)
    for number, (mine, theirs) in enumerate(zip(served.layer_specs, of_folder.layer_specs, strict=True)):
        check_same(path, f"layer {number}", mine, theirs)


def check_same(path: str, what: str, mine: Any, theirs: Any, ignored: Sequence[str] = ("config",)) -> None:
    """Two dataclasses of ``what``, the served one and that of a folder, without fields that have whole configs."""
    names = [field.name for field in fields(mine) if field.name not in ignored]
    differing = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
    if differing:
        raise ModelFilesError(
            f"{path}: config.json differs for {what} in {', '.join(differing)}; only equal models can be loaded in "
            "place"
        )


class PartLoads:
    """One load of each part whose tensors come."""

    def __init__(self, in_thread: Callable[[], None]) -> None:
        """``in_thread``: see WeightLoad."""
        self._in_thread = in_thread
        self._loads: dict[UpdatedPart, WeightLoad] = {}
        self._tensors: set[tuple[UpdatedPart, str]] = set()  # that have come

    @property
    def missing(self) -> int:
        """Tensors that have not come, of the parts of which some have come."""
        return sum(load.missing or 0 for load in self._loads.values())

    @property
    def has_model(self) -> bool:
        """Whether some tensors of the model have come."""
        return not all(updated.is_of_drafts for updated in self._loads)

    @property
    def has_drafts(self) -> bool:
        """Whether some tensors of what drafts have come."""
        return any(updated.is_of_drafts for updated in self._loads)

    def has_any(self, names: Iterable[str], parts: Iterable[UpdatedPart]) -> bool:
        """Whether some of these tensors of the parts have come already."""
        return not self._tensors.isdisjoint(product(parts, names))

    def add(self, tensors: Sequence[CheckpointTensor], parts: Iterable[UpdatedPart]) -> None:
        """Write these tensors into the parts that read them. Raises what ``load_weights`` raises."""
        for updated in parts:
            read = [tensor for tensor in tensors if updated.reads(tensor.name)]
            if read and updated not in self._loads:
                self._loads[updated] = WeightLoad(updated, self._in_thread)
            if read:
                self._loads[updated].add(read)
            self._tensors |= {(updated, tensor.name) for tensor in read}

    def finish(self) -> None:
        for load in self._loads.values():
            load.finish()

    def cancel(self) -> None:
        for load in self._loads.values():
            load.cancel()
