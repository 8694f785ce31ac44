"""What a worker that has loaded its model tells those that plan its steps."""

from __future__ import annotations

from lightserve.config import WorkerConfig
from lightserve.messages.control import EngineInfo, RoutedExpertsShape
from lightserve.model_files.source import ModelSource
from lightserve.worker.kv.identity import exchanged_identity
from lightserve.worker.worker import ModelWorker


def engine_info(worker: ModelWorker, config: WorkerConfig, source: ModelSource) -> EngineInfo:
    """The same on all ranks."""
    vocab_size, experts = worker.model_config.vocab_size, worker.model.routed_experts_shape
    return EngineInfo(
        max_total_token_num=worker.max_total_token_num,
        max_req_total_len=worker.longest_request,
        kv_groups=worker.kv_groups,
        pooling=worker.pooling_limits,
        vocab_size=vocab_size,
        pipeline_depth=worker.pipeline_depth,
        eos_token_ids=tuple(token for token in source.eos_token_ids() if token < vocab_size),
        dtype_and_device=worker.dtype_and_device,
        step_limits=worker.step_limits,
        launch_lead_s=worker.launch_lead_s,
        step_timeout_s=worker.step_timeout_s if config.step_timeout is None else config.step_timeout,
        lora_slots=config.num_loras,
        cpu_kv=worker.cpu_kv,
        kv_identity=exchanged_identity(worker.kv_identity, worker.model, len(worker.kv_groups)),
        sight=worker.sight,
        sight_window=worker.model_config.window,
        routed_experts=None if experts is None else RoutedExpertsShape(*experts),
        speculation="" if config.speculation is None else config.speculation.summary,
    )
