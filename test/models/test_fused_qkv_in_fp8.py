"""q, k and v of MiMo-V2.5 in one tensor of fp8 blocks, which begin anew at each of the ranks that wrote it."""

from __future__ import annotations

from dataclasses import replace

import torch

from test.models.architectures.case import build
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.test_fp8_experts import QUANTIZATION, in_blocks
from test.models.tiny import build_model

PROMPT = [5, 17, 3, 99, 42, 8, 1]
RANKS = 2


def test_fused_projections_in_fp8_give_the_logits_of_the_dequantised_ones() -> None:
    case = CASES["mimo_v2"]
    tiny = build(replace(case, fields={**case.fields, "head_dim": 116, "v_head_dim": 40, "hidden_size": 160}))
    stored, floats = dict(tiny.tensors), dict(tiny.tensors)
    others = [name.removesuffix(".weight") for name in tiny.tensors if "qkv_proj" not in name]
    for name, tensor in tiny.tensors.items():
        if "qkv_proj" in name:
            assert len(tensor) // RANKS % 128  # the last block of a rank is smaller
            of_ranks = zip(*map(in_blocks, tensor.chunk(RANKS)), strict=True)
            stored[name], stored[f"{name}_scale_inv"], floats[name] = map(torch.cat, of_ranks)
    in_fp8 = {**tiny.config_json, "quantization_config": {**QUANTIZATION, "ignored_layers": others}}

    logits = Session(build_model(in_fp8, replace(tiny, tensors=stored).checkpoint())).step({0: PROMPT})

    expected = Session(build_model(tiny.config_json, replace(tiny, tensors=floats).checkpoint())).step({0: PROMPT})
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
