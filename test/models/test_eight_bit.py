"""Checkpoints in fp8 and int8 give the logits of their dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lightserve.common import ops
from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig, Parallel, RankGroup, TpPartBaseModel
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.common.quantization import (
    LinearMethod,
    LinearPart,
    LinearSpec,
    QuantizedLinear,
    StackedLinear,
    UnquantizedLinear,
    eight_bit,
)
from lightserve.errors import CheckpointError
from lightserve.models.registry import get_model_class
from test.models.architectures.case import build as build_tiny
from test.models.architectures.cases import CASES
from test.models.eight_bit_files import FILES, fp8_channel, int8_channel, is_quantized, quantized, unpack
from test.models.session import Session
from test.models.tiny import build_model, build_ours
from test.ranks import run_ranks

PROMPTS = {0: [5, 17, 3, 99, 42, 8, 1], 1: [77, 2, 130]}
ONE_RANK = RankGroup()
CUT_WIDTH = 384  # three blocks, of which two ranks cut one


def wide_llama(seed: int = 0, intermediate_size: int = 512) -> Any:
    """Weights of several blocks of 128 x 128, the last ones partial; two ranks can still split the inputs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=intermediate_size,
        max_position_embeddings=128,
    )
    return AutoModelForCausalLM.from_config(config).float().eval()


