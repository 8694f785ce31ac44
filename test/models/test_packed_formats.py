"""Quantised checkpoints give the logits of the weights that they stand for, in every format that is packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig, Parallel, RankGroup, TpPartBaseModel
from lightserve.common.ops import Codebook4Weight, Int4Weight, Int8Weight, Mxfp4Weight, QuantizedWeight
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.common.quantization import QuantizedLinear, StackedLinear, UnquantizedLinear
from lightserve.common.quantization.weight_format import format_of
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files.quantization.grouped import PackQuantizedScheme
from lightserve.models.registry import get_model_class
from test.models import packers
from test.models.session import Session
from test.models.tiny import LLAMA, build_ours, checkpoint_of
from test.ranks import run_ranks

ONE_RANK = RankGroup()
PROMPTS = [[5, 17, 3, 99, 42, 8, 1], [77, 2, 130], [64]]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 136}


@dataclass(frozen=True)
class Case:
    config: Mapping[str, Any]  # quantization_config
    packer_of: Callable[[str], packers.Packer | None]  # by module
    kind: type[QuantizedWeight]  # of o_proj


def in_layers(packer: packers.Packer) -> Callable[[str], packers.Packer | None]:
    return lambda module: packer if ".layers." in module else None


def _dynamic(module: str) -> packers.Packer | None:
    """v_proj has other rules than q and k, layer 1 has no quantised mlp, and the head is quantised."""
    if "layers.1.mlp" in module or "embed" in module:
        return None
    return partial(packers.gptq, bits=8, group=64) if module.endswith("v_proj") else packers.gptq


def _extra(module: str) -> packers.Packer | None:
    if ".layers." not in module or module == "model.layers.0.self_attn.q_proj":
        return None
    return partial(packers.gptq, bits=8, group=-1) if module.endswith("down_proj") else packers.gptq


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def compressed(format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"g": group},
    }


CASES = {
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 32}, in_layers(packers.awq), Int4Weight),
    "awq-rows": Case(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"},
        in_layers(partial(packers.awq, group=-1)),
        Int4Weight,
    ),
    "gptq": Case(GPTQ, in_layers(packers.gptq), Int4Weight),
    "gptq-v2": Case(
        {**GPTQ, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        in_layers(partial(packers.gptq, group=64, sym=False, version=2)),
        Int4Weight,
    ),
    "gptq-8-bit": Case({**GPTQ, "bits": 8}, in_layers(partial(packers.gptq, bits=8)), Int8Weight),
    "gptq-8-bit-rows": Case(
        {**GPTQ, "bits": 8, "group_size": -1, "sym": False, "desc_act": True},
        in_layers(partial(packers.gptq, bits=8, group=-1, sym=False)),
        Int8Weight,
    ),
    "gptq-act-order": Case(
        {**GPTQ, "desc_act": True, "sym": False}, in_layers(partial(packers.gptq, sym=False, desc_act=True)), Int4Weight
    ),
    "gptq-dynamic": Case(
        {
            **GPTQ,
            "lm_head": True,
            "dynamic": {r"+:.*\.v_proj": {"bits": 8, "group_size": 64}, r"-:model\.layers\.1\.mlp.*": {}},
        },
        _dynamic,
        Int4Weight,
    ),
    "auto-round": Case(
        {
            **AUTO_ROUND,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {
                r".*down_proj": {"bits": 8, "group_size": -1},
                "model.layers.0.self_attn.q_proj": {"bits": 16},
            },
        },
        _extra,
        Int4Weight,
    ),
    "auto-round-awq": Case({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, in_layers(packers.awq), Int4Weight),
    "pack-quantized": Case(
        compressed(symmetric=False), in_layers(partial(packers.pack_quantized, sym=False)), Int4Weight
    ),
    "pack-quantized-8-bit": Case(
        compressed(num_bits=8, strategy="channel", group_size=None),
        in_layers(partial(packers.pack_quantized, bits=8, group=-1)),
        Int8Weight,
    ),
    "pack-quantized-act-order": Case(
        compressed(actorder="group"), in_layers(partial(packers.pack_quantized, is_act_order=True)), Int4Weight
    ),
    "mxfp4-pack-quantized": Case(
        compressed("mxfp4-pack-quantized", type="float"), in_layers(packers.mxfp4), Mxfp4Weight
    ),
    "nf4": Case(BNB4, in_layers(packers.bnb4), Codebook4Weight),
    "nf4-nested": Case(
        {**BNB4, "bnb_4bit_use_double_quant": True},
        in_layers(partial(packers.bnb4, is_nested=True)),
        Codebook4Weight,
    ),
    "fp4": Case(
        {**BNB4, "bnb_4bit_quant_type": "fp4"}, in_layers(partial(packers.bnb4, quant_type="fp4")), Codebook4Weight
    ),
    "bnb-int8": Case(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "layers.1.mlp"]},
        lambda module: packers.bnb8 if ".layers." in module and "layers.1.mlp" not in module else None,
        Int8Weight,
    ),
}


def build_hf() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA(**SIZES, attention_bias=True, mlp_bias=True)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.15)
    return model


def pack(hf: Any, case: Case) -> list[CheckpointTensor]:
    """The checkpoint of ``hf``; the weights of ``hf`` become those that the codes stand for."""
    tensors: list[CheckpointTensor] = []
    for name, tensor, file in checkpoint_of(hf):
        module = name.removesuffix(".weight")
        packer = case.packer_of(module) if name.endswith(".weight") and tensor.ndim == 2 else None
        if packer is None:
            tensors.append(CheckpointTensor(name, tensor, file))
            continue
        packed = packer(tensor)
        tensor.copy_(packed.weight)
        tensors += [CheckpointTensor(f"{module}.{suffix}", part, file) for suffix, part in packed.tensors.items()]
    return tensors


def build(hf: Any, case: Case, checkpoint: list[CheckpointTensor] | None, tp: RankGroup = ONE_RANK) -> TpPartBaseModel:
    config = ModelConfig.from_hf({**hf.config.to_dict(), "quantization_config": case.config})
    args = ModelArgs(config, torch.float32, torch.device("cpu"), Parallel(tp=tp), checkpoint, 512, 8, 128)
    return get_model_class(config.model_type)(args)


def logits_of(model: TpPartBaseModel) -> Tensor:
    session = Session(model)
    prefill = session.step(dict(enumerate(PROMPTS)))
    return torch.cat([prefill, session.step({0: [11], 1: [12, 13], 2: [14]})])


def assert_same(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_the_dequantised_model(name: str) -> None:
    hf, case = build_hf(), CASES[name]
    checkpoint = pack(hf, case)

    ours = build(hf, case, checkpoint)

    method = ours.layer_weights[0].o_proj.method
    assert isinstance(method, QuantizedLinear)
    assert isinstance(method.weight, case.kind)
    assert_same(logits_of(ours), logits_of(build_ours(hf)))


def _run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    tp = connect_ranks(rank, ParallelSizes(tp=size), f"file://{folder}/store", "gloo").tp
    for name in CASES:
        hf = build_hf()
        torch.save(logits_of(build(hf, CASES[name], pack(hf, CASES[name]), tp)), f"{folder}/{name}.{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_two_ranks_split_every_format(tmp_path: Path) -> None:
    run_ranks(_run_rank, 2, 2, str(tmp_path))

    for name in CASES:
        hf = build_hf()
        pack(hf, CASES[name])
        expected = logits_of(build_ours(hf))
        for rank in range(2):
            assert_same(torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True), expected)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "gptq-8-bit", "nf4-nested"])
def test_dummy_weights_give_finite_logits(name: str) -> None:
    logits = logits_of(build(build_hf(), CASES[name], None))

    assert logits.isfinite().all()
    assert logits.std() > 0


def test_parts_of_a_linear_may_have_different_schemes() -> None:
    hf = build_hf()
    ours = build(hf, CASES["gptq-dynamic"], pack(hf, CASES["gptq-dynamic"]))

    first, second = cast("list[Any]", ours.layer_weights)
    qkv = first.qkv_proj.method
    assert isinstance(qkv, StackedLinear)
    assert [len(list(method.pieces())) for method in qkv.methods] == [10, 5]  # q and k are one
    assert isinstance(second.ffn.down_proj.method, UnquantizedLinear)
    assert isinstance(ours.pre_post_weight.lm_head.method, QuantizedLinear)


PACKED = [
    (4, 32, True, False),
    (4, 32, False, False),
    (4, -1, True, False),
    (4, -1, False, False),
    (8, 64, True, False),
    (8, -1, False, False),
    (4, 32, True, True),
]


@pytest.mark.parametrize(("bits", "group", "sym", "is_act_order"), PACKED)
def test_pack_quantized_weights_are_read(bits: int, group: int, sym: bool, is_act_order: bool) -> None:
    weight = torch.randn(20, 128)
    packed = packers.pack_quantized(weight, bits, group, sym=sym, is_act_order=is_act_order)
    scheme = PackQuantizedScheme(bits, None if group == -1 else group, sym, is_act_order)
    weight_format = format_of(scheme)

    assert {name: tuple(tensor.shape) for name, tensor in packed.tensors.items()} == {
        name: raw.shape for name, raw in weight_format.raw_tensors(20, 128).items()
    }
    found = weight_format.convert(packed.tensors)
    order = weight_format.input_order(packed.tensors)
    assert (order is not None) == is_act_order
    expected = packed.weight if order is None else packed.weight[:, order]
    torch.testing.assert_close(found.dequantize(), expected, rtol=1e-5, atol=1e-6)


def test_static_groups_need_no_permutation() -> None:
    """Files with static groups say desc_act, but the inputs of a group are neighbours."""
    hf, case = build_hf(), CASES["gptq-act-order"]
    in_order = Case(case.config, in_layers(partial(packers.gptq, sym=False)), Int4Weight)

    ours = build(hf, case, pack(hf, in_order))

    method = ours.layer_weights[0].o_proj.method
    assert isinstance(method, QuantizedLinear)
    assert method.input_order is None
    assert_same(logits_of(ours), logits_of(build_ours(hf)))


Change = Callable[[Tensor], Tensor | None]
Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
WRONG: dict[str, tuple[str, str, Change, str]] = {
    "truncated scales": ("awq", f"{Q}.scales", lambda t: t[:-1], rf"{Q}.scales has shape \(3, 128\).*needs \(4, 128\)"),
    "wrong group size": ("gptq", f"{Q}.qzeros", lambda t: t[::2], rf"{Q}.qzeros has shape \(2, 16\).*needs \(4, 16\)"),
    "missing": ("gptq", f"{Q}.g_idx", lambda t: None, rf"lacks 1 tensors: {Q}.g_idx"),
    "wrong type": ("gptq", f"{Q}.qweight", lambda t: t.long(), rf"{Q}.qweight is int64; this model needs int32"),
    "unsaid act-order": ("gptq", f"{Q}.g_idx", lambda t: t.flip(0), rf"{Q}: g_idx reorders the inputs, but config"),
    "uneven groups": ("gptq-act-order", f"{Q}.g_idx", lambda t: t * 0, rf"{Q}: g_idx has groups that are not of 32"),
    "two orders": (
        "gptq-act-order",
        f"{K}.g_idx",
        lambda t: t.flip(0),
        rf"{K}: it has another act-order than {Q[:20]}",
    ),
    "v2 zero points": (
        "gptq",
        f"{Q}.qzeros",
        lambda t: t + 1,
        rf"{Q}: config.json says sym, but the file has the zero",
    ),
    "codebook": ("nf4", f"{Q}.weight.quant_map", lambda t: t * 2, rf"{Q}: weight.quant_map is not that of nf4"),
    "quant state": (
        "nf4",
        f"{Q}.weight.quant_state.bitsandbytes__nf4",
        lambda t: t[:-9],
        rf"{Q}: weight.quant_state.bitsandbytes__nf4 is damaged",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_tensor_is_named(what: str) -> None:
    name, wrong, change, message = WRONG[what]
    hf = build_hf()
    tensors = [(t, change(t.tensor) if t.name == wrong else t.tensor) for t in pack(hf, CASES[name])]
    checkpoint = [t._replace(tensor=tensor) for t, tensor in tensors if tensor is not None]

    with pytest.raises(CheckpointError, match=message):
        build(hf, CASES[name], checkpoint)


def test_groups_of_8_are_refused_before_weights_are_loaded() -> None:
    case = Case({**GPTQ, "group_size": 8}, lambda module: None, Int4Weight)

    with pytest.raises(ModelFilesError, match=r"4-bit groups of 8 are not supported \(supported: multiples of 16\)"):
        build(build_hf(), case, None)
