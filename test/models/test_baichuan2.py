"""Baichuan 2 divides the rows of its head by their length. Its vocabulary tells it from Baichuan 1."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from test.models.architectures.case import SMALL, Case, build, hf_logits
from test.models.architectures.converted import to_baichuan
from test.models.session import Session
from test.models.tiny import build_model

PROMPT = [(37 * i) % 131 for i in range(20)]
SHAPE = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 6}


def test_the_rows_of_the_head_of_baichuan_2_have_length_1() -> None:
    tiny = build(Case("llama", {**SHAPE, "vocab_size": 125_696}, to_baichuan))
    head = tiny.hf.lm_head.weight.data
    head.copy_(normalize(head))

    ours = Session(build_model(tiny.config_json, tiny.checkpoint())).step({0: PROMPT})

    torch.testing.assert_close(ours[0], hf_logits(tiny.hf, PROMPT)[-1], rtol=1e-4, atol=1e-4)


def test_the_head_of_baichuan_1_is_loaded_as_it_is() -> None:
    tiny = build(Case("llama", SHAPE, to_baichuan))

    ours = Session(build_model(tiny.config_json, tiny.checkpoint())).step({0: PROMPT})

    torch.testing.assert_close(ours[0], hf_logits(tiny.hf, PROMPT)[-1], rtol=1e-4, atol=1e-4)
