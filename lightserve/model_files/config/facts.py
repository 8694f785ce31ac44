"""What the files of a model tell before its weights load, for the table of features that exclude each other."""

from __future__ import annotations

from lightserve.config import WorkerConfig
from lightserve.config.combinations import ModelFacts
from lightserve.model_files.config.kv_dtype import resolve_kv_dtype
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.windowed_share import may_save_memory
from lightserve.model_files.pooling import PoolingConfig


def model_facts(worker: WorkerConfig, model: ModelConfig, pooling: PoolingConfig | None) -> ModelFacts:
    return ModelFacts(
        model.model_type,
        generates_text=pooling is None,
        has_kv_cache=pooling is None or pooling.is_causal,
        kv_dtype=resolve_kv_dtype(worker.kv_dtype, model),
        has_latent_attention=model.hf.get("kv_lora_rank") is not None,
        has_experts=model.experts_name is not None,
        has_windows=model.has_windows,
        has_windowed_pool=_has_windowed_pool(worker, model),
        has_states=any(model.has_state(layer) for layer in range(model.num_layers)),
        is_of_transformers=model.is_of_transformers,
    )


def _has_windowed_pool(worker: WorkerConfig, model: ModelConfig) -> bool:
    """Whether the worker may make one. It knows more: without much memory it makes a single pool."""
    if model.window is None or not model.has_windows:
        return False
    if worker.max_windowed_token_num is not None:
        return worker.max_windowed_token_num > 0
    return may_save_memory(model.window, model.request_len(worker.max_req_total_len))
