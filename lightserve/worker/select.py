"""Which worker a model needs."""

from __future__ import annotations

from lightserve.config import WorkerConfig
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.source import ModelSource, pooling_of
from lightserve.worker.pooling_worker import PoolingWorker
from lightserve.worker.worker import ModelWorker


def worker_class(config: WorkerConfig, source: ModelSource) -> type[ModelWorker]:
    return ModelWorker if served_pooling(config, source) is None else PoolingWorker


def served_pooling(config: WorkerConfig, source: ModelSource) -> PoolingConfig | None:
    """None: the model generates text."""
    return pooling_of(source, config.model_type, config.task, config.pooling, config.score_template)