def narrow_llama() -> Any:
    """The inputs are no whole blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=192,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=160,
        max_position_embeddings=128,
        attention_bias=True,
    )
    return AutoModelForCausalLM.from_config(config).float().eval()


def build(
    hf: Any, quantization: dict[str, Any], checkpoint: list[CheckpointTensor] | None, tp: RankGroup = ONE_RANK
) -> TpPartBaseModel:
    config = ModelConfig.from_hf({**hf.config.to_dict(), "quantization_config": quantization})
    args = ModelArgs(config, torch.float32, torch.device("cpu"), Parallel(tp=tp), checkpoint, 512, 8, 128)
    return get_model_class(config.model_type)(args)


def assert_same_logits(ours: TpPartBaseModel | Tensor, hf: Any) -> None:
    expected = Session(build_ours(hf)).step(PROMPTS)
    found = ours if isinstance(ours, Tensor) else Session(ours).step(PROMPTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "on_gpu", "share"), [("fp8-channel", True, 1), ("fp8-channel", False, 0), ("ct-int8", True, 0)]
)
def test_weights_are_computed_in_fp8_if_the_device_rounds_their_inputs(name: str, on_gpu: bool, share: float) -> None:
    if on_gpu:
        rounds_inputs()

    assert build(wide_llama(), FILES[name].config, None).fp8_share == share


PARTIAL = [(name, narrow_llama) for name in ("fp8-block", "modelopt-block", "ct-int8", "ct-naive-groups")]


@pytest.mark.parametrize(("name", "model"), [*((name, wide_llama) for name in FILES), *PARTIAL])
def test_a_file_gives_the_logits_of_its_dequantised_weights(name: str, model: Callable[[], Any]) -> None:
    hf = model()
    checkpoint = quantized(hf, FILES[name].pack)

    ours = build(hf, FILES[name].config, checkpoint)

    assert isinstance(ours.layer_weights[0].o_proj.method, QuantizedLinear)
    assert isinstance(ours.pre_post_weight.lm_head.method, UnquantizedLinear)
    assert_same_logits(ours, hf)


def spec_of(*parts: LinearPart) -> LinearSpec:
    return LinearSpec(parts, 256, slice(0, 256))


SHUFFLED = torch.arange(256).view(2, 2, 64).transpose(1, 2).flatten()  # within blocks of 128


@pytest.mark.parametrize(
    ("spec", "is_whole"),
    [
        (spec_of(LinearPart("q", 256, slice(0, 256)), LinearPart("k", 200, slice(0, 200))), True),
        (spec_of(LinearPart("q", 192, slice(0, 192)), LinearPart("k", 256, slice(0, 256))), False),
        (spec_of(LinearPart("q", 512, slice(128, 256))), True),
        (spec_of(LinearPart("q", 512, slice(64, 192))), False),
        (spec_of(LinearPart("q", 256, SHUFFLED)), True),
        (spec_of(LinearPart("q", 256, SHUFFLED.flip(0).roll(1))), False),
        (spec_of(LinearPart("qkv", 256, slice(0, 64)), LinearPart("qkv", 256, slice(64, 256))), True),
        (spec_of(LinearPart("head", 200, slice(0, 200), padding=56)), False),
    ],
)
def test_blocks_of_rows_are_whole_if_each_has_one_scale_in_the_checkpoint(spec: LinearSpec, is_whole: bool) -> None:
    assert eight_bit.has_whole_blocks(spec) == is_whole


def _run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    tp = connect_ranks(rank, ParallelSizes(tp=size), f"file://{folder}/store", "gloo").tp
    for name, file_format in FILES.items():
        hf = wide_llama(intermediate_size=CUT_WIDTH)
        ours = build(hf, file_format.config, quantized(hf, file_format.pack), tp)
        torch.save(Session(ours).step(PROMPTS), f"{folder}/{name}.{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_ranks_split_every_format(tmp_path: Path) -> None:
    run_ranks(_run_rank, 2, 2, str(tmp_path))

    for name in FILES:
        hf = wide_llama(intermediate_size=CUT_WIDTH)
        quantized(hf, FILES[name].pack)
        for rank in range(2):
            assert_same_logits(torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True), hf)


@pytest.mark.parametrize("name", FILES)
def test_dummy_weights_give_finite_logits(name: str) -> None:
    logits = Session(build(wide_llama(), FILES[name].config, None)).step(PROMPTS)

    assert logits.isfinite().all()
    assert logits.std() > 0


def test_modules_that_the_config_ignores_stay_floats() -> None:
    hf = wide_llama()
    ignored = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp"]
    config = FILES["fp8-channel"].config | {"modules_to_not_convert": ignored}

    def chosen(name: str, tensor: Tensor) -> bool:
        return is_quantized(name, tensor) and not name.startswith(tuple(f"{prefix}." for prefix in ignored))

    ours = build(hf, config, quantized(hf, fp8_channel, chosen))

    first, second = cast("list[Any]", ours.layer_weights)
    assert isinstance(first.qkv_proj.method, StackedLinear)
    assert isinstance(second.qkv_proj.method, QuantizedLinear)
    assert_same_logits(ours, hf)


def test_groups_of_a_config_may_have_different_formats() -> None:
    hf = wide_llama()
    both = FILES["ct-fp8"].config["config_groups"]["group_0"], FILES["ct-int8"].config["config_groups"]["group_0"]
    groups = {
        "attention": {**both[0], "format": "float-quantized", "targets": ["re:.*self_attn.*"]},
        "others": {**both[1], "format": "int-quantized"},
    }
    config = FILES["ct-fp8"].config | {"format": "mixed-precision", "config_groups": groups, "ignore": []}

    def pack(name: str, tensor: Tensor) -> bool:
        return tensor.ndim == 2 and "embed" not in name

    attention = quantized(hf, fp8_channel, lambda name, tensor: pack(name, tensor) and "self_attn" in name)
    others = quantized(hf, int8_channel, lambda name, tensor: pack(name, tensor) and "self_attn" not in name)
    checkpoint = [t for t in attention if "self_attn" in t.name] + [t for t in others if "self_attn" not in t.name]

    ours = build(hf, config, checkpoint)

    assert isinstance(ours.pre_post_weight.lm_head.method, QuantizedLinear)
    assert_same_logits(ours, hf)


def test_scales_of_the_kv_cache_are_no_unknown_tensors(caplog: pytest.LogCaptureFixture) -> None:
    hf = wide_llama()
    scales = [
        CheckpointTensor(f"model.layers.{i}.self_attn.{name}", torch.ones(()), "memory")
        for i in range(2)
        for name in ("k_proj.k_scale", "v_proj.v_scale", "attn.q_scale", "k_scale", "k_proj.output_scale")
    ]

    build(hf, FILES["modelopt"].config, [*quantized(hf, FILES["modelopt"].pack), *scales])

    assert "not used" not in caplog.text


def rounds_inputs() -> None:
    """As on a GPU."""
    ops.use_traits(ops.DeviceTraits(dot_dtypes=(torch.int8, torch.float8_e4m3fn)))


@pytest.mark.parametrize("name", ["fp8-static", "ct-fp8-block", "ct-int8", "ct-int8-static"])
def test_rounded_inputs_change_logits_little_and_alike_where_norms_are_fused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = wide_llama()
    checkpoint = quantized(hf, FILES[name].pack)
    rounds_inputs()
    ours = build(hf, FILES[name].config, checkpoint)

    fused = Session(ours).step(PROMPTS)
    monkeypatch.setattr(LinearMethod, "fuses_silu_and_mul", False)
    for method in ("add_rms_norm_mm", "add_rms_norm_gate_up", "fuses_silu_and_mul"):
        monkeypatch.delattr(QuantizedLinear, method)
    separate = Session(build(hf, FILES[name].config, quantized(hf, FILES[name].pack))).step(PROMPTS)

    torch.testing.assert_close(fused, separate, rtol=1e-5, atol=1e-5)
    exact = Session(build_ours(hf)).step(PROMPTS)
    assert 1e-4 < float((fused - exact).norm() / exact.norm()) < 0.1


def test_the_latent_expansion_of_deepseek_is_dequantised() -> None:
    tiny = build_tiny(CASES["deepseek_v2"])
    config = FILES["ct-fp8"].config
    group = config["config_groups"]["group_0"] | {"targets": ["re:.*kv_b_proj"]}
    packed: dict[str, Tensor] = {}
    for name, tensor in tiny.tensors.items():
        prefix = name.removesuffix(".weight")
        stored = fp8_channel(tensor) if prefix.endswith("kv_b_proj") else {"weight": tensor}
        packed |= {f"{prefix}.{suffix}": value for suffix, value in stored.items()}
        if len(stored) > 1:
            tensor.copy_(unpack(stored))
    checkpoint = (CheckpointTensor(name, tensor, "memory") for name, tensor in packed.items())
    quantization = config | {"config_groups": {"group_0": group}}

    ours = build_model({**tiny.config_json, "quantization_config": quantization}, checkpoint)

    expected = Session(build_model(tiny.config_json, tiny.checkpoint())).step(PROMPTS)
    torch.testing.assert_close(Session(ours).step(PROMPTS), expected)


Change = Callable[[Tensor], Tensor]
SCALE = "model.layers.1.mlp.down_proj.weight_scale"
CODES = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("file_format", "name", "change", "message"),
    [
        ("ct-int8", SCALE, lambda t: None, rf"lacks 1 tensors: {SCALE}"),
        ("ct-int8", SCALE, lambda t: t[:-1], rf"{SCALE} has shape \(255, 1\).*needs \(256, 1\)"),
        ("ct-int8", CODES, lambda t: t.float(), rf"{CODES} is float32; this model needs int8"),
        ("ct-fp8-block", SCALE, lambda t: t[:, :-1], rf"{SCALE} has shape \(2, 3\).*needs \(2, 4\)"),
        ("fp8-static", CODES, lambda t: t.to(torch.float8_e5m2), r"is float8_e5m2; this model needs float8_e4m3fn"),
        ("ct-naive-groups", SCALE, lambda t: t.int(), rf"{SCALE} is int32; this model needs float16 or"),
    ],
)
def test_a_wrong_tensor_is_named(file_format: str, name: str, change: Change, message: str) -> None:
    hf = wide_llama()
    changed = [
        CheckpointTensor(n, change(tensor) if n == name else tensor, file)
        for n, tensor, file in quantized(hf, FILES[file_format].pack)
    ]

    with pytest.raises(CheckpointError, match=message):
        build(hf, FILES[file_format].config, [tensor for tensor in changed if tensor.tensor is not None])
