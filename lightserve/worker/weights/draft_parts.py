"""What drafts, as parts of a weight update: layers that read hidden states of the model, or a smaller model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lightserve.common.basemodel import CheckpointTensor, TpPartBaseModel
from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.common.basemodel.layer_weights.loader import check_part, check_weights, load_weights
from lightserve.common.checkpoint.reader import tensor_metadata
from lightserve.config import WorkerConfig
from lightserve.errors import CheckpointError, InvalidRequestError, ModelFilesError
from lightserve.messages.weights import WeightSelector
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.source import ModelSource, resolve
from lightserve.worker.speculation.heads.draft_model import DraftModelHead, read_draft_config
from lightserve.worker.speculation.heads.head import DraftHead, HeadWeight, LayerHead
from lightserve.worker.speculation.heads.load import make_head
from lightserve.worker.speculation.heads.mtp import MtpHead
from lightserve.worker.speculation.heads.vocabulary import VocabHead
from lightserve.worker.weights.parts import ModelPart, UpdatedPart, check_same


class HeadPart(UpdatedPart):
    """Layers for drafts, without the copy of the model's embedding that the last stage of a pipeline has."""

    is_of_drafts = True

    def __init__(self, head: LayerHead) -> None:
        self._head = head

    def reads(self, name: str) -> bool:
        return self._head.reads(name)

    def check_some(self, tensors: Iterable[CheckpointTensor]) -> set[str]:
        try:
            return check_part([self._own(self._on_meta())], self._head.checkpoint(tensors))
        except CheckpointError as error:
            raise CheckpointError(f"the draft head: {error}") from error

    def load_weights(
        self, checkpoint: Iterable[CheckpointTensor], report_missing: Callable[[int], None] = lambda count: None
    ) -> None:
        head = self._head
        tensors = head.checkpoint(checkpoint)
        load_weights([self._own(head.weights)], tensors, self._num_layers, report_missing=report_missing)
        head.check_values()

    def _own(self, weights: HeadWeight) -> LayerWeight:
        return weights.without_embedding() if self._head.needs_embedding else weights

    def _on_meta(self) -> HeadWeight:
        return self._head.new_weights(torch.device("meta"))

    def _check_tensors(self, source: ModelSource) -> None:
        tensors = (tensor for tensor in tensor_metadata(source) if self.reads(tensor.name))
        try:
            check_weights([self._own(self._on_meta())], self._head.checkpoint(tensors), self._num_layers)
        except CheckpointError as error:
            raise CheckpointError(f"the draft head: {error}") from error

    @property
    def _num_layers(self) -> int:
        return self._head.model.config.num_layers + 1


class MtpPart(HeadPart):
    """In the folder of the model."""

    def __init__(self, head: MtpHead, of_model: ModelPart) -> None:
        super().__init__(head)
        self._of_model = of_model

    def source(self, path: str) -> ModelSource:
        return self._of_model.source(path)

    def check_folder(self, path: str) -> None:
        self._check_tensors(self.source(path))


class OwnFilesPart(HeadPart):
    """EAGLE-3 and DFlash, in a folder of their own."""

    def __init__(self, head: VocabHead, method: str) -> None:
        super().__init__(head)
        self._vocab_head = head
        self._method = method

    def source(self, path: str) -> ModelSource:
        return resolve(path)

    def check_folder(self, path: str) -> None:
        served, source = self._vocab_head, self.source(path)
        of_folder = make_head(self._method, served.model, source)
        check_same(path, "the draft head", served.config, of_folder.config, ignored=("layer", "layers"))
        if len(served.specs) != len(of_folder.specs):
            raise ModelFilesError(
                f"{path}: the draft head has {len(of_folder.specs)} layers, the served one {len(served.specs)}"
            )
        for number, (mine, theirs) in enumerate(zip(served.specs, of_folder.specs, strict=True)):
            check_same(path, f"layer {number} of the draft head", mine, theirs)
        if differing := served.own_tables ^ of_folder.own_tables:
            raise ModelFilesError(
                f"{path}: the draft head and the served one do not both have {', '.join(sorted(differing))}; "
                "write the tensors that the files of the served one have"
            )
        self._check_tensors(source)
        served.check_map_of(source)


class EmbeddingPart(UpdatedPart):
    """A copy of the model's embedding that the head in the last stage of a pipeline has."""

    def __init__(self, head: LayerHead, of_model: ModelPart) -> None:
        self._head = head
        self._of_model = of_model

    def reads(self, name: str) -> bool:
        return self._head.is_embedding_of_model(name)

    def check_some(self, tensors: Iterable[CheckpointTensor]) -> set[str]:
        """The model's part checks the same tensor."""
        return set()

    def load_weights(
        self, checkpoint: Iterable[CheckpointTensor], report_missing: Callable[[int], None] = lambda count: None
    ) -> None:
        head = self._head
        tensors = head.embedding_of(checkpoint)
        load_weights([head.weights.only_embedding()], tensors, head.model.config.num_layers, (), report_missing)

    def source(self, path: str) -> ModelSource:
        return self._of_model.source(path)

    def check_folder(self, path: str) -> None:
        """The model's part checks it."""


class DraftModelPart(ModelPart):
    is_of_drafts = True

    def __init__(self, head: DraftModelHead) -> None:
        super().__init__(head.draft, WorkerConfig())
        self._max_len = head.model.req_manager.max_len

    def check_some(self, tensors: Iterable[CheckpointTensor]) -> set[str]:
        try:
            return super().check_some(tensors)
        except CheckpointError as error:
            raise CheckpointError(f"the draft model: {error}") from error

    def source(self, path: str) -> ModelSource:
        return resolve(path)

    def _read_config(self, source: ModelSource) -> ModelConfig:
        return read_draft_config(source, self._max_len)


class WeightParts:
    """Those of a worker. Only the last stage of a pipeline drafts."""

    def __init__(self, config: WorkerConfig, model: TpPartBaseModel, head: DraftHead | None) -> None:
        speculation = config.speculation
        self._is_drafting = speculation is not None and speculation.has_head
        self._model = of_model = ModelPart(model, config)
        self._copies = [EmbeddingPart(head, of_model)] if isinstance(head, LayerHead) and head.needs_embedding else []
        self._mtp = [MtpPart(head, of_model)] if isinstance(head, MtpHead) else []
        self._drafts: list[UpdatedPart] = [*self._mtp]
        if isinstance(head, VocabHead) and speculation is not None:
            self._drafts.append(OwnFilesPart(head, speculation.method))
        elif isinstance(head, DraftModelHead):
            self._drafts.append(DraftModelPart(head))

    def of(self, selector: WeightSelector) -> list[UpdatedPart]:
        """Heads with files of their own have tensors that are named as those of the model: only DRAFT has them."""
        if selector is WeightSelector.DRAFT:
            if not self._is_drafting:
                raise InvalidRequestError(
                    "selector: this server has no draft head whose weights can be updated (--speculative_config)"
                )
            return self._drafts
        of_model: list[UpdatedPart] = [self._model, *self._copies]
        return of_model if selector is WeightSelector.TARGET else [*of_model, *self._mtp]

    def in_folder(self, path: str, selector: WeightSelector) -> list[UpdatedPart]:
        """Many checkpoints of models are written without the layer for drafts."""
        if selector is not WeightSelector.ALL:
            return self.of(selector)
        return [*self.of(WeightSelector.TARGET), *(updated for updated in self._mtp if updated.is_in(path))]
