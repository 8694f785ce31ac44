"""Experts whose weights are quantised: in every layout, split over ranks, and in wrong checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common.basemodel import (
    CheckpointTensor,
    ExpertsLayout,
    LayerSpec,
    ModelConfig,
    MoeFfnWeight,
    MoeNames,
    MoeSpec,
    Parallel,
    RankGroup,
    WeightContext,
)
from lightserve.common.basemodel.expert_rows import ExpertRows
from lightserve.common.basemodel.layer_weights.layer_weight import LayerWeight
from lightserve.common.basemodel.layer_weights.loader import fill_dummy, load_weights
from lightserve.common.ops import GatedSilu, Int8Weight, QuantizedWeight, Relu2, RouteSpec
from lightserve.common.quantization import (
    QuantizedExperts,
    QuantizedLinear,
    UnquantizedExperts,
    UnquantizedLinear,
    experts_method_factory,
    linear_method_factory,
    on_load as on_load_module,
)
from lightserve.common.quantization.on_load import OnLoadFormat
from lightserve.common.quantization.quantize import KINDS, quantize
from lightserve.common.quantization.weight_format import FORMATS
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files.quantization import OnLoadConfig, OnLoadScheme, QuantConfig, Scheme, read_quant_config
from test.models.architectures.case import SMALL
from test.models.test_linear_method import ToyFormat, ToyScheme
from test.models.test_packed_formats import CASES as PACKED_CASES

HIDDEN, WIDTH, EXPERTS = 64, 64, 6
MOE = MoeSpec(num_experts=EXPERTS, intermediate_size=WIDTH, route=RouteSpec(2, renormalize=True))
SPECS = {
    "each": MOE,
    "shared": replace(MOE, shared_size=2 * WIDTH),
    "shared beside": replace(MOE, shared_size=2 * WIDTH, has_shared_gate=True),
    "shared with a gate": replace(MOE, shared_size=WIDTH, has_shared_gate=True),
    "stacked": replace(MOE, layout=ExpertsLayout.STACKED),
    "transposed": replace(
        MOE, layout=ExpertsLayout.TRANSPOSED, experts_bias=True, activation=GatedSilu(1.702, 0.5, 1.0)
    ),
    "without a gate": replace(MOE, activation=Relu2(), shared_size=2 * WIDTH),
    "latent": replace(MOE, activation=Relu2(), shared_size=WIDTH, latent_size=32),
}
ONE_RANK = Parallel()


class Only(QuantConfig):
    """``scheme`` for the modules whose name contains one of ``names``."""

    def __init__(self, scheme: Scheme, *names: str) -> None:
        self.scheme, self.names = scheme, names

    def scheme_of(self, module: str) -> Scheme | None:
        return self.scheme if any(name in module for name in self.names) else None

    def __str__(self) -> str:
        return "a test"


class Layer(LayerWeight):
    def __init__(self, moe: MoeSpec, quantization: QuantConfig | None, parallel: Parallel = ONE_RANK) -> None:
        config = ModelConfig.from_hf(
            {**SMALL, "model_type": "any", "rms_norm_eps": 1e-5, "hidden_size": HIDDEN, "head_dim": 32}
        )
        config = replace(config, quantization=quantization)
        spec = LayerSpec(
            config=config,
            layer_num=0,
            num_heads=2,
            num_kv_heads=2,
            head_dim=32,
            hidden_size=HIDDEN,
            intermediate_size=40,
            norm_eps=1e-5,
            rope=None,
            scale=1.0,
            activation="silu" if isinstance(moe.activation, GatedSilu) else "relu2",
            is_gated=isinstance(moe.activation, GatedSilu),
            moe=moe,
        )
        methods = linear_method_factory(config), experts_method_factory(config)
        self.ffn = MoeFfnWeight(spec, moe, WeightContext(parallel, torch.float32, torch.device("cpu"), *methods))

    def load(self, tensors: dict[str, Tensor]) -> Layer:
        load_weights([self], [CheckpointTensor(*item, "memory") for item in tensors.items()], 1)
        return self


def on_load(kind: str) -> QuantConfig:
    return OnLoadConfig(OnLoadScheme(kind))


def random_checkpoint(moe: MoeSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pieces = Layer(moe, None).pieces()
    return {piece.name: torch.randn(piece.shape, generator=generator) * 0.3 for piece in pieces}


def scheme_of(config: QuantConfig, module: str) -> Scheme | None:
    is_router = module.endswith(("mlp.gate", "shared_expert_gate", "router"))
    return config.scheme_of_router(module) if is_router else config.scheme_of(module)


def dequantized(tensors: dict[str, Tensor], moe: MoeSpec, kind: str) -> dict[str, Tensor]:
    """The checkpoint with the numbers that the codes of its weights stand for."""

    def rounded(name: str, tensor: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        if tensor.ndim < 2 or name.endswith("_bias") or scheme_of(on_load(kind), module) is None:
            return tensor
        is_transposed = moe.layout is ExpertsLayout.TRANSPOSED
        weight = tensor.transpose(-1, -2) if is_transposed else tensor
        group = OnLoadFormat(OnLoadScheme(kind)).group_size(weight.shape[-1])
        result = quantize(weight, KINDS[kind], group).dequantize()
        return result.transpose(-1, -2) if is_transposed else result

    return {name: rounded(name, tensor) for name, tensor in tensors.items()}


def inputs() -> Tensor:
    return torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))


def assert_same(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moe", SPECS.values(), ids=SPECS)
def test_quantised_experts_compute_what_the_dequantised_ones_do(moe: MoeSpec, kind: str) -> None:
    tensors = random_checkpoint(moe)
    layer = Layer(moe, on_load(kind)).load(tensors)

    out = layer.ffn.forward(inputs(), None)

    assert isinstance(layer.ffn.experts.method, QuantizedExperts)
    assert (layer.ffn.shared is not None) == (moe in (SPECS["shared beside"], SPECS["latent"]))
    assert_same(out, Layer(moe, None).load(dequantized(tensors, moe, kind)).ffn.forward(inputs(), None))


@pytest.mark.parametrize("kind", [*KINDS, "awq", "gptq", "pack-quantized"])
@pytest.mark.parametrize("name", ["mlp.gate", "block_sparse_moe.router.layer", "mlp.anything"])
def test_a_router_is_not_quantised_whatever_its_name_is(name: str, kind: str) -> None:
    config = on_load(kind) if kind in KINDS else read_quant_config(PACKED_CASES[kind].config)

    ffn = Layer(replace(SPECS["shared beside"], names=MoeNames(router=name)), config).ffn

    assert isinstance(ffn.experts.method, QuantizedExperts)
    assert isinstance(ffn.router.method, UnquantizedLinear)
    assert ffn.shared_gate is not None
    assert isinstance(ffn.shared_gate.method, UnquantizedLinear)


def test_a_router_that_the_operator_names_is_quantised() -> None:
    config = OnLoadConfig(OnLoadScheme("w4"), (("mlp.gate", OnLoadScheme("int8")),))

    assert isinstance(Layer(MOE, config).ffn.router.method, QuantizedLinear)


def test_shared_experts_with_larger_groups_are_computed_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_load_module, "W4_GROUP", 128)  # groups of 64, and of 128 for the shared experts
    moe = SPECS["shared"]
    tensors = random_checkpoint(moe)

    layer = Layer(moe, on_load("w4")).load(tensors)

    assert layer.ffn.shared is not None
    expected = Layer(moe, None).load(dequantized(tensors, moe, "w4")).ffn.forward(inputs(), None)
    assert_same(layer.ffn.forward(inputs(), None), expected)


@pytest.mark.parametrize("kind", ["int8", "w4"])
@pytest.mark.parametrize("moe", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_the_parts_of_the_ranks_add_up_to_the_whole(moe: MoeSpec, kind: str, is_expert_parallel: bool) -> None:
    tensors, parts = random_checkpoint(moe), []
    for rank in range(2):
        group = RankGroup(rank, 2)
        parallel = Parallel(tp=group, ep=group) if is_expert_parallel else Parallel(tp=group)
        layer = Layer(moe, on_load(kind), parallel).load(tensors)
        layer.ffn._tp = RankGroup()
        parts.append(layer.ffn.forward(inputs(), None))

    assert_same(parts[0] + parts[1], Layer(moe, on_load(kind)).load(tensors).ffn.forward(inputs(), None))


@pytest.mark.parametrize("moe", SPECS.values(), ids=SPECS)
def test_ranks_that_cut_a_group_have_smaller_ones(moe: MoeSpec) -> None:
    tensors, sum_of_parts = random_checkpoint(moe), torch.zeros(9, HIDDEN)
    for rank in range(4):
        layer = Layer(moe, on_load("w4"), Parallel(tp=RankGroup(rank, 4))).load(tensors)
        layer.ffn._tp = RankGroup()
        assert isinstance(layer.ffn.experts.method, QuantizedExperts)
        assert layer.ffn.experts.method.w2.group_size == 16
        sum_of_parts += layer.ffn.forward(inputs(), None)

    assert_same(sum_of_parts, Layer(moe, on_load("w4")).load(tensors).ffn.forward(inputs(), None))


def test_ranks_that_cut_a_group_too_small_are_refused() -> None:
    with pytest.raises(ModelFilesError, match=r"experts: .* inputs 8 to 16, .* of 32 into groups of 8; .* use --ep, "):
        Layer(MOE, on_load("w4"), Parallel(tp=RankGroup(1, 8)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moe", SPECS.values(), ids=SPECS)
def test_dummy_weights_are_as_large_as_those_of_a_float_model(moe: MoeSpec, kind: str) -> None:
    layer = Layer(moe, on_load(kind))
    method = layer.ffn.experts.method
    assert isinstance(method, QuantizedExperts)

    fill_dummy([layer])

    for weight in (method.w13, method.w2):
        assert all(0.01 < float(one.std()) < 0.03 for one in weight.dequantize())
    assert layer.ffn.forward(inputs(), None).isfinite().all()


@pytest.mark.parametrize("moe", SPECS.values(), ids=SPECS)
def test_padding_takes_no_part(moe: MoeSpec) -> None:
    layer = Layer(moe, on_load("w4")).load(random_checkpoint(moe))
    padded = inputs()
    padded[4:] = float("nan")

    out = layer.ffn.forward(padded, ExpertRows(torch.arange(9) >= 4))

    assert_same(out[:4], layer.ffn.forward(inputs(), None)[:4])


@pytest.fixture
def toy() -> Iterator[ToyScheme]:
    """A format with a tensor of scales beside each weight."""
    FORMATS[ToyScheme] = ToyFormat
    yield ToyScheme()
    del FORMATS[ToyScheme]


def toy_checkpoint(moe: MoeSpec, config: QuantConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors that the format reads, and what they stand for."""
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in random_checkpoint(moe).items():
        stored[name] = floats[name] = tensor
        if scheme_of(config, name.removesuffix(".weight")) is not None:
            weight = quantize(tensor, Int8Weight, None)
            stored |= {name: weight.codes, f"{name}_scale": weight.scales.squeeze(-1)}
            floats[name] = weight.dequantize()
    return stored, floats


