"""Checks of an engine with several ranks: what the ranks can divide."""

from __future__ import annotations

from lightserve.config import WorkerConfig
from lightserve.errors import OptionError
from lightserve.model_files.config.model_config import ModelConfig


def check_ranks(worker: WorkerConfig, model: ModelConfig) -> None:
    """Check that the ranks can divide the model."""
    model.check_tp(worker.attention_tp)
    if worker.pp > model.num_layers:
        raise OptionError(f"pp={worker.pp}: the model has {model.num_layers} layers, and each stage needs one")
    if worker.ep == 1 or model.experts_name is None:
        return
    experts = model.count(model.experts_name)
    if experts % worker.ep:
        raise OptionError(f"ep={worker.ep}: it does not divide the {experts} experts of the model")
