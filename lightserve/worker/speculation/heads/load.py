"""Loads the draft head that --speculative_config names, and gives it room in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from lightserve.common.basemodel import CheckpointTensor, TpPartBaseModel
from lightserve.common.basemodel.layer_weights.loader import check_weights, fill_dummy, load_weights
from lightserve.common.checkpoint.reader import open_checkpoint, tensor_metadata
from lightserve.config import WorkerConfig
from lightserve.config.speculation import SpeculativeConfig
from lightserve.errors import CheckpointError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.dflash import DFlashConfig
from lightserve.model_files.draft_head import Eagle3Config
from lightserve.model_files.mtp import check_mtp, mtp_format
from lightserve.model_files.source import ModelSource, resolve
from lightserve.worker.speculation.heads.dflash import DFlashHead
from lightserve.worker.speculation.heads.draft_model import DraftModelHead
from lightserve.worker.speculation.heads.eagle3 import Eagle3Head
from lightserve.worker.speculation.heads.head import DraftHead, LayerHead
from lightserve.worker.speculation.heads.mtp import MtpHead
from lightserve.worker.speculation.heads.proposer import num_extra_slots
from lightserve.worker.speculation.heads.vocabulary import VocabHead, plain_name


def load_draft_head(config: WorkerConfig, source: ModelSource, model: TpPartBaseModel) -> DraftHead | None:
    """None: the method has no head, or this is not the last stage of a pipeline. ``source``: of the model."""
    speculation = config.speculation
    if speculation is None or not speculation.has_head:
        return None
    if not model.pp.is_last:
        model.keep_states_after(_aux_layers(speculation, model))
        return None
    has_weights = config.load_format == "auto"
    head: DraftHead
    if speculation.method == "draft_model":
        head = _load_draft_model(model, resolve(speculation.model, needs_weights=has_weights), has_weights)
    else:
        head = _load(speculation, source, model, has_weights)
    extra = num_extra_slots(head, model.req_manager.max_reqs, speculation.num_speculative_tokens)
    for group in head.kv_groups():
        model.add_kv_group(replace(group, extra_slots=extra))
    return head


def _load_draft_model(model: TpPartBaseModel, files: ModelSource, has_weights: bool) -> DraftModelHead:
    try:
        return DraftModelHead(model, files, has_weights)
    except CheckpointError as error:
        raise CheckpointError(f"the draft model of --speculative_config ({files.path}): {error}") from error


def _load(speculation: SpeculativeConfig, source: ModelSource, model: TpPartBaseModel, has_weights: bool) -> LayerHead:
    head, files = _make(speculation, source, model, has_weights)
    if has_weights:
        _check(head, files, source)
    head.weights = head.new_weights(model.device)
    if has_weights:
        load_weights([head.weights], _tensors(head, files, source, open_checkpoint), model.config.num_layers + 1)
        head.check_values()
    else:
        fill_dummy([head.weights])
        head.finish_dummy()
    head.init_tables()
    return head


def without_head(
    speculation: SpeculativeConfig | None, model: ModelConfig, tensors: Iterable[CheckpointTensor]
) -> Iterable[CheckpointTensor]:
    """The tensors of a model's checkpoint without those that its MTP head reads."""
    if speculation is None or speculation.method != "mtp":
        return tensors
    prefix = mtp_format(model).prefix
    return (tensor for tensor in tensors if not tensor.name.startswith(prefix))


def _make(
    speculation: SpeculativeConfig, source: ModelSource, model: TpPartBaseModel, has_weights: bool
) -> tuple[LayerHead, ModelSource]:
    """The head without weights, and the files that have its tensors."""
    if speculation.method == "mtp":
        check_mtp(model.config)
        return MtpHead(model), source
    files = resolve(speculation.model, needs_weights=has_weights)
    return make_head(speculation.method, model, files, has_weights), files


def make_head(method: str, model: TpPartBaseModel, files: ModelSource, has_weights: bool = True) -> VocabHead:
    """A head with files of its own, without weights. Raises an OptionError for one of another model."""
    names = {plain_name(tensor.name) for tensor in tensor_metadata(files)} if has_weights else {"lm_head.weight"}
    if method == "dflash":
        return DFlashHead(model, DFlashConfig.read(files.path, model.config), names)
    return Eagle3Head(model, Eagle3Config.read(files.path, model.config), names)


def _aux_layers(speculation: SpeculativeConfig, model: TpPartBaseModel) -> tuple[int, ...]:
    """After which layers the head reads the hidden states of the model."""
    if speculation.method not in ("eagle3", "dflash"):
        return ()
    path = resolve(speculation.model, needs_weights=False).path
    config = DFlashConfig if speculation.method == "dflash" else Eagle3Config
    return config.read(path, model.config).aux_layers


def _tensors(
    head: LayerHead,
    files: ModelSource,
    source: ModelSource,
    read: Callable[[ModelSource], Iterable[CheckpointTensor]],
) -> Iterator[CheckpointTensor]:
    """Those of the head, and of the model what its last stage lacks."""
    yield from head.checkpoint(read(files))
    if head.needs_embedding:
        yield from head.embedding_of(read(source))


def _check(head: LayerHead, files: ModelSource, source: ModelSource) -> None:
    """Find a missing or misshapen tensor before memory is allocated."""
    tensors = _tensors(head, files, source, tensor_metadata)
    try:
        check_weights([head.new_weights(torch.device("meta"))], tensors, head.model.config.num_layers + 1)
    except CheckpointError as error:
        raise CheckpointError(f"the draft head of --speculative_config ({files.path}): {error}") from error
