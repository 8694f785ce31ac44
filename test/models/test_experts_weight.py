"""How ranks split experts, what a checkpoint must hold, and which values of config.json are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import (
    CheckpointTensor,
    ExpertsLayout,
    LayerNames,
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
from lightserve.common.ops import GatedSilu, RouteSpec
from lightserve.errors import ModelFilesError, ServerError
from test.models.architectures.case import SMALL, build
from test.models.architectures.moe import CASES
from test.models.tiny import build_model

HIDDEN, WIDTH, EXPERTS = 24, 12, 6
LLAMA_NAMES = LayerNames()
MOE = MoeSpec(num_experts=EXPERTS, intermediate_size=WIDTH, route=RouteSpec(2, renormalize=True))
SPECS = {
    "each": MOE,
    "shared": replace(MOE, shared_size=2 * WIDTH),
    "shared beside": replace(MOE, shared_size=WIDTH + 4, has_shared_gate=True),
    "stacked": replace(MOE, layout=ExpertsLayout.STACKED),
    "transposed": replace(
        MOE, layout=ExpertsLayout.TRANSPOSED, experts_bias=True, activation=GatedSilu(1.702, 0.5, 1.0)
    ),
    "score bias": replace(MOE, route=RouteSpec(2, "sigmoid", scale=3.0), has_score_bias=True, is_router_float32=True),
}
each_spec = pytest.mark.parametrize("moe", SPECS.values(), ids=SPECS)


class Layer(LayerWeight):
    def __init__(self, moe: MoeSpec, parallel: Parallel, names: LayerNames = LLAMA_NAMES) -> None:
        config = ModelConfig.from_hf({**SMALL, "model_type": "any", "rms_norm_eps": 1e-5, "hidden_size": HIDDEN})
        spec = LayerSpec(
            config=config,
            layer_num=0,
            num_heads=2,
            num_kv_heads=2,
            head_dim=12,
            hidden_size=HIDDEN,
            intermediate_size=40,
            norm_eps=1e-5,
            rope=None,
            scale=1.0,
            moe=moe,
            names=names,
        )
        self.ffn = MoeFfnWeight(spec, moe, WeightContext(parallel, torch.float32, torch.device("cpu")))


def random_checkpoint(moe: MoeSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pieces = Layer(moe, Parallel()).pieces()
    return {piece.name: torch.randn(piece.shape, generator=generator) * 0.3 for piece in pieces}


def partial_output(moe: MoeSpec, parallel: Parallel, x: Tensor) -> Tensor:
    """What a rank adds to the sum over the ranks."""
    layer = Layer(moe, parallel)
    load_weights([layer], [CheckpointTensor(*item, "memory") for item in random_checkpoint(moe).items()], 1)
    layer.ffn._tp = RankGroup()
    return layer.ffn.forward(x, None)


@each_spec
def test_the_parts_of_tensor_parallel_ranks_add_up_to_the_whole(moe: MoeSpec) -> None:
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))

    parts = [partial_output(moe, Parallel(tp=RankGroup(rank, 2)), x) for rank in range(2)]

    torch.testing.assert_close(parts[0] + parts[1], partial_output(moe, Parallel(), x))


@pytest.mark.parametrize("name", ["each", "shared", "stacked", "transposed", "score bias"])
def test_the_parts_of_expert_parallel_ranks_add_up_to_the_whole(name: str) -> None:
    moe, x = SPECS[name], torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))

    parts = [partial_output(moe, Parallel(tp=RankGroup(rank, 3), ep=RankGroup(rank, 3)), x) for rank in range(3)]

    torch.testing.assert_close(sum(parts), partial_output(moe, Parallel(), x))


def test_an_expert_parallel_rank_stores_its_own_experts_only() -> None:
    layer = Layer(MOE, Parallel(tp=RankGroup(1, 2), ep=RankGroup(1, 2)))

    stored = {piece.name for piece in layer.ffn.experts.pieces() if piece.into is not None}

    assert {int(name.split(".")[5]) for name in stored} == {3, 4, 5}


def test_experts_over_other_ranks_than_the_layers_are_refused() -> None:
    with pytest.raises(ServerError, match="2 ranks share the experts and 4 the layers"):
        Layer(MOE, Parallel(tp=RankGroup(0, 4), ep=RankGroup(0, 2)))


def test_shared_experts_are_computed_as_further_experts_if_they_have_their_width() -> None:
    wide, narrow = replace(MOE, shared_size=2 * WIDTH), replace(MOE, shared_size=WIDTH + 4)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))

    alike = partial_output(wide, Parallel(), x)

    assert (wide.num_shared, narrow.num_shared) == (2, 0)
    tensors = random_checkpoint(wide)
    gate, up, down = (
        tensors[f"model.layers.0.mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    routed = replace(MOE, names=MoeNames())
    layer = Layer(routed, Parallel())
    own = {piece.name for piece in layer.pieces()}
    load_weights([layer], [CheckpointTensor(name, tensors[name], "memory") for name in own], 1)
    shared = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(alike, layer.ffn.forward(x, None) + shared)


@each_spec
def test_padding_takes_no_part(moe: MoeSpec) -> None:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    layer = Layer(moe, Parallel())
    load_weights([layer], [CheckpointTensor(*item, "memory") for item in random_checkpoint(moe).items()], 1)
    padded = x.clone()
    padded[4:] = float("nan")

    out = layer.ffn.forward(padded, ExpertRows(torch.arange(6) >= 4))

    torch.testing.assert_close(out[:4], layer.ffn.forward(x, None)[:4])


@each_spec
def test_dummy_weights_give_finite_outputs(moe: MoeSpec) -> None:
    layer = Layer(moe, Parallel())
    for tensor in (layer.ffn.experts.method.params.w13, layer.ffn.experts.method.params.w2):  # type: ignore[attr-defined]
        tensor.fill_(float("nan"))

    fill_dummy([layer])

    assert layer.ffn.forward(torch.ones(3, HIDDEN), None).isfinite().all()


def test_layers_of_other_experts_launch_other_kernels() -> None:
    keys = {name: Layer(moe, Parallel()).kernel_key() for name, moe in SPECS.items()}

    assert Layer(MOE, Parallel()).kernel_key() == keys["each"]
    assert len({keys[name] for name in ("each", "shared", "shared beside", "transposed")}) == 4


BAD_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"hidden_act": "gelu"}, "experts with gelu are not supported; supported: silu"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 7 experts"),
    ("mixtral", {"num_local_experts": None}, "config.json has no num_experts"),
    ("mixtral", {"num_local_experts": 600}, "600 experts; the limit is 512"),
    ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers is '1', wanted a list of layer numbers"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0, wanted a positive integer"),
    ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, wanted true or false"),
    ("glm4_moe", {"n_group": 5}, "12 experts in 5 groups, 1 of them chosen"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts is -1, wanted a positive integer"),
    (
        "minimax_m2",
        {"scoring_func": "softmax"},
        "scoring_func 'softmax' is not supported for minimax_m2; supported: 's",
    ),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD_VALUES)
def test_a_value_of_config_json_that_is_not_supported_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    tiny = build(CASES[name])

    with pytest.raises(ModelFilesError, match=message):
        build_model({**tiny.config_json, **changes}, tiny.checkpoint())


def test_no_expert_is_the_id_of_pairs_that_another_rank_computes() -> None:
    layer = Layer(MOE, Parallel(tp=RankGroup(1, 2), ep=RankGroup(1, 2)))

    own = layer.ffn.experts._own_ids(torch.tensor([[0, 3], [5, ops.NO_EXPERT]], dtype=torch.int32))

    assert own.tolist() == [[-1, 0], [2, -1]]


def test_a_norm_before_down_is_refused_with_experts() -> None:
    with pytest.raises(ModelFilesError, match="any: experts with a norm before down are not supported"):
        Layer(MOE, Parallel(), LayerNames(down_norm="mlp.norm"))
