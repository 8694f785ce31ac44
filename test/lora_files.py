"""LoRA adapters in PEFT's format, and what they add to a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    sizes: Mapping[str, tuple[int, int]],
    *,
    seed: int = 0,
    rank: int = 4,
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """An adapter with random matrices for modules of these sizes (out, in).

    ``config`` replaces fields of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out_size, in_size) in sizes.items():
        a = torch.randn(rank, in_size, generator=generator) * in_size**-0.5
        b = torch.randn(out_size, rank, generator=generator) * strength * rank**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return save_adapter(folder, tensors, r=rank, **config)


def save_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": targets,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def deltas(folder: Path) -> dict[str, Tensor]:
    """What the adapter adds to each weight, by PEFT's formula. Patterns are not used here."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            rank = len(a)
            scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
            module = name.removeprefix("base_model.model.").partition(".lora_A")[0]
            found[module] = scale * (tensors[name.replace("lora_A", "lora_B")].float() @ a.float())
    return found


def add_to(model: torch.nn.Module, folder: Path) -> None:
    """Merge an adapter into the weights of a transformers model."""
    with torch.no_grad():
        for module, delta in deltas(folder).items():
            model.get_submodule(module).weight += delta  # type: ignore[operator]


def linear_sizes(model: torch.nn.Module, targets: Iterable[str] = LLAMA_TARGETS) -> dict[str, tuple[int, int]]:
    """The linears of a transformers model whose names end with one of ``targets``."""
    ends = tuple(targets)
    modules = ((name, module) for name, module in model.named_modules() if name.endswith(ends))
    return {name: tuple(module.weight.shape) for name, module in modules}