@pytest.mark.parametrize("name", ["each", "shared", "stacked"])
def test_experts_of_a_quantised_checkpoint_are_read(toy: ToyScheme, name: str) -> None:
    moe, config = SPECS[name], Only(toy, "experts")
    stored, floats = toy_checkpoint(moe, config)

    layer = Layer(moe, config).load(stored)

    assert isinstance(layer.ffn.experts.method, QuantizedExperts)
    assert_same(layer.ffn.forward(inputs(), None), Layer(moe, None).load(floats).ffn.forward(inputs(), None))


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-8-bit", "nf4", "pack-quantized", "mxfp4-pack-quantized"])
def test_experts_of_packed_checkpoints_are_read(name: str) -> None:
    case = PACKED_CASES[name]
    config = read_quant_config(case.config)
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for tensor_name, tensor in random_checkpoint(MOE).items():
        module = tensor_name.removesuffix(".weight")
        packer = None if scheme_of(config, module) is None else case.packer_of(module)
        if packer is None:
            stored[tensor_name] = floats[tensor_name] = tensor
        else:
            packed = packer(tensor)
            stored |= {config.tensor_name(f"{module}.{suffix}"): part for suffix, part in packed.tensors.items()}
            floats[tensor_name] = packed.weight

    layer = Layer(MOE, config).load(stored)

    method = layer.ffn.experts.method
    assert isinstance(method, QuantizedExperts)
    assert type(method.w2) is case.kind
    assert_same(layer.ffn.forward(inputs(), None), Layer(MOE, None).load(floats).ffn.forward(inputs(), None))


