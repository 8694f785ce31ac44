"""Ranks that cannot divide a model are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.config import WorkerConfig
from lightserve.errors import OptionError
from lightserve.models.registry import read_model_config
from lightserve.server.checks import check_ranks

EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "num_experts": 10,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_experts_must_divide_among_the_ranks() -> None:
    model = read_model_config(EXPERTS, None)

    check_ranks(WorkerConfig(tp=2, ep=2, pp=3), model)
    with pytest.raises(OptionError, match="ep=4: it does not divide the 10 experts of the model"):
        check_ranks(WorkerConfig(tp=4, ep=4), model)


def test_every_stage_has_a_layer() -> None:
    with pytest.raises(OptionError, match="pp=4: the model has 3 layers, and each stage needs one"):
        check_ranks(WorkerConfig(pp=4), read_model_config(EXPERTS, None))


def test_attention_groups_divide_the_experts_over_all_ranks_and_the_heads_over_their_own() -> None:
    model = read_model_config(EXPERTS | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}, None)

    check_ranks(WorkerConfig(tp=2, ep=2, enable_dp_attention=True), model)
    with pytest.raises(OptionError, match="ep=4: it does not divide the 10 experts of the model"):
        check_ranks(WorkerConfig(tp=4, ep=4, enable_dp_attention=True), model)


@pytest.mark.parametrize(
    ("flags", "groups", "ranks_of_a_group", "answering"),
    [
        ({}, 1, 4, [0]),
        ({"pp": 2}, 1, 4, [4]),
        ({"enable_dp_attention": True}, 4, 1, [0, 1, 2, 3]),
        ({"attention_dp": 2}, 2, 2, [0, 2]),
        ({"attention_dp": 2, "pp": 2}, 2, 2, [2, 6]),
        ({"enable_dp_attention": True, "attention_dp": 2}, 2, 2, [0, 2]),
    ],
)
def test_the_first_rank_of_every_group_returns_tokens(
    flags: dict[str, Any], groups: int, ranks_of_a_group: int, answering: list[int]
) -> None:
    config = WorkerConfig(tp=4, ep=4, **flags)

    assert (config.num_groups, config.attention_tp, config.answering_ranks) == (groups, ranks_of_a_group, answering)
