"""MTP layers that checkpoints store apart from the layers of the model: those of Qwen3-Next, Qwen3.5 and MiMo-V2."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import MtpLayer

from lightserve.errors import CheckpointError
from test.models.architectures.cases import CASES
from test.worker.heads import Recorder
from test.worker.test_mtp import LIKELY, MTP, NUM_DRAFTS, summary
from test.worker.test_ngram import GREEDY, make, params_of, prompts_of

QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
    "mtp_block": "mtp.layers.0",
}
MIMO_NAMES = {
    "enorm": "model.mtp.layers.0.enorm",
    "hnorm": "model.mtp.layers.0.hnorm",
    "eh_proj": "model.mtp.layers.0.eh_proj",
    "post_norm": "model.mtp.layers.0.final_layernorm",
    "mtp_block.self_attn.sinks": "model.mtp.layers.0.self_attn.attention_sink_bias",
    "mtp_block.post_attention_layernorm": "model.mtp.layers.0.pre_mlp_layernorm",
    "mtp_block": "model.mtp.layers.0",
}
NAMES = {
    "qwen3_next": QWEN_NAMES,
    "qwen3_5_text": QWEN_NAMES,
    "qwen3_5_moe_text": QWEN_NAMES,
    "mimo_v2_flash": MIMO_NAMES,
}
ALWAYS = ("qwen3_next", "mimo_v2_flash")  # the others with --long
MODELS: list[Any] = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in NAMES]


class Mtp:
    """The definition: a layer of transformers over whole texts."""

    def __init__(self, name: str, **fields: Any) -> None:
        """``fields``: of config.json, instead of those of the case."""
        case = CASES[name]
        self.name = name
        torch.manual_seed(0)
        config = AutoConfig.for_model(case.model_type, **{**case.fields, **fields})
        self.model = AutoModelForCausalLM.from_config(config).float().eval()
        self.config = deepcopy(config)
        is_mimo = name == "mimo_v2_flash"
        self.kind = "sliding_attention" if is_mimo else "full_attention"
        self.config.layer_types, self.config.mlp_layer_types = [self.kind], ["dense"]
        decoder = self.model.model
        self.layer = MtpLayer(self.config, type(decoder.layers[0]), type(decoder.norm), 0).float().eval()
        for parameter in [*self.model.parameters(), *self.layer.parameters()]:
            parameter.data.normal_(std=0.15)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        file = folder / "model.safetensors"
        save_file({**load_file(file), **self.tensors()}, file, {"format": "pt"})

    def tensors(self) -> dict[str, Tensor]:
        """As checkpoints store them."""
        named = {}
        for name, tensor in self.layer.state_dict().items():
            part = next(part for part in NAMES[self.name] if f"{name}.".startswith(f"{part}."))
            named[NAMES[self.name][part] + name.removeprefix(part)] = tensor.contiguous()
        return named if self.name == "qwen3_5_moe_text" else with_experts_apart(named)

    def __call__(self, hidden: Tensor, token_ids: list[int]) -> Tensor:
        embedded = self.model.get_input_embeddings()(torch.tensor([token_ids]))
        positions = torch.arange(len(token_ids))[None]
        is_windowed = self.kind == "sliding_attention"
        make_mask = create_sliding_window_causal_mask if is_windowed else create_causal_mask
        mask = make_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        of_kind = (self.kind,) if is_windowed else ()
        angles = self.model.model.rotary_emb(embedded, positions, *of_kind)
        out: Tensor = self.layer(embedded, hidden, angles, mask, positions, None)
        return out


def with_experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tensor for each expert instead of one for all."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        at, _, last = name.rpartition(".")
        if at.endswith("experts"):
            parts = tensor.chunk(2, 1) if last == "gate_up_proj" else (tensor,)
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for part, part_name in zip(parts, names, strict=True):
                apart |= {f"{at}.{i}.{part_name}.weight": expert.contiguous() for i, expert in enumerate(part)}
        else:
            apart[name] = tensor
    return apart


@pytest.fixture(scope="module", params=MODELS)
def mtp(request: pytest.FixtureRequest) -> Mtp:
    return Mtp(request.param)


@pytest.fixture(scope="module")
def folder(mtp: Mtp, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    mtp.save(folder)
    return folder


@torch.no_grad()
def expected_logits(mtp: Mtp, text: list[int], drafts: list[int]) -> list[Tensor]:
    """Of the drafts that follow a text, whose last token is not computed yet: by definition, without a cache."""
    hidden = mtp.model.model(torch.tensor([text[:-1]])).last_hidden_state
    next_ids, logits = text[1:], []
    for draft in drafts:
        out = mtp(hidden, next_ids)
        logits.append(mtp.model.lm_head(out[0, -1]))
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)
        next_ids = [*next_ids, draft]
    return logits


def test_the_logits_are_those_of_transformers(mtp: Mtp, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(folder, MTP, batch_max_tokens=9)  # prompts are computed in chunks
    recorder = Recorder(llm, monkeypatch)
    prompts = prompts_of(2, seed=3)
    prompts.append([*prompts[0][: len(prompts[0]) // 2], 3, 4, 8])

    for prompt in prompts:
        recorder.drafted.clear()
        (generation,) = llm.generate([prompt], params_of(LIKELY, GREEDY, {"max_new_tokens": 8}))
        text = prompt + generation.token_ids
        compared = 0
        for _, position, drafts, logits in recorder.drafted:
            if len(prompt) < position + 2 <= len(text):
                expected = expected_logits(mtp, text[: position + 2], drafts)
                for ours, theirs in zip(logits, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
                    compared += 1
        assert compared >= NUM_DRAFTS * 3


def test_auto_takes_the_layer_if_the_checkpoint_has_it(mtp: Mtp, folder: Path, tmp_path: Path) -> None:
    assert "mtp, up to 3 drafts" in summary(make(folder, "auto"))

    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "mtp." not in name}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    assert make(tmp_path, "auto").config.speculation is None
    with pytest.raises(CheckpointError, match=r"draft head.*the checkpoint lacks .*mtp"):
        make(tmp_path, MTP)
