"""The tensors of a model's files, those of a pooling model's modules included."""

from __future__ import annotations

from collections.abc import Iterator

from lightserve.common.basemodel import CheckpointTensor
from lightserve.common.checkpoint.reader import module_tensors, open_checkpoint, tensor_metadata, total_bytes
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.source import ModelSource
from lightserve.utils.progress import Progress


def with_progress(source: ModelSource, pooling: PoolingConfig | None) -> Iterator[CheckpointTensor]:
    with Progress("weights", total_bytes(source)) as progress:
        for tensor in open_checkpoint(source):
            yield tensor
            progress.advance(tensor.tensor.nbytes)
    if pooling is not None:
        yield from module_tensors(source.path, pooling.module_folders)


def all_metadata(source: ModelSource, pooling: PoolingConfig | None) -> Iterator[CheckpointTensor]:
    yield from tensor_metadata(source)
    if pooling is not None:
        yield from module_tensors(source.path, pooling.module_folders)
