"""Recurrent layers in fp8 blocks, as Qwen3-Next-FP8 and Qwen3.5-FP8 store them, beside the dequantised model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightserve.common.quantization import QuantizedLinear, UnquantizedLinear
from test.models.architectures.case import Tiny, build
from test.models.architectures.hybrid import CASES
from test.models.session import Session
from test.models.test_fp8_experts import QUANTIZATION, in_blocks
from test.models.tiny import build_model

PROMPT = [5, 17, 3, 99, 42, 8, 1]
# blocks of 128 rows end inside heads of q, k, v and z
FIELDS = {"linear_key_head_dim": 40, "linear_value_head_dim": 24, "num_experts": 3, "num_experts_per_tok": 3}
GATES = ("in_proj_ba", "in_proj_b", "in_proj_a")


def quantized(tiny: Tiny, floats: tuple[str, ...]) -> tuple[Tiny, Tiny]:
    """The linears of recurrent layers in fp8, except ``floats``; and the same model in floats."""
    stored, dequantized, skipped = dict(tiny.tensors), dict(tiny.tensors), []
    for name, tensor in tiny.tensors.items():
        if tensor.ndim != 2 or (not name.endswith("proj.weight") and "in_proj" not in name):
            continue
        module = name.removesuffix(".weight")
        if ".linear_attn." not in name or module.endswith(floats):
            skipped.append(module)
        else:
            stored[name], stored[f"{name}_scale_inv"], dequantized[name] = in_blocks(tensor)
    skipped += [name.removesuffix(".weight") for name in tiny.tensors if name.endswith("gate.weight")]
    quantization = {**QUANTIZATION, "modules_to_not_convert": ["lm_head", "mlp", "self_attn", *skipped]}
    config = {**tiny.config_json, "quantization_config": quantization}
    return replace(tiny, config_json=config, tensors=stored), replace(tiny, tensors=dequantized)


@pytest.mark.parametrize("floats", [(), GATES, (*GATES, "in_proj_z")], ids=["all", "without gates", "without z"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_recurrent_layers_in_fp8_blocks_give_the_logits_of_the_dequantised_model(
    name: str, floats: tuple[str, ...]
) -> None:
    case = CASES[name]
    in_fp8, in_floats = quantized(build(replace(case, fields={**case.fields, **FIELDS})), floats)

    model = build_model(in_fp8.config_json, in_fp8.checkpoint())

    mixer = model.layer_weights[0].mixer
    assert isinstance(mixer.out_proj.method, QuantizedLinear)  # type: ignore[attr-defined]
    assert isinstance(mixer.ba_proj.method, UnquantizedLinear) == bool(floats)  # type: ignore[attr-defined]
    expected = Session(build_model(in_floats.config_json, in_floats.checkpoint())).step({0: PROMPT})
    logits = Session(model).step({0: PROMPT})
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
