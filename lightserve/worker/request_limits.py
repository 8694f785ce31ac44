"""How many requests run at once, and how long they may be, unless the device or the model says less."""

from __future__ import annotations

import torch

from lightserve.common.basemodel import ModelConfig
from lightserve.common.device import Device
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.messages.control import DEFAULT_RUNNING
from lightserve.model_files.pooling import PoolingConfig


def max_running(
    config: WorkerConfig, model: ModelConfig, platform: Device, device: torch.device, parallel: Parallel
) -> int:
    """Requests at once, the same on all ranks. States of recurrent layers are large, and as many are kept as run."""
    if config.running_max_req_size is not None:
        return config.running_max_req_size
    has_states = any(map(model.has_state, range(model.num_layers)))
    if has_states:
        return DEFAULT_RUNNING
    return parallel.min_of_engine(platform.profile(device).step_limits.max_running, device)


def wanted_len(config: WorkerConfig, pooling: PoolingConfig | None) -> int | None:
    """The operator's limit, or that of sentence-transformers' files."""
    return config.max_req_total_len or (None if pooling is None else pooling.max_len)
