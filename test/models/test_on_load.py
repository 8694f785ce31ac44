"""``--quantization``: float weights become codes while they are loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightserve.bench.model_cost import ModelCost
from lightserve.common import ops
from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig, Parallel, RankGroup, TpPartBaseModel
from lightserve.common.ops import in_groups
from lightserve.common.quantization import QuantizedLinear, UnquantizedLinear
from lightserve.common.quantization.quantize import KINDS, quantize
from lightserve.errors import ModelFilesError, OptionError
from lightserve.model_files.quantization import OnLoadConfig, OnLoadScheme, read_on_load_config
from lightserve.models.registry import get_model_class, read_model_config
from test.models.session import Session
from test.models.tiny import build_hf, build_ours, checkpoint_of

PROMPTS = {0: [5, 17, 3, 99, 42, 8, 1], 1: [77, 2, 130]}
# relative to the largest number of a group: half a step of the codes
ERROR = {"fp8": 2**-4, "int8": 0.5 / 127, "w4": 1 / 15}


def build_on_load(hf: Any, kind: str, checkpoint: list[CheckpointTensor] | None, tp: RankGroup) -> TpPartBaseModel:
    config = ModelConfig.from_hf(hf.config.to_dict())
    config = replace(config, quantization=OnLoadConfig(OnLoadScheme(kind)))
    args = ModelArgs(config, torch.float32, torch.device("cpu"), Parallel(tp=tp), checkpoint, 512, 8, 128)
    return get_model_class(config.model_type)(args)


@pytest.mark.parametrize("group", [None, 16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_code_is_the_nearest_one(kind: str, group: int | None) -> None:
    weight = torch.randn(6, 64)
    weight[0] = 0
    group = group or (64 if kind == "w4" else None)

    quantized = quantize(weight, KINDS[kind], group)

    largest = in_groups(weight, group or 64).abs().amax(-1, keepdim=True)
    error = in_groups(quantized.dequantize() - weight, group or 64).abs()
    assert (error <= ERROR[kind] * largest * 1.001).all()
    assert quantized.shape == (6, 64)


def test_16_numbers_of_a_group_stay_as_they_are() -> None:
    """As in a GGUF file with blocks of type Q4_1."""
    codes = torch.arange(16).repeat(3, 4)
    weight = codes * torch.tensor([0.5, 3.0, 0.01])[:, None] + torch.tensor([7.0, -5.0, -0.1])[:, None]

    quantized = quantize(weight, KINDS["w4"], 32)

    torch.testing.assert_close(quantized.dequantize(), weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-one-kv-head"])
def test_the_logits_are_those_of_the_rounded_weights(name: str, kind: str) -> None:
    hf = build_hf(name)
    checkpoint = [CheckpointTensor(n, tensor.clone(), file) for n, tensor, file in checkpoint_of(hf)]

    ours = build_on_load(hf, kind, checkpoint, RankGroup())

    assert isinstance(ours.layer_weights[0].o_proj.method, QuantizedLinear)
    assert isinstance(ours.pre_post_weight.lm_head.method, UnquantizedLinear)
    for tensor_name, tensor, _ in checkpoint_of(hf):
        if ".layers." in tensor_name and tensor.ndim == 2:
            group = next(g for g in (32, 16) if tensor.shape[1] % g == 0) if kind == "w4" else None
            tensor.copy_(quantize(tensor, KINDS[kind], group).dequantize())
    expected = Session(build_ours(hf)).step(PROMPTS)
    torch.testing.assert_close(Session(ours).step(PROMPTS), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_are_as_large_as_those_of_a_float_model(kind: str) -> None:
    model = build_on_load(build_hf("llama-gqa"), kind, None, RankGroup())
    method = model.layer_weights[0].o_proj.method

    assert isinstance(method, QuantizedLinear)
    assert 0.015 < float(method.weight.dequantize().std()) < 0.025
    assert Session(model).step(PROMPTS).isfinite().all()


def test_ranks_that_cut_a_group_have_smaller_ones() -> None:
    model = build_on_load(build_hf("llama-gqa"), "w4", None, RankGroup(rank=1, size=2))

    method = model.layer_weights[0].ffn.down_proj.method  # type: ignore[attr-defined]
    assert isinstance(method, QuantizedLinear)
    assert method.weight.group_size == 16


def test_ranks_that_cut_a_group_too_small_are_refused() -> None:
    with pytest.raises(ModelFilesError, match=r"down_proj: a rank has the inputs 24 to 48, .* 32 into groups of 8;"):
        build_on_load(build_hf("llama-gqa"), "w4", None, RankGroup(rank=1, size=4))


def test_a_quantised_checkpoint_is_not_quantised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightserve.model_files.quantization import quant_config

    monkeypatch.setitem(quant_config.PARSERS, "toy", lambda table: OnLoadConfig(OnLoadScheme("int8")))
    config = build_hf("llama-gqa").config.to_dict() | {"quantization_config": {"quant_method": "toy"}}

    with pytest.raises(ModelFilesError, match=r"--quantization fp8: the checkpoint is quantised already"):
        read_model_config(config, None, "fp8")


def config_of(tmp_path: Path, table: Any) -> OnLoadConfig:
    path = tmp_path / "quantization.json"
    path.write_text(json.dumps(table))
    return read_on_load_config(path)


def build_from(config: OnLoadConfig, hf: Any) -> TpPartBaseModel:
    model_config = replace(ModelConfig.from_hf(hf.config.to_dict()), quantization=config)
    args = ModelArgs(
        model_config, torch.float32, torch.device("cpu"), Parallel(tp=RankGroup()), checkpoint_of(hf), 512, 8, 128
    )
    return get_model_class(model_config.model_type)(args)


def test_a_file_chooses_by_module(tmp_path: Path) -> None:
    modules = {"model.layers.1.mlp": "none", "re:.*down_proj": "int8", "lm_head": "fp8"}
    hf = build_hf("llama-gqa")

    model = build_from(config_of(tmp_path, {"default": "w4", "modules": modules}), hf)

    def weight_of(linear: Any) -> object:
        return type(linear.method.weight)

    first, second = cast("list[Any]", model.layer_weights)
    assert weight_of(first.qkv_proj) is ops.Int4Weight
    assert weight_of(first.ffn.down_proj) is ops.Int8Weight
    assert weight_of(second.ffn.down_proj) is torch.Tensor
    assert weight_of(model.pre_post_weight.lm_head) is ops.Fp8Weight
    assert weight_of(model.pre_post_weight.embedding) is torch.Tensor
    assert Session(model).step(PROMPTS).isfinite().all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"default": "int3"}, "default is int3; it must be one of fp8, int8, w4, none"),
        ({"modules": {"lm_head": 8}}, "lm_head is 8; it must be"),
        ({"modules": ["lm_head"]}, "modules is no object"),
        ({"layers": {}}, "unknown field layers; the fields are default and modules"),
        ({"modules": {"re:(": "fp8"}}, r"'\(' is not a regular expression"),
    ],
)
def test_a_file_with_unknown_values_is_refused(table: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        config_of(tmp_path, table)


def test_a_file_that_names_no_module_of_the_model_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"default": "int8", "modules": {"mlp.dwon_proj": "fp8"}})

    with pytest.raises(ModelFilesError, match=r"mlp.dwon_proj is no module of this model, such as"):
        build_from(config, build_hf("llama-gqa"))


@pytest.mark.parametrize(("kind", "bytes_per_weight"), [("fp8", 1), ("int8", 1), ("w4", 0.5)])
def test_quantised_weights_count_as_what_a_step_reads(kind: str, bytes_per_weight: float) -> None:
    hf = build_hf("llama-gqa")
    plain = ModelCost.of(build_ours(hf))

    quantized = ModelCost.of(build_on_load(hf, kind, None, RankGroup()))

    assert quantized.layer_params == plain.layer_params
    saved = plain.weight_bytes - quantized.weight_bytes
    assert 0.9 < saved / ((4 - bytes_per_weight) * plain.layer_params) <= 1
