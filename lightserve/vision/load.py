"""Loads the vision tower of a checkpoint. The text model of the same files loads in the workers."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.errors import CheckpointError
from lightserve.media.layout import ImageLayout
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.source import ModelSource
from lightserve.vision.tower import VisionTower, make_tower


def load_tower(
    source: ModelSource, layout: ImageLayout, has_weights: bool, dtype: torch.dtype, device: torch.device
) -> VisionTower:
    """``has_weights``: if not, they are random, as with --load_format dummy."""
    tower = make_tower(read_image_files(source), layout)
    tower = tower.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if has_weights:
        _fill(tower, source)
    else:
        for parameter in tower.parameters():
            parameter.normal_(std=0.02)
    tower.pack()
    return tower


def _fill(tower: VisionTower, source: ModelSource) -> None:
    missing = dict(tower.named_parameters())
    for name, tensor, file in open_checkpoint(source):
        own_name = tower.own_name(name)
        if own_name is None:
            continue
        parameter = missing.pop(own_name, None)
        if parameter is None:
            raise CheckpointError(f"{file}: tensor {name} has no place in the vision tower; fetch the files again")
        _copy(parameter, tensor, f"{file}: tensor {name}")
    if missing:
        raise CheckpointError(f"{source.path}: tensor {tower.prefixes[0]}{next(iter(missing))} is missing; fetch it")


def _copy(parameter: Tensor, tensor: Tensor, text: str) -> None:
    if tensor.dim() > 3:  # the weight of the patches is stored as a convolution
        tensor = tensor.flatten(1)
    if tensor.shape != parameter.shape:
        wanted = "x".join(map(str, parameter.shape))
        raise CheckpointError(f"{text} has the shape {'x'.join(map(str, tensor.shape))}, wanted {wanted}")
    parameter.copy_(tensor)
