"""Adapters of Gemma 3 have the names of transformers' modules, which are not those of the checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common.basemodel import ModelArgs, ModelConfig, TpPartBaseModel
from lightserve.common.parallel import Parallel
from lightserve.errors import AdapterError
from lightserve.model_files.lora.adapter import read_adapter
from lightserve.models.registry import get_model_class
from test.lora_files import add_to, linear_sizes, write_adapter
from test.models.architectures.case import MAX_LEN, Tiny, build, hf_logits
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.tiny import NUM_SLOTS

PROMPT = [5, 17, 3, 99, 42, 8, 1, 77, 23]
NEWER, OLDER = "model.language_model.", "language_model.model."


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return build(CASES["gemma3"])


def text_sizes(tiny: Tiny) -> dict[str, tuple[int, int]]:
    return {name: size for name, size in linear_sizes(tiny.hf).items() if name.startswith(NEWER)}


def model_with(tiny: Tiny, folder: Path) -> TpPartBaseModel:
    args = ModelArgs(
        config=ModelConfig.from_hf(tiny.config_json),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=Parallel(),
        checkpoint=tiny.checkpoint(),
        max_total_token_num=NUM_SLOTS,
        max_reqs=2,
        max_req_total_len=MAX_LEN,
        merged_adapter=read_adapter(folder),
    )
    return get_model_class(args.config.model_type)(args)


def merged_logits(tiny: Tiny, folder: Path) -> Tensor:
    hf: Any = copy.deepcopy(tiny.hf)
    add_to(hf, folder)
    return hf_logits(hf, PROMPT)[-1]


@pytest.mark.parametrize("prefix", [NEWER, OLDER], ids=["newer", "older"])
def test_the_names_of_newer_and_older_tools_mean_the_same_linears(tiny: Tiny, prefix: str, tmp_path: Path) -> None:
    sizes = text_sizes(tiny)
    renamed = {name.replace(NEWER, prefix): size for name, size in sizes.items()}

    ours = Session(model_with(tiny, write_adapter(tmp_path / "ours", renamed))).step({0: PROMPT})

    theirs = merged_logits(tiny, write_adapter(tmp_path / "theirs", sizes))
    assert (ours[0] - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_an_adapter_of_the_vision_tower_is_refused_by_its_name(tiny: Tiny, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, linear_sizes(tiny.hf, ["q_proj", "v_proj"]))

    with pytest.raises(
        AdapterError, match=r"vision_tower\S+ and 3 more modules are of the vision tower, which is not s"
    ):
        model_with(tiny, folder)
