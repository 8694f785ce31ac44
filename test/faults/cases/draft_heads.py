"""Draft heads: folders of the operator that do not fit the model."""

from __future__ import annotations

import json

from test.api.server import STOP_S
from test.faults.start_case import Start, StartCase

LAYER = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 131,
    "rms_norm_eps": 1e-5,
}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "draft_vocab_size": 8}
MODEL = {**LAYER, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
REFUSED = {
    "{": "config.json",
    json.dumps(HEAD | {"vocab_size": 99}): "its vocabulary has 99 tokens, the vocabulary of the model 131",
    json.dumps(HEAD | {"target_hidden_size": 32}): "for a model with hidden_size 32, and the model has 64",
    json.dumps(HEAD | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 90]}}): "and the model has 8",
    json.dumps(MODEL): "not of EAGLE-3",
    json.dumps(HEAD): "no weights",
}


def wrong_heads(start: Start) -> None:
    start.worker = ()  # a null worker has no drafts
    model, head = start.base / "model", start.base / "head"
    for folder in (model, head):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    config = json.dumps({"method": "eagle3", "model": str(head)})
    for text, reason in REFUSED.items():
        (head / "config.json").write_text(text)
        server = start.launch("--model_dir", str(model), "--device", "cpu", "--speculative_config", config)
        assert server.process.wait(STOP_S) == 2
        assert server.log.count("\n") == 1, server.log
        assert reason in server.log, server.log


START_CASES = [StartCase("a draft head does not fit", wrong_heads, "one line with the reason, exit code 2", 120.0)]
