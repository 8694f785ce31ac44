"""MTP heads of checkpoints: they compute what transformers computes, and never change a text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from lightserve.errors import CheckpointError, OptionError
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.worker.rpc import GetResult
from lightserve.worker.worker import ModelWorker
from test.models.architectures.cases import CASES
from test.worker.heads import Recorder
from test.worker.test_ngram import GREEDY, assert_same, make, params_of, prompts_of

NUM_DRAFTS = 3
MODELS = ["deepseek_v3", "glm4_moe"]
LONG = {"max_new_tokens": 25, "ignore_eos": True}
LIKELY = {"allowed_token_ids": (5, 9, 12)}  # the more drafts are right by chance


def save_model(folder: Path, name: str) -> None:
    """The last layer of a model of transformers becomes the MTP layer behind the others."""
    case = CASES[name]
    config = AutoConfig.for_model(case.model_type, **case.fields)
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in hf.parameters():
        parameter.data.normal_(std=0.15)
    hf.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layer, hidden = f"model.layers.{config.num_hidden_layers - 1}", config.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}.{norm}.weight"] = 1 + 0.2 * torch.randn(hidden)
    tensors[f"{layer}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, num_hidden_layers=config.num_hidden_layers - 1, num_nextn_predict_layers=1)


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


MTP = json.dumps({"method": "mtp", "num_speculative_tokens": NUM_DRAFTS})


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder, request.param)
    return folder


def mtp_of(folder: Path) -> tuple[Any, Any]:
    """transformers' model, and its MTP layer."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hf._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{hf.config.num_hidden_layers}.*"]  # as of the real size
    return hf, MtpModel.from_pretrained(hf).float().eval()


@torch.no_grad()
def expected_logits(hf: Any, mtp: Any, text: list[int], drafts: list[int]) -> list[Tensor]:
    """Of the drafts that follow a text, whose last token is not computed yet: by definition, without a cache."""
    hidden = hf.model(torch.tensor([text[:-1]])).last_hidden_state
    next_ids, logits = text[1:], []
    for draft in drafts:
        positions = torch.arange(1, len(next_ids) + 1)[None]
        out = mtp.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([next_ids]))
        logits.append(hf.lm_head(out[0, -1]))
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)
        next_ids = [*next_ids, draft]
    return logits


def test_the_logits_are_those_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, mtp = mtp_of(folder)
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
                expected = expected_logits(hf, mtp, text[: position + 2], drafts)
                for ours, theirs in zip(logits, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
                    compared += 1
        assert compared >= NUM_DRAFTS * 3


def test_a_head_computes_no_draft_that_the_next_step_cannot_have(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are worth something in some texts only. Alone, a request has the drafts of the step before."""
    prompts, params = prompts_of(2, seed=5), params_of(LIKELY, {"temperature": 1.5, "seed": 7, "max_new_tokens": 40})
    expected = make(folder, None).generate(prompts, params)
    llm = make(folder, MTP)
    object.__setattr__(llm._scheduler.only_group.limits, "weight_read_tokens", 3.0)
    passes = count_passes(llm, monkeypatch)

    for prompt, plain in zip(prompts, expected, strict=True):
        passes.clear()
        assert_same(llm.generate([prompt], params), [plain])

        assert all(computed == wanted for _, wanted, computed in passes)
        assert all(drafts <= before[2] for before, (drafts, _, _) in pairwise(passes))
        assert len({computed for _, _, computed in passes}) > 1


def count_passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of each step: its drafts, those that the next one may have, and how often the head has sampled after it."""
    worker, steps = llm.worker, list[tuple[int, int, int]]()
    assert isinstance(worker, ModelWorker)
    head = worker._head
    assert head is not None
    launch, sample, samples = worker.launch, head.sample, list[Tensor]()

    def count(step: Step) -> GetResult:
        samples.clear()
        get_result = launch(step)
        steps.append((step.num_drafts, step.next_drafts, len(samples)))
        return get_result

    def counted(*args: Any) -> Tensor:
        samples.append(sample(*args))
        return samples[-1]

    monkeypatch.setattr(worker, "launch", count)
    monkeypatch.setattr(head, "sample", counted)
    return steps


def test_a_quantised_kv_cache_holds_that_of_the_head_too(folder: Path) -> None:
    """Keys and values, or latents."""
    prompts, params = prompts_of(4), params_of(LIKELY, GREEDY)

    drafted = make(folder, MTP, kv_dtype="fp8").generate(prompts, params)

    assert_same(drafted, make(folder, None, kv_dtype="fp8").generate(prompts, params))
    assert any(one.drafts and one.drafts.rejected + one.drafts.accepted for one in drafted)


def test_auto_takes_the_mtp_layer_if_the_checkpoint_has_it(folder: Path, tmp_path: Path) -> None:
    assert "mtp, up to 3 drafts" in summary(make(folder, "auto"))

    without_mtp(folder, tmp_path)
    assert make(tmp_path, "auto").config.speculation is None


def summary(llm: LLM) -> str:
    assert llm.config.speculation is not None
    return llm.config.speculation.summary


def without_mtp(folder: Path, other_folder: Path) -> None:
    """Copy a model without its MTP layer, as some publish it: config.json still promises it."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    layer = f"model.layers.{config['num_hidden_layers']}."
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)},
        other_folder / "model.safetensors",
    )
    (other_folder / "config.json").write_text(json.dumps(config))


def test_a_checkpoint_without_its_mtp_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    without_mtp(folder, tmp_path)

    with pytest.raises(CheckpointError, match=r"draft head.*the checkpoint lacks .*eh_proj"):
        make(tmp_path, MTP)
    change_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(OptionError, match="no num_nextn_predict_layers"):
        make(tmp_path, MTP)


def test_other_models_are_refused_by_name(small_folder: str) -> None:
    with pytest.raises(OptionError, match="mtp is not supported for llama, only for deepseek_v3, glm4_moe, mimo"):
        make(Path(small_folder), MTP)
    assert make(Path(small_folder), "auto").config.speculation is None
