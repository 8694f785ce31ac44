"""Layers with a recurrent mixer: their states, what is refused, and steps with padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import (
    cpu_kernel,  # noqa: F401  registers its backend
    ops,
)
from lightserve.common.basemodel import (
    GatedDeltaSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    ModelConfig,
    ModelInput,
    ShortConvSpec,
    StateTensor,
    TpPartBaseModel,
)
from lightserve.common.parallel import RankGroup
from lightserve.common.quantization import QuantizedLinear, UnquantizedLinear
from lightserve.errors import LightserveError, ModelFilesError
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.quantization import OnLoadConfig, OnLoadScheme
from lightserve.models.registry import get_model_class
from lightserve.tools.dump import compare, first_difference
from test.models.architectures.case import Case, Json, Tiny, build
from test.models.architectures.hybrid import CASES
from test.models.session import Session
from test.models.tiny import build_model, model_args

PROMPT = [(37 * i + i * i // 7) % 131 for i in range(30)]
SIZES = GatedDeltaSpec(num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=32, conv_width=4)
# inputs in groups of 16, and every token uses all experts, so that rounding changes none
IN_GROUPS = {"linear_value_head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
ALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4}


def tiny_of(name: str) -> Tiny:
    return build(CASES[name])


def model_of(tiny: Tiny) -> TpPartBaseModel:
    return build_model(tiny.config_json, tiny.checkpoint())


def with_padding(step: ModelInput, model: TpPartBaseModel) -> ModelInput:
    """A decode step with two more rows, as the worker pads it to the size of a captured graph."""
    memory, count, padding = model.mem_manager, len(step.input_ids), 2
    for buffer in memory.buffers:
        buffer[:, memory.padding_slot] = 0
    row = model.req_manager.padding_row
    model.req_manager.req_to_token[row] = memory.padding_slot

    def padded(column: Tensor, value: int) -> Tensor:
        return torch.cat((column, column.new_full((padding,), value)))

    attn, states = step.attn, step.states
    assert states is not None
    batch = ops.AttnBatch(
        attn.req_to_token,
        padded(attn.b_req_idx, row),
        torch.arange(count + padding, dtype=torch.int32),
        padded(attn.b_seq_len, 1),
        padded(attn.b_ready_cache_len, 0),
    )
    return replace(
        step,
        input_ids=padded(step.input_ids, 0),
        position_ids=padded(step.position_ids, 0),
        mem_index=padded(step.mem_index, memory.padding_slot),
        attn=batch,
        states=ops.StateBatch(
            torch.arange(count + padding + 1, dtype=torch.int32),
            padded(states.b_read_row, ops.NO_ROW),
            torch.cat((states.b_write_row, torch.tensor([memory.padding_row, ops.NO_ROW], dtype=torch.int32))),
            max_tokens=1,
        ),
    )


@pytest.mark.parametrize("backend", [ops.REFERENCE, "cpu"])
def test_padding_of_a_decode_step_changes_no_request(backend: str) -> None:
    tiny = tiny_of("qwen3_next")
    ops.use_backend(backend)
    plain, padded = Session(model_of(tiny)), Session(model_of(tiny))
    for session in (plain, padded):
        session.step({0: PROMPT, 1: PROMPT[:7]})

    for ids in range(3):
        expected = plain.step({0: [ids], 1: [ids + 1]})
        step = with_padding(padded.input_of({0: [ids], 1: [ids + 1]}), padded.model)
        torch.testing.assert_close(padded.model.forward(step)[:2], expected)
    ops.use_backend(ops.REFERENCE)


def test_a_finished_request_leaves_nothing_to_the_next_one() -> None:
    session = Session(model_of(tiny_of("qwen3_next")))
    expected = session.step({0: PROMPT})
    session.step({0: [1]})
    session.finish(0)

    torch.testing.assert_close(session.step({0: PROMPT}), expected)


def test_a_kept_row_can_be_continued_many_times() -> None:
    session = Session(model_of(tiny_of("qwen3_next")))
    session.step({0: PROMPT})
    session.step({0: [1, 2]})
    expected = session.step({0: [3]})

    for request in (1, 2):
        session.share_prefix(0, request, len(PROMPT))
        session.step({request: [1, 2]})
        torch.testing.assert_close(session.step({request: [3]}), expected)


def test_recurrent_layers_store_states_and_the_others_keys_and_values() -> None:
    layout = model_of(tiny_of("qwen3_next")).kv_layout

    assert [group.layers for group in layout.groups] == [(2,)]
    (group,) = layout.states
    assert group.layers == (0, 1, 3)
    channels = 2 * 2 * 12 + 6 * 20
    assert group.tensors == (
        StateTensor((3, channels), torch.float32),
        StateTensor((6, 20, 12), torch.float32, is_sum=True),
    )
    assert layout.bytes_per_state_row == 3 * 4 * (3 * channels + 6 * 20 * 12)


def test_a_layer_with_a_mixer_beside_attention_stores_both() -> None:
    model = model_of(tiny_of("falcon_h1"))

    assert [group.layers for group in model.kv_layout.groups] == [(0, 1, 2)]
    assert [group.layers for group in model.kv_layout.states] == [(0, 1, 2)]
    assert all(model.config.has_state(layer) and not model.config.is_recurrent(layer) for layer in range(3))
    spec = model.layer_specs[0]
    of_attention, of_mixer, of_ffn = 2 * (6 + 2) * 8, 3 * 60 + 2 * 2 * 12 + 6, 3 * 64
    assert spec.num_weights == 48 * (of_attention + of_mixer + of_ffn)


def test_ranks_share_the_states_by_heads() -> None:
    inputs, matrices = SIZES.state_tensors(8, torch.bfloat16)

    assert inputs == StateTensor((3, 2 * 16 + 32), torch.bfloat16)  # two ranks hold the same key head
    assert matrices == StateTensor((1, 32, 16), torch.float32, is_sum=True)
    SIZES.check_tp(8)


@pytest.mark.parametrize(
    ("sizes", "tp_size", "message"),
    [
        ({}, 3, "8 value heads of recurrent layers do not divide among tp=3 ranks; choose a tp that divides them"),
        ({"num_key_heads": 2, "num_value_heads": 6}, 3, "2 key heads of recurrent layers and tp=3"),
        ({"num_key_heads": 3}, 1, "3 key heads do not divide 8 value heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(sizes: Json, tp_size: int, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        replace(SIZES, **sizes).check_tp(tp_size)


def test_recurrent_layers_see_no_later_token() -> None:
    tiny = tiny_of("qwen3_5_text")
    pooling = PoolingConfig("embed", "mean", tiny.config_json["hidden_size"], is_causal=False)
    args = replace(model_args(tiny.config_json, tiny.checkpoint(), RankGroup()), pooling=pooling)

    with pytest.raises(ModelFilesError, match="is_causal false is not supported for qwen3_5_text"):
        get_model_class("qwen3_5_text")(args)


def test_a_step_without_rows_is_refused() -> None:
    session = Session(model_of(tiny_of("qwen3_next")))
    step = replace(session.input_of({0: PROMPT}), states=None)

    with pytest.raises(ValueError, match="the step does not say which rows their states are in"):
        session.model.forward(step)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_a_model_without_mixers_refuses_recurrent_layers(model_type: str) -> None:
    config = {
        "model_type": model_type,
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    if model_type == "qwen3_moe":  # it does not read layer_types
        assert not ModelConfig.from_hf(config).is_recurrent(0)
        return
    for layer_type in ("linear_attention", "hybrid"):
        types = [layer_type, "full_attention", layer_type]
        with pytest.raises(ModelFilesError, match=f"layer type {layer_type} is not supported for {model_type}"):
            build_model({**config, "layer_types": types}, iter(()))


MAMBA = Mamba2Spec(num_heads=8, head_dim=4, num_groups=2, state_dim=16, conv_width=4, norm_eps=1e-5)


def test_ranks_share_the_states_of_mamba_by_heads() -> None:
    inputs, matrices = MAMBA.state_tensors(4, torch.bfloat16)

    assert inputs == StateTensor((3, 2 * 4 + 2 * 16), torch.bfloat16)  # two ranks hold the same group
    assert matrices == StateTensor((2, 4, 16), torch.float32, is_sum=True)
    MAMBA.check_tp(4)
    replace(MAMBA, norms_groups=True, has_norm=False).check_tp(4)


@pytest.mark.parametrize(
    ("fields", "tp_size", "message"),
    [
        ({}, 3, "8 heads of recurrent layers do not divide among tp=3 ranks"),
        ({"num_heads": 6}, 3, "2 groups of recurrent layers and tp=3"),
        ({"norms_groups": True}, 4, "2 norms of recurrent layers do not divide among tp=4 ranks; choose a smaller tp"),
        ({"num_groups": 3}, 1, "3 groups do not divide 8 heads"),
    ],
)
def test_heads_of_mamba_that_do_not_divide_are_refused(fields: Json, tp_size: int, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        replace(MAMBA, **fields).check_tp(tp_size)


def test_heads_of_lightning_attention_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelFilesError, match="4 heads of recurrent layers do not divide among tp=3 ranks"):
        LightningSpec(num_heads=4, head_dim=12, decay_scale=1.0, norm_eps=1e-6).check_tp(3)


def test_decays_of_a_minimax_file_are_not_reported_as_unused() -> None:
    tiny = tiny_of("minimax")
    metadata = [one._replace(tensor=one.tensor.to("meta")) for one in tiny.checkpoint()]
    args = replace(model_args(tiny.config_json, None, RankGroup()), tensor_metadata=metadata)

    assert any(one.name.endswith("slope_rate") for one in metadata)
    assert get_model_class("minimax").unused_tensors(args) == []


def test_heads_of_kimi_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelFilesError, match="4 heads of recurrent layers do not divide among tp=3 ranks"):
        KimiDeltaSpec(num_heads=4, head_dim=12, conv_width=4).check_tp(3)


def test_latents_are_stored_by_the_layers_with_attention_only() -> None:
    layout = model_of(tiny_of("kimi_linear-table")).kv_layout

    assert [(group.layers, group.value_size) for group in layout.groups] == [((1, 4), 0)]
    (group,) = layout.states
    assert group.layers == (0, 2, 3)
    assert group.tensors == (
        StateTensor((2, 3 * 4 * 12), torch.float32),
        StateTensor((4, 12, 12), torch.float32, is_sum=True),
    )


def test_channels_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelFilesError, match="10 channels of recurrent layers do not divide among tp=4 ranks"):
        ShortConvSpec(num_channels=10, conv_width=3).check_tp(4)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("bamba", {"attn_layer_indices": 9}, "layer_types is 9, wanted a list of 4 names"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for bamba"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .1.0., wanted a list of 5 numbers"),
        ("falcon_h1", {"mamba_d_ssm": 50}, "6 heads of 10 are not 50 channels"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for falcon_h1"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ("granitemoehybrid", {"time_step_limit": [0.1]}, "time_step_limit is .0.1., wanted two numbers"),
        ("granitemoehybrid", {"mamba_d_head": 5}, "6 heads of 5 are not 96 channels"),
        ("minimax", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for minimax"),
        ("minimax", {"mlp_beta_factor": 0.5}, "mlp_beta_factor 0.5 is not supported for minimax"),
        ("minimax_m1", {"postnorm": False}, "postnorm False is not supported for minimax_m1"),
        ("minimax_m1", {"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported"),
        ("minimax_m1", {"attn_type_list": [0, 1]}, "layer_types is .*, wanted a list of 4 names"),
        ("minimax_m1", {"attn_type_list": 7}, "layer_types is 7, wanted a list of 4 names"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X*-M"}, "layer type 'X' is not supported"),
        ("nemotron_h-experts", {"mlp_hidden_act": "gelu"}, "experts without a gate with gelu are not supported"),
        ("nemotron_h-experts", {"n_shared_experts": 2}, "n_shared_experts 2 is not supported for nemotron_h"),
        ("nemotron_h-latent", {"mlp_bias": True}, "mlp_bias True is not supported for nemotron_h"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported for nemotron_h"),
        ("nemotron_h", {"mlp_hidden_act": "mish"}, "mlp_hidden_act 'mish' is not supported for nemotron_h"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False is not supported for kimi_linear"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ("kimi_linear", {"linear_num_heads": "two"}, "linear_num_heads is 'two', wanted a positive integer"),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported for kimi_linear"),
        ("lfm2", {"layer_types": ["conv"] * 3 + ["mlp"]}, "layer type 'mlp' is not supported"),
        ("lfm2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for lfm2"),
    ],
)
def test_options_of_recurrent_models_that_are_not_implemented_are_refused(
    name: str, fields: Json, message: str
) -> None:
    config_json = tiny_of(name).config_json

    with pytest.raises(LightserveError, match=message):
        build_model({**config_json, **fields}, iter(()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen3_next"),
        ({"linear_num_key_heads": 4}, "4 key heads do not divide 6 value heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, wanted a positive integer"),
        ({"layer_types": ["mamba3"] * 4}, "layer type 'mamba3' is not supported; supported: .*linear_attention"),
    ],
)
def test_values_that_are_not_implemented_are_refused(fields: Json, message: str) -> None:
    config_json = tiny_of("qwen3_next").config_json

    with pytest.raises(LightserveError, match=message):
        build_model({**config_json, **fields}, iter(()))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_layers_for_drafts_and_the_vision_part_are_not_reported_as_unused(name: str) -> None:
    tiny = tiny_of(name)
    metadata = [one._replace(tensor=one.tensor.to("meta")) for one in tiny.checkpoint()]
    args = replace(model_args(tiny.config_json, None, RankGroup()), tensor_metadata=metadata)

    assert any(one.name.startswith("mtp.") for one in metadata)
    assert get_model_class(args.config.model_type).unused_tensors(args) == []


@pytest.mark.parametrize("kind", ["fp8", "int8", "w4"])
def test_the_large_linears_of_a_mixer_are_quantised_while_they_are_loaded(kind: str) -> None:
    tiny = build(Case("qwen3_next", {**CASES["qwen3_next"].fields, **IN_GROUPS, **ALL_EXPERTS}))
    args = model_args(tiny.config_json, tiny.checkpoint(), RankGroup())
    config = replace(args.config, quantization=OnLoadConfig(OnLoadScheme(kind)))

    model = get_model_class("qwen3_next")(replace(args, config=config))

    mixer = model.layer_weights[0].mixer
    methods = [getattr(mixer, name).method for name in ("in_proj", "out_proj", "ba_proj")]
    assert [type(method) for method in methods[2:]] == [UnquantizedLinear]
    assert all(isinstance(method, QuantizedLinear) for method in methods[:2])
    expected, logits = Session(model_of(tiny)).step({0: PROMPT}), Session(model).step({0: PROMPT})
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > (0.8 if kind == "w4" else 0.95)


def test_layers_are_compared_with_those_of_transformers() -> None:
    tiny = tiny_of("qwen3_next")

    differences = compare(model_of(tiny), tiny.hf, PROMPT)

    assert [difference.name for difference in differences] == [
        "embedding",
        "layers.0",
        "layers.1",
        "layers.2",
        "logits",
    ]
    assert first_difference(differences, 1e-4) is None
