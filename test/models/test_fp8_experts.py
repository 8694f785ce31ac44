"""Mixtures of experts in fp8 blocks, as DeepSeek and Qwen3-30B-A3B-FP8 store them, beside the dequantised model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common.ops import Fp8Weight
from lightserve.common.quantization import QuantizedExperts
from test.models.architectures.case import Tiny, build
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.tiny import build_model

PROMPT = [5, 17, 3, 99, 42, 8, 1]
BLOCK = 128
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
FLOATS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "mlp.gate.weight",
    "indexer.weights_proj.weight",
)  # matrices that are not quantised


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what they stand for."""
    rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
    heights, widths = rows.bincount().tolist(), columns.bincount().tolist()
    blocks = [part.split_with_sizes(widths, dim=1) for part in weight.split_with_sizes(heights)]
    scales = torch.stack([torch.stack([block.abs().max() / 448 for block in row]) for row in blocks])
    by_number = scales[rows][:, columns]
    codes = (weight / by_number).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * by_number


def quantized(tiny: Tiny) -> tuple[Tiny, Tiny]:
    """The model in fp8, and the same in floats."""
    stored, floats = dict(tiny.tensors), dict(tiny.tensors)
    for name, tensor in tiny.tensors.items():
        if tensor.ndim == 2 and not name.endswith(FLOATS):
            stored[name], stored[f"{name}_scale_inv"], floats[name] = in_blocks(tensor)
    config = {**tiny.config_json, "quantization_config": QUANTIZATION}
    return replace(tiny, config_json=config, tensors=stored), replace(tiny, tensors=floats)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "qwen3_moe"])
def test_experts_in_fp8_blocks_give_the_logits_of_the_dequantised_model(name: str) -> None:
    case = CASES[name]
    fields = {**case.fields, "moe_intermediate_size": 160, "index_topk": 3}
    in_fp8, in_floats = quantized(build(replace(case, fields=fields)))

    model = build_model(in_fp8.config_json, in_fp8.checkpoint())

    method = model.layer_weights[-1].ffn.experts.method  # type: ignore[attr-defined]
    assert isinstance(method, QuantizedExperts)
    assert isinstance(method.w2, Fp8Weight)
    expected = Session(build_model(in_floats.config_json, in_floats.checkpoint())).step({0: PROMPT})
    logits = Session(model).step({0: PROMPT})
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