@pytest.mark.parametrize("quantised", [".experts", ".shared_experts"])
def test_shared_experts_in_another_format_are_computed_beside_the_others(toy: ToyScheme, quantised: str) -> None:
    moe, config = SPECS["shared"], Only(toy, quantised)
    stored, floats = toy_checkpoint(moe, config)

    layer = Layer(moe, config).load(stored)

    assert layer.ffn.shared is not None
    assert isinstance(layer.ffn.experts.method, QuantizedExperts if quantised == ".experts" else UnquantizedExperts)
    assert_same(layer.ffn.forward(inputs(), None), Layer(moe, None).load(floats).ffn.forward(inputs(), None))


@pytest.mark.parametrize(
    ("name", "quantised", "message"),
    [
        (
            "each",
            ("experts.0.", "experts.1."),
            r"experts.2.gate_proj is quantised in another way than .*experts.0.gate",
        ),
        ("each", ("down_proj",), r"mlp.experts: .*experts.0.down_proj is quantised, and not all of its experts' we"),
        ("transposed", ("experts",), r"experts.gate_up_proj: quantised experts that are stored as \[in, out\] are not"),
    ],
)
def test_experts_in_several_formats_are_refused(
    toy: ToyScheme, name: str, quantised: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ModelFilesError, match=message):
        list(Layer(SPECS[name], Only(toy, *quantised)).pieces())


