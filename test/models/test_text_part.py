"""The language model of a checkpoint that reads images too is loaded alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightserve.common.basemodel import LoraArgs
from lightserve.errors import AdapterError
from lightserve.model_files.lora.adapter import read_adapter
from lightserve.models.registry import get_model_class
from test.lora_files import write_adapter
from test.models.architectures.case import build
from test.models.architectures.vision_language import CASES
from test.models.tiny import ONE_RANK, model_args

Q_PROJ = {"self_attn.q_proj": (96, 48)}


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_the_vision_part_are_not_reported_as_unused(name: str) -> None:
    tiny = build(CASES[name])
    metadata = [one._replace(tensor=one.tensor.to("meta")) for one in tiny.checkpoint()]

    args = replace(model_args(tiny.config_json, None, ONE_RANK), tensor_metadata=metadata)

    assert get_model_class(args.config.model_type).unused_tensors(args) == []


def check_adapter(folder: Path, prefix: str) -> None:
    """Of Qwen3-VL."""
    sizes = {f"{prefix}.{layer}.{name}": size for layer in range(3) for name, size in Q_PROJ.items()}
    adapter = read_adapter(write_adapter(folder, sizes))
    args = model_args(build(CASES["qwen3_vl"]).config_json, None, ONE_RANK)
    model_class = get_model_class(args.config.model_type)
    model = model_class.__new__(model_class)
    model._init_args(replace(args, lora=LoraArgs(1, 8, checked=(adapter,)), device=torch.device("meta")))
    model.check_adapters()


@pytest.mark.parametrize("prefix", ["model.language_model.layers", "language_model.model.layers", "model.layers"])
def test_an_adapter_may_name_the_language_model_as_files_do(prefix: str, tmp_path: Path) -> None:
    check_adapter(tmp_path, prefix)


def test_an_adapter_of_the_vision_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AdapterError, match=r"model.visual.blocks.0.self_attn.q_proj and 2 more modules are of the vision tower"
    ):
        check_adapter(tmp_path, "model.visual.blocks")
