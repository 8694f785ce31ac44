"""Recurrent layers in GGUF files: every tensor is that of transformers again, packed or not, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.common.quantization import QuantizedLinear
from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from lightserve.model_files.source import GgufSource
from test.models.architectures.case import Json, Tensors, build
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import save
from test.models.gguf_hybrid_cases import HYBRID_CASES
from test.models.test_gguf_packed import assert_same_logits, layer_of, logits_of, model_of, packed, wider

# the converter multiplies weights of Falcon-H1 with the factors of its config
SAME_VALUES = [name for name in HYBRID_CASES if name != "falcon-h1"]


@pytest.mark.parametrize("name", SAME_VALUES)
def test_all_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = build(HYBRID_CASES[name].case)
    source = resolve(str(save(HYBRID_CASES[name], tiny, tmp_path / "model.gguf")))

    tensors = {name: tensor for name, tensor, _ in open_checkpoint(source)}

    is_tied = tiny.config_json.get("tie_word_embeddings") or "lm_head.weight" not in tensors
    assert tensors.keys() == tiny.tensors.keys() - ({"lm_head.weight"} if is_tied else set())
    for tensor_name, tensor in tensors.items():
        torch.testing.assert_close(tensor, tiny.tensors[tensor_name], rtol=1e-5, atol=1e-6, msg=tensor_name)


# q, k, v and z in two tensors; value heads in other places; a convolution with gates; Mamba2; experts without a gate
LAYOUTS = ["qwen3next", "qwen35", "lfm2", "granitehybrid", "nemotron_h", "falcon-h1", "kimi-linear"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_linears_give_the_logits_of_expanded_ones(name: str, tmp_path: Path) -> None:
    one = replace(HYBRID_CASES[name], case=wider(HYBRID_CASES[name].case))
    source = resolve(str(save(one, build(one.case), tmp_path / "model.gguf", quantized="^(?!.*norm|.*conv)")))
    assert isinstance(source, GgufSource)

    model = model_of(packed(source))

    assert isinstance(model.pre_post_weight.embedding.method, QuantizedLinear)
    assert_same_logits(source, logits_of(model))


@pytest.mark.parametrize("value_dim", [32, 20])
def test_columns_that_the_converter_reorders_stay_packed_if_heads_are_whole_groups(
    value_dim: int, tmp_path: Path
) -> None:
    case = wider(HYBRID_CASES["qwen35"].case)
    one = replace(
        HYBRID_CASES["qwen35"],
        case=replace(case, fields={**case.fields, "linear_num_value_heads": 8, "linear_value_head_dim": value_dim}),
    )
    source = resolve(str(save(one, build(one.case), tmp_path / "model.gguf", quantized="ssm_out|token_embd")))
    assert isinstance(source, GgufSource)

    model = model_of(packed(source))

    assert isinstance(layer_of(model, 0).mixer.out_proj.method, QuantizedLinear) == (value_dim == 32)
    assert_same_logits(source, logits_of(model))


def test_the_first_linear_of_a_recurrent_layer_stays_packed(tmp_path: Path) -> None:
    one = replace(HYBRID_CASES["qwen3next"], case=wider(HYBRID_CASES["qwen3next"].case))
    source = resolve(str(save(one, build(one.case), tmp_path / "model.gguf", quantized="attn|token_embd")))
    assert isinstance(source, GgufSource)

    mixer = layer_of(model_of(packed(source)), 0).mixer

    assert isinstance(mixer.in_proj.method, QuantizedLinear)
    assert not isinstance(mixer.out_proj.method, QuantizedLinear)


def test_layers_for_drafts_of_a_nemotron_are_skipped(tmp_path: Path) -> None:
    """Lists of the metadata count them."""

    def add_layer(tensors: Tensors, config: Json) -> Tensors:
        return tensors | {"blk.5.nextn.eh_proj.weight": torch.ones(4, 4), "blk.5.attn_norm.weight": torch.ones(48)}

    one = HYBRID_CASES["nemotron_h_moe"]
    one, tiny = replace(one, steps=(*one.steps, add_layer)), build(one.case)
    heads, widths = [0, 0, 2, 0, 0, 2], [0, 28, 0, 28, 0, 28]
    changes = {"attention.head_count_kv": heads, "feed_forward_length": widths, "block_count": 6}

    source = resolve(str(save(one, tiny, tmp_path / "model.gguf", {**changes, "nextn_predict_layers": 1})))

    assert source.hf_config()["layers_block_type"] == ["mamba", "moe", "attention", "moe", "mlp"]
    assert {name for name, _, _ in open_checkpoint(source)} == set(tiny.tensors)


def test_a_width_that_heads_do_not_divide_is_refused(tmp_path: Path) -> None:
    one = HYBRID_CASES["qwen35"]

    with pytest.raises(ModelFilesError, match=r"ssm\.inner_size is 121, which is not supported; wanted a multiple of"):
        resolve(str(save(one, build(one.case), tmp_path / "model.gguf", {"ssm.inner_size": 121}))).hf_config()


def test_every_recurrent_case_is_one_of_all() -> None:
    assert HYBRID_CASES.items() <= GGUF_CASES.items()
