"""What the flags of an LLM must agree with before a weight loads."""

from __future__ import annotations

from lightserve.config import HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig
from lightserve.config.combinations import Setup, check_combinations
from lightserve.model_files.config.facts import model_facts
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.source import ModelSource, pooling_of, stored_as
from lightserve.models.served_config import read_served_config
from lightserve.server.checks import check_ranks


def checked_model(worker: WorkerConfig, source: ModelSource) -> ModelConfig:
    model = read_served_config(stored_as(source, worker.quantization, packed_by_default=False), worker)
    facts = model_facts(
        worker, model, pooling_of(source, worker.model_type, worker.task, worker.pooling, worker.score_template)
    )
    config = ServerConfig(worker=worker, router=RouterConfig(), http=HttpConfig(), launch=LaunchConfig())
    check_combinations(Setup(config, facts, is_offline=True))
    check_ranks(worker, model)
    return model
