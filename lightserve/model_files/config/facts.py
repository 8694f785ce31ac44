"""What the files of a model tell before its weights load, for the table of features that exclude each other."""

from __future__ import annotations

from lightserve.config import WorkerConfig
from lightserve.config.combinations import ModelFacts
from lightserve.model_files.config.kv_dtype import resolve_kv_dtype
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.pooling import PoolingConfig


def model_facts(worker: WorkerConfig, model: ModelConfig, pooling: PoolingConfig | None) -> ModelFacts:
    return ModelFacts(
        model.model_type,
        generates_text=pooling is None,
        has_kv_cache=pooling is None or pooling.is_causal,
        kv_dtype=resolve_kv_dtype(worker.kv_dtype, model),
        has_experts=model.experts_name is not None,
        has_windows=model.has_windows,
        has_states=any(model.has_state(layer) for layer in range(model.num_layers)),
        is_of_transformers=model.is_of_transformers,
    )
