"""Values in config.json that a model's code does not implement are refused by name: models since 2025."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import ModelFilesError
from test.models.architectures.case import build
from test.models.architectures.cases import CASES
from test.models.tiny import build_model

# case: field, value, what the message says
REFUSED: dict[str, list[tuple[str, Any, str]]] = {
    "apertus": [("qk_norm", False, "qk_norm False"), ("post_norm", True, "post_norm True")],
    "afmoe": [("score_func", "softmax", "score_func 'softmax'"), ("attention_bias", True, "attention_bias True")],
    "axk1": [("topk_method", "greedy", "topk_method 'greedy'"), ("attention_bias", True, "attention_bias True")],
    "bailing_hybrid": [
        ("kda_lower_bound", 5.0, "kda_lower_bound is 5.0, wanted a negative number"),
        ("score_function", "softmax", "score_function 'softmax'"),
        ("no_kda_lora", False, "no_kda_lora False"),
        ("expert_swiglu_limit_list", [0.0, None, 7.0, None], "expert_swiglu_limit_list .0.0, None, 7.0, None"),
    ],
    "bailing_moe": [("norm_head", True, "norm_head True"), ("use_bias", True, "use_bias True")],
    "bailing_moe_v2": [
        ("score_function", "softmax", "score_function 'softmax' .*'sigmoid'"),
        ("moe_shared_expert_intermediate_size", 30, "moe_shared_expert_intermediate_size 30 .* supported: 56"),
    ],
    "dots1": [("moe_layer_freq", 2, "moe_layer_freq 2"), ("scoring_func", "softmax", "scoring_func 'softmax'")],
    "ernie4_5_moe": [
        ("use_bias", True, "use_bias True is not supported for ernie4_5_moe; supported: False"),
        ("moe_k", 11, "num_experts_per_tok is 11, but there are 10 experts"),
    ],
    "exaone_moe": [("scoring_func", "softmax", "scoring_func 'softmax'"), ("topk_method", "greedy", "topk_method")],
    "hunyuan_v1_dense": [("use_cla", True, "use_cla True"), ("mlp_bias", True, "mlp_bias True")],
    "hunyuan_v1_moe": [
        ("moe_topk", [3, 2], "num_experts_per_tok is .3, 2., wanted a positive integer"),
        ("moe_layer_num_skipped", 1, "moe_layer_num_skipped 1"),
        ("use_mixed_mlp_moe", False, "use_mixed_mlp_moe False"),
    ],
    "hy_v3": [("mlp_bias", True, "mlp_bias True"), ("qk_norm", False, "qk_norm False")],
    "mellum": [("mlp_layer_types", ["sparse"], "mlp_layer_types is .*, wanted a list of 2 times")],
    "mimo_v2_flash": [
        ("swa_head_dim", 16, "swa_head_dim 16 is not supported for mimo_v2_flash; supported: 24"),
        ("v_head_dim", 32, "v_head_dim 32 is over head_dim 24"),
        ("hybrid_layer_pattern", [0, 1], "layer_types is .*, wanted a list of 3 names"),
        ("swa_num_key_value_heads", "two", "num_key_value_heads is 'two', wanted a positive integer"),
        ("scoring_func", "softmax", "scoring_func 'softmax'"),
    ],
    "solar_open": [("use_qk_norm", True, "use_qk_norm True"), ("first_k_dense_replace", 1, "first_k_dense_replace 1")],
}


@pytest.mark.parametrize(
    ("case", "field", "value", "message"), [(case, *row) for case, rows in REFUSED.items() for row in rows]
)
def test_a_value_that_is_not_implemented_is_refused_by_name(case: str, field: str, value: Any, message: str) -> None:
    config_json = {**build(CASES[case]).config_json, field: value}

    with pytest.raises(ModelFilesError, match=message):
        build_model(config_json, iter(()))
