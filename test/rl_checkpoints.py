"""Checkpoints of one tiny model with different weights, for tests of weight updates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.models import TINY, save_word_model

SHAPE = {**TINY, "num_hidden_layers": 2}


def save_checkpoints(root: Path, names: Sequence[str]) -> dict[str, Path]:
    """A folder below ``root`` for each name."""
    for seed, name in enumerate(names):
        folder = save_word_model(root / name, SHAPE)
        hf = LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_text())))
        torch.manual_seed(seed)
        save_file({key: _noise(tensor) for key, tensor in hf.state_dict().items()}, folder / "model.safetensors")
    return {name: root / name for name in names}


def _noise(like: Tensor) -> Tensor:
    scale = 0.5 if like.ndim > 1 else 0.1
    return (torch.randn(like.shape) * scale + (like.ndim == 1)).bfloat16()
