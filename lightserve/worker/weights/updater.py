"""A worker's part in a weight update: it checks, receives and loads what the router commands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import torch

from lightserve.common.basemodel import CheckpointTensor, TpPartBaseModel
from lightserve.common.checkpoint.reader import module_tensors, open_checkpoint, tensor_metadata
from lightserve.common.device import Device
from lightserve.config import WorkerConfig
from lightserve.errors import InvalidRequestError, LightserveError, ModelFilesError, RequestError
from lightserve.messages.weights import (
    CancelLoad,
    CheckFolder,
    CheckTensors,
    FinishLoad,
    JoinNccl,
    JoinTorchGroup,
    LeaveGroup,
    LoadFolder,
    ReadTensor,
    ReceiveTensors,
    WorkerWeightsCommand,
    WorkerWeightsReply,
)
from lightserve.model_files.config.text_part import is_of_other_part
from lightserve.model_files.source import ModelSource, resolve, stored_as
from lightserve.models.served_config import read_served_config
from lightserve.utils.logger import init_logger
from lightserve.worker.speculation.heads.head import DraftHead
from lightserve.worker.weights.buffers import metadata, received
from lightserve.worker.weights.groups import NcclGroup, TorchGroup, TrainerGroup
from lightserve.worker.weights.parts import HeadPart, PartLoads, UpdatedPart, parts_of

logger = init_logger(__name__)


class WeightUpdater:
    """Serves one command at a time. The router makes sure that no step runs while weights are written."""

    def __init__(
        self,
        config: WorkerConfig,
        model: TpPartBaseModel,
        platform: Device,
        rank: int,
        head: DraftHead | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._parts = parts_of(model, head)
        self._platform = platform
        self._rank = rank
        self._groups: dict[str, TrainerGroup] = {}
        self._load: PartLoads | None = None
        self._names: set[str] = set()  # that the open load has got

    def handle(self, command: WorkerWeightsCommand) -> WorkerWeightsReply:
        try:
            self._set_device()
            with torch.inference_mode():
                return self._handle(command)
        except LightserveError as error:
            is_client_error = isinstance(error, RequestError | ModelFilesError)
            return WorkerWeightsReply(str(error), is_client_error)
        except Exception as error:  # of torch: the trainer is gone, or memory is short
            logger.warning("the weight update failed: %s", error, exc_info=error)
            lines = str(error).splitlines() or [""]
            return WorkerWeightsReply(f"model worker {self._rank}: {type(error).__name__}: {lines[0]}")

    def _handle(self, command: WorkerWeightsCommand) -> WorkerWeightsReply:
        match command:
            case JoinTorchGroup() | JoinNccl():
                self._join(command)
            case LeaveGroup():
                self._leave(command.name)
            case CheckFolder():
                self._check_folder(command.path)
            case LoadFolder():
                self._load_folder(command.path)
            case CheckTensors():
                return self._check_tensors(command)
            case ReceiveTensors():
                self._receive(command)
            case FinishLoad():
                return self._finish()
            case CancelLoad():
                self._cancel()
            case ReadTensor():
                return WorkerWeightsReply(values=self._values(command))
        return WorkerWeightsReply(missing=None if self._load is None else self._load.missing)

    def _set_device(self) -> None:
        """Of the thread."""
        self._platform.set_current(self._model.device)

    def _wait_for_device(self) -> None:
        """A copy to the host comes after all that was launched."""
        torch.zeros(1, device=self._model.device).cpu()

    def _join(self, command: JoinTorchGroup | JoinNccl) -> None:
        self._leave(command.name)
        backend = command.backend if isinstance(command, JoinTorchGroup) else "nccl"
        known = sorted({"gloo", self._platform.comm_backend})
        if backend not in known:
            raise InvalidRequestError(
                f"the device {self._platform.name} has no backend {backend}; use {' or '.join(known)}"
            )
        kind: Any = TorchGroup if isinstance(command, JoinTorchGroup) else NcclGroup
        self._groups[command.name] = kind(command, self._rank, self._model.device)

    def _leave(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    # from a folder

    def _check_folder(self, path: str) -> None:
        source, model_args = self._source(path), self._model.args
        config = read_served_config(source, self._config)
        args = replace(model_args, config=config, tensor_metadata=tuple(self._metadata(source)), checkpoint=None)
        kind = type(self._model)
        if config.model_type != self._model.config.model_type:
            raise ModelFilesError(
                f"{path} has a {config.model_type} model, but the server runs {self._model.config.model_type}; "
                "start another server for it"
            )
        of_folder = kind.__new__(kind)
        of_folder._init_args(args)
        self._check_same_model(path, of_folder)
        kind.unused_tensors(args)
        for updated in self._parts_in(args.tensor_metadata):
            if isinstance(updated, HeadPart):
                updated.check_all(args.tensor_metadata)
        self._warn_of_other_parts(tensor.name for tensor in args.tensor_metadata)

    def _check_same_model(self, path: str, of_folder: TpPartBaseModel) -> None:
        """Tensors of equal shapes may still be computed with in other ways, as with another base of the rotation."""
        served = self._model
        if len(served.layer_specs) != len(of_folder.layer_specs):
            raise ModelFilesError(
                f"{path}: config.json has {len(of_folder.layer_specs)} layers, the server's model "
                f"{len(served.layer_specs)}"
            )
        differences = {"the model": _differences(served.spec, of_folder.spec)}
        for number, (mine, theirs) in enumerate(zip(served.layer_specs, of_folder.layer_specs, strict=True)):
            differences[f"layer {number}"] = _differences(mine, theirs)
        for name, differing in differences.items():
            if differing:
                raise ModelFilesError(
                    f"{path}: config.json differs for {name} in {', '.join(differing)}; only equal models can be "
                    "loaded in place"
                )

    def _warn_of_other_parts(self, names: Iterable[str]) -> None:
        """An encoder computes them, in a process of its own."""
        count = sum(map(is_of_other_part, names)) if self._model.config.multimodal_type is not None else 0
        if count and not self._rank:
            logger.warning("%d tensors of the vision tower are left out: images are encoded as before", count)

    def _load_folder(self, path: str) -> None:
        self._cancel()
        source = self._source(path)
        for updated in self._parts_in(tensor_metadata(source)):
            tensors = chain(open_checkpoint(source), self._modules(source))
            updated.load_weights(tensor for tensor in tensors if updated.reads(tensor.name))
        self._wait_for_device()

    def _parts_in(self, tensors: Iterable[CheckpointTensor]) -> list[UpdatedPart]:
        """The model, and the layer for drafts if a folder has it. Many are written without."""
        of_model, *heads = self._parts
        names = [tensor.name for tensor in tensors if not of_model.reads(tensor.name)]
        return [of_model, *(head for head in heads if any(map(head.reads, names)))]

    def _source(self, path: str) -> ModelSource:
        return stored_as(resolve(path), self._config.quantization, packed_by_default=False)

    def _metadata(self, source: ModelSource) -> Iterator[CheckpointTensor]:
        yield from tensor_metadata(source)
        yield from self._modules(source)

    def _modules(self, source: ModelSource) -> Iterator[CheckpointTensor]:
        """The dense modules of a pooling model."""
        pooling = self._model.args.pooling
        return iter(()) if pooling is None else module_tensors(source.path, pooling.module_folders)

    # from a trainer

    def _check_tensors(self, command: CheckTensors) -> WorkerWeightsReply:
        self._group(command.group)
        names = [tensor.name for tensor in command.tensors]
        if len(set(names)) < len(names):
            raise InvalidRequestError("names: one of them occurs twice")
        announced, used = list(metadata(command.tensors)), set()
        for updated in self._parts:
            used |= updated.check_some(tensor for tensor in announced if updated.reads(tensor.name))
        self._warn_of_other_parts(names)
        missing = None if self._load is None else self._load.missing
        return WorkerWeightsReply(used=len(used), has_repeated=not self._names.isdisjoint(names), missing=missing)

    def _receive(self, command: ReceiveTensors) -> None:
        group = self._group(command.group)
        device = self._model.device
        parts = received(command.tensors, command.buffering, command.buffer_bytes, group.receive, device)
        if command.discards:
            for _ in parts:
                pass
            return
        if command.restarts:
            self._cancel()
        if self._load is None:
            self._load, self._names = PartLoads(self._parts, self._set_device), set()
        load = self._load
        try:
            for tensors in parts:
                load.add(tensors)
                self._names.update(tensor.name for tensor in tensors)
        except BaseException:
            self._cancel()
            raise

    def _group(self, name: str) -> TrainerGroup:
        group = self._groups.get(name)
        if group is None:
            raise InvalidRequestError(f"there is no weight update group {name[:100]!r}; create it first")
        return group

    def _finish(self) -> WorkerWeightsReply:
        if self._load is None:
            raise InvalidRequestError("no weights have come since the update started")
        load, self._load = self._load, None
        load.finish()
        self._wait_for_device()
        return WorkerWeightsReply(has_only_drafts=not load.has_model)

    def _cancel(self) -> None:
        if self._load is not None:
            self._load.cancel()
            self._load = None

    def _values(self, command: ReadTensor) -> list[float]:
        pieces = [
            piece
            for layer in (self._model.pre_post_weight, *self._model.layer_weights)
            for piece in layer.pieces()
            if piece.name == self._model.own_name(command.name)
        ]
        if not pieces:
            raise InvalidRequestError(f"the model has no weight {command.name[:100]!r}")
        if pieces[0].into is None:
            raise InvalidRequestError(f"{command.name[:100]}: it is stored quantised, or on another rank")
        flat = pieces[0].into.reshape(-1)[: command.limit].float().cpu()
        return [number if math.isfinite(number) else 0.0 for number in flat.tolist()]


def _differences(mine: Any, theirs: Any) -> list[str]:
    """Fields of two specs, without the whole config."""
    names = [field.name for field in fields(mine) if field.name != "config"]
    return [name for name in names if getattr(mine, name) != getattr(theirs, name)]
