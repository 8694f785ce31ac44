"""The scale of attention in Gemma 2 and 3, which a GGUF file does not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightserve.model_files import resolve
from lightserve.model_files.config.model_config import ModelConfig
from test.models.architectures.case import build
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import save


@pytest.mark.parametrize(
    ("name", "layers", "scalar"), [("gemma3", 7, 16), ("gemma3", 62, 8), ("gemma2", 4, 16), ("gemma2", 46, 8)]
)
def test_the_27b_model_scales_attention_by_hidden_size_per_head(
    name: str, layers: int, scalar: int, tmp_path: Path
) -> None:
    one = replace(GGUF_CASES[name], steps=())
    path = save(one, build(one.case), tmp_path / "model.gguf", {"block_count": layers})

    found = ModelConfig.from_hf(resolve(str(path)).hf_config())

    assert found.number("query_pre_attn_scalar") == scalar
