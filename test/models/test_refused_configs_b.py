"""Values in config.json that a model's code does not implement are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from lightserve.common.basemodel import ModelArgs, ModelConfig, TpPartBaseModel
from lightserve.common.parallel import Parallel
from lightserve.errors import ModelFilesError
from lightserve.models.registry import get_model_class
from test.models.architectures.case import MAX_LEN
from test.models.architectures.dense_b import CASES

# case: field, value, what the message says besides the two
REFUSED = [
    ("gemma", "use_bidirectional_attention", True, "gemma"),
    ("gemma2", "use_bidirectional_attention", True, "gemma2"),
    ("gemma3_text", "use_bidirectional_attention", True, "gemma3_text"),
    ("gemma", "hidden_act", "mish", "gelu_pytorch_tanh"),
    ("gemma2", "hidden_activation", "mish", "gelu_pytorch_tanh"),
    ("gemma2", "attn_logit_softcapping", -1.0, "positive"),
    ("gemma2", "layer_types", ["chunked_attention"] * 4, "sliding_attention"),
    ("gemma3_text", "query_pre_attn_scalar", 0, "positive"),
    ("stablelm", "hidden_act", "quick_gelu", "silu"),
    ("stablelm", "qk_layernorm", "yes", "true or false"),
    ("phi", "qk_layernorm", True, "phi"),
    ("phi", "tie_word_embeddings", True, "bias"),
    ("phi3", "attention_bias", True, "phi3"),
    ("phi3", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}, "longrope"),
    ("phi3", "rope_parameters", {"rope_type": "spiral"}, "longrope"),
    ("cohere2", "use_qk_norm", True, "cohere2"),
    ("starcoder2", "norm_type", "rms_norm", "layer_norm"),
    ("starcoder2", "mlp_type", "gated", "default"),
    ("gpt2", "add_cross_attention", True, "gpt2"),
    ("gpt2", "activation_function", "tanh", "gelu_new"),
    ("gpt_bigcode", "add_cross_attention", True, "gpt_bigcode"),
    ("opt", "do_layer_norm_before", False, "opt"),
    ("opt", "word_embed_proj_dim", 24, "48"),
    ("opt", "_remove_final_layer_norm", True, "opt"),
    ("opt", "layer_norm_elementwise_affine", False, "opt"),
    ("falcon-7b", "num_ln_in_parallel_attn", 2, "1"),
    ("falcon-40b", "num_ln_in_parallel_attn", 3, "1, 2"),
    ("falcon-40b", "parallel_attn", False, "True"),
    ("falcon-7b", "activation", "mish", "gelu"),
    ("mpt", "no_bias", False, "True"),
    ("mpt", "norm_type", "rmsnorm", "layernorm"),
    ("mpt", "logit_scale", "inv_sqrt_d_model", "mpt"),
    ("mpt", "expansion_ratio", 2.5, "positive integer"),
    ("gpt_neox", "hidden_act", "mish", "gelu"),
    ("gptj", "rotary_dim", "six", "positive integer"),
    ("gptj", "rotary_dim", None, "rotary_dim"),
    ("nemotron", "hidden_act", "mish", "relu2"),
    ("arcee", "rope_parameters", {"rope_type": "spiral"}, "llama3"),
]
MPT_ATTENTION = [
    ("attn_type", "multiquery_attention"),
    ("alibi", False),
    ("qk_ln", True),
    ("prefix_lm", True),
    ("attn_uses_sequence_id", True),
]


def config_of(case: str) -> dict[str, Any]:
    config: dict[str, Any] = AutoConfig.for_model(CASES[case].model_type, **CASES[case].fields).to_dict()
    return config


def build(config_json: dict[str, Any], max_len: int = MAX_LEN) -> TpPartBaseModel:
    """With random weights."""
    config = ModelConfig.from_hf(config_json)
    args = ModelArgs(
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=Parallel(),
        checkpoint=None,
        max_total_token_num=max_len,
        max_reqs=1,
        max_req_total_len=max_len,
    )
    return get_model_class(config.model_type)(args)


@pytest.mark.parametrize(("case", "field", "value", "hint"), REFUSED)
def test_a_value_that_is_not_implemented_is_refused_by_name(case: str, field: str, value: Any, hint: str) -> None:
    with pytest.raises(ModelFilesError) as error:
        build({**config_of(case), field: value})

    shown = value["rope_type"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value
    assert hint in str(error.value)
    assert str(shown) in str(error.value) or field in str(error.value)


@pytest.mark.parametrize(("field", "value"), MPT_ATTENTION)
def test_an_option_of_mpts_attention_is_refused_by_name(field: str, value: Any) -> None:
    config = config_of("mpt")

    with pytest.raises(ModelFilesError, match=f"{field} {value!r} is not supported for mpt"):
        build({**config, "attn_config": {**config["attn_config"], field: value}})


@pytest.mark.parametrize("case", ["gpt2", "gpt_bigcode", "opt"])
def test_more_tokens_than_learned_positions_are_refused_at_the_start(case: str) -> None:
    config = config_of(case)

    assert build(config).req_manager.max_len == MAX_LEN
    with pytest.raises(ModelFilesError, match=f"{MAX_LEN} learned positions; lower it"):
        build(config, max_len=MAX_LEN + 1)
    with pytest.raises(ModelFilesError, match=f"max_req_total_len={MAX_LEN + 1}"):
        ModelConfig.from_hf(config).request_len(MAX_LEN + 1)


def test_a_text_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelFilesError, match="text_config is not an object"):
        ModelConfig.from_hf({"model_type": "gemma3", "text_config": [1]})
