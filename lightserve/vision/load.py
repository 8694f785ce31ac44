"""Loads the vision tower of a checkpoint. The text model of the same files loads in the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.errors import CheckpointError
from lightserve.model_files.source import ModelSource
from lightserve.vision.qwen import QwenTower, QwenVision

PREFIXES = ("model.visual.", "visual.")


def load_tower(source: ModelSource, has_weights: bool, dtype: torch.dtype, device: torch.device) -> QwenTower:
    """``has_weights``: if not, they are random, as with --load_format dummy."""
    hf = source.hf_config()
    config = QwenVision.read(str(hf["multimodal_type"]), vision_config(hf))
    with torch.device("meta"):
        tower = QwenTower(config)
    tower = tower.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if has_weights:
        _fill(tower, source)
    else:
        for parameter in tower.parameters():
            parameter.normal_(std=0.02)
    return tower


def vision_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = hf.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json has no vision_config; fetch it again")
    return vision


def _fill(tower: QwenTower, source: ModelSource) -> None:
    missing = dict(tower.named_parameters())
    for name, tensor, file in open_checkpoint(source):
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            continue
        parameter = missing.pop(name.removeprefix(prefix), None)
        if parameter is None:
            raise CheckpointError(f"{file}: tensor {name} has no place in the vision tower; fetch the files again")
        _copy(parameter, tensor, f"{file}: tensor {name}")
    if missing:
        raise CheckpointError(f"{source.path}: tensor {PREFIXES[1]}{next(iter(missing))} is missing; fetch it again")


def _copy(parameter: Tensor, tensor: Tensor, text: str) -> None:
    if tensor.dim() == 5:  # the weight of the patches is stored as a convolution
        tensor = tensor.flatten(1)
    if tensor.shape != parameter.shape:
        wanted = "x".join(map(str, parameter.shape))
        raise CheckpointError(f"{text} has the shape {'x'.join(map(str, tensor.shape))}, wanted {wanted}")
    parameter.copy_(tensor)
