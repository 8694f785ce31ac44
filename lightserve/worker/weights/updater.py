"""A worker's part in a weight update: it checks, receives and loads what the router commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.common.checkpoint.reader import tensor_metadata
from lightserve.common.device import Device
from lightserve.config import WorkerConfig
from lightserve.errors import InvalidRequestError, LightserveError, ModelFilesError, OptionError, RequestError
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
    WeightSelector,
    WorkerWeightsCommand,
    WorkerWeightsReply,
)
from lightserve.model_files.config.text_part import is_of_other_part
from lightserve.model_files.source import resolve
from lightserve.utils.logger import init_logger
from lightserve.worker.speculation.heads.draft_model import DraftModelHead
from lightserve.worker.speculation.heads.head import DraftHead, LayerHead
from lightserve.worker.weights.buffers import metadata, received
from lightserve.worker.weights.draft_parts import WeightParts
from lightserve.worker.weights.groups import NcclGroup, TorchGroup, TrainerGroup
from lightserve.worker.weights.parts import PartLoads

logger = init_logger(__name__)

ASLEEP = "the weights have no memory while the server sleeps; wake them first: POST /wake_up?tags=weights"


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
        self._head = head
        self._parts = WeightParts(config, model, head)
        self._platform = platform
        self._rank = rank
        self._groups: dict[str, TrainerGroup] = {}
        self._load: PartLoads | None = None
        self.are_away: Callable[[], bool] = lambda: False  # a sleep has moved the weights to the host

    def handle(self, command: WorkerWeightsCommand) -> WorkerWeightsReply:
        try:
            self._check_presence(command)
            self._set_device()
            with torch.inference_mode():
                return self._handle(command)
        except LightserveError as error:
            is_client_error = isinstance(error, RequestError | ModelFilesError | OptionError)
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
                self._check_folder(command)
            case LoadFolder():
                return self._load_folder(command)
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

    def _check_presence(self, command: WorkerWeightsCommand) -> None:
        if self.are_away() and not isinstance(command, JoinTorchGroup | JoinNccl | LeaveGroup | CancelLoad):
            raise InvalidRequestError(ASLEEP)

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

    def _check_folder(self, command: CheckFolder) -> None:
        path, selector = command.path, command.selector
        for updated in self._parts.in_folder(path, selector):
            updated.check_folder(path)
        if selector is not WeightSelector.DRAFT:
            self._warn_of_other_parts(tensor.name for tensor in tensor_metadata(resolve(path)))

    def _warn_of_other_parts(self, names: Iterable[str]) -> None:
        """An encoder computes them, in a process of its own."""
        count = sum(map(is_of_other_part, names)) if self._model.config.multimodal_type is not None else 0
        if count and not self._rank:
            logger.warning("%d tensors of the vision tower are left out: images are encoded as before", count)

    def _load_folder(self, command: LoadFolder) -> WorkerWeightsReply:
        self._cancel()
        parts = self._parts.in_folder(command.path, command.selector)
        for updated in parts:
            updated.load_folder(command.path)
        self._wait_for_device()
        are_of_drafts = [updated.is_of_drafts for updated in parts]
        return WorkerWeightsReply(has_model=not all(are_of_drafts), has_drafts=any(are_of_drafts))

    # from a trainer

    def _check_tensors(self, command: CheckTensors) -> WorkerWeightsReply:
        self._group(command.group)
        names = [tensor.name for tensor in command.tensors]
        if len(set(names)) < len(names):
            raise InvalidRequestError("names: one of them occurs twice")
        parts, announced, used = self._parts.of(command.selector), list(metadata(command.tensors)), set[str]()
        for updated in parts:
            used |= updated.check_some(tensor for tensor in announced if updated.reads(tensor.name))
        if command.selector is not WeightSelector.DRAFT:
            self._warn_of_other_parts(names)
        load = self._load
        return WorkerWeightsReply(
            used=len(used),
            has_repeated=load is not None and load.has_any(names, parts),
            missing=None if load is None else load.missing,
        )

    def _receive(self, command: ReceiveTensors) -> None:
        group = self._group(command.group)
        device = self._model.device
        received_tensors = received(command.tensors, command.buffering, command.buffer_bytes, group.receive, device)
        if command.discards:
            for _ in received_tensors:
                pass
            return
        if command.restarts:
            self._cancel()
        if self._load is None:
            self._load = PartLoads(self._set_device)
        parts = self._parts.of(command.selector)
        try:
            for tensors in received_tensors:
                self._load.add(tensors, parts)
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
        return WorkerWeightsReply(has_model=load.has_model, has_drafts=load.has_drafts)

    def _cancel(self) -> None:
        if self._load is not None:
            self._load.cancel()
            self._load = None

    def _values(self, command: ReadTensor) -> list[float]:
        pieces = [
            piece
            for model, layers in self._layers()
            for layer in layers
            for piece in layer.pieces()
            if piece.name == model.own_name(command.name)
        ]
        if not pieces:
            raise InvalidRequestError(f"the model has no weight {command.name[:100]!r}")
        if pieces[0].into is None:
            raise InvalidRequestError(f"{command.name[:100]}: it is stored quantised, or on another rank")
        flat = pieces[0].into.reshape(-1)[: command.limit].float().cpu()
        return [number if math.isfinite(number) else 0.0 for number in flat.tolist()]

    def _layers(self) -> Iterator[tuple[TpPartBaseModel, Sequence[LayerWeight]]]:
        """Of the model, and of what drafts."""
        yield self._model, (self._model.pre_post_weight, *self._model.layer_weights)
        if isinstance(self._head, LayerHead):
            yield self._model, (self._head.weights,)
        elif isinstance(self._head, DraftModelHead):
            draft = self._head.draft
            yield draft, (draft.pre_post_weight, *draft.layer_weights)