def test_experts_with_act_order_are_refused(toy: ToyScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyFormat, "has_input_order", True)

    with pytest.raises(ModelFilesError, match=r"mlp.experts: experts with act-order are not supported, .*desc_act"):
        Layer(MOE, Only(toy, "experts"))


Change = Callable[[Tensor], Tensor | None]
SCALE, CODES = "model.layers.0.mlp.experts.5.up_proj.weight_scale", "model.layers.0.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALE, lambda tensor: None, rf"lacks 1 tensors: {SCALE}"),
        (SCALE, lambda tensor: tensor[:-1], rf"memory: {SCALE} has shape \(63,\).*needs \(64,\)"),
        (CODES, lambda tensor: tensor.float(), rf"memory: {CODES} is float32; this model needs int8"),
    ],
    ids=["missing", "misshapen", "mistyped"],
)
def test_a_wrong_tensor_of_an_expert_is_named(toy: ToyScheme, name: str, change: Change, message: str) -> None:
    config = Only(toy, "experts")
    stored, _ = toy_checkpoint(MOE, config)
    changed = {key: change(tensor) if key == name else tensor for key, tensor in stored.items()}

    with pytest.raises(CheckpointError, match=message):
        Layer(MOE, config).load({key: tensor for key, tensor in changed.items() if tensor is not None})


def test_layers_of_other_kinds_of_weights_launch_other_kernels() -> None:
    keys = [Layer(MOE, config).ffn.experts.kernel_key() for config in (None, *map(on_load, KINDS))]

    assert len(set(keys)) == 4
    assert Layer(MOE, on_load("w4")).ffn.experts.kernel_key() == keys[-1]


def test_quantised_experts_take_the_memory_of_their_codes_and_scales() -> None:
    method = Layer(MOE, on_load("w4")).ffn.experts.method
    assert isinstance(method, QuantizedExperts)

    weights: list[QuantizedWeight] = [method.w13, method.w2]
    numbers = EXPERTS * 3 * HIDDEN * WIDTH
    assert sum(weight.nbytes for weight in weights) == numbers // 2 + 2 * EXPERTS * (2 * WIDTH + HIDDEN) * 2 * 4
