"""A smaller model drafts for the served one: its logits are those of transformers, and no text changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lightserve.errors import CheckpointError, OptionError
from lightserve.offline.llm import LLM
from lightserve.worker.worker import ModelWorker
from test.models.architectures.cases import CASES
from test.small_text import small_backend
from test.worker.heads import Recorder
from test.worker.test_mtp import LIKELY, LONG
from test.worker.test_ngram import GREEDY, assert_same, make, params_of, prompts_of

NUM_DRAFTS = 3
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
DRAFT_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "num_hidden_layers": 2},
    "qwen3": {**SHAPE, "num_hidden_layers": 3},
    # layers with and without windows, and heads of other sizes than the served model
    "gemma3_text": {**SHAPE, "num_hidden_layers": 2, "head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2},
}


def save_draft_model(folder: Path, model_type: str, vocab_size: int) -> str:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **DRAFT_MODELS[model_type], vocab_size=vocab_size)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    small_backend().save(str(folder / "tokenizer.json"))
    return str(folder)


def config_of(folder: str) -> str:
    return json.dumps({"method": "draft_model", "model": folder, "num_speculative_tokens": NUM_DRAFTS})


@pytest.fixture(scope="module", params=DRAFT_MODELS)
def draft_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    # the smaller model may have fewer or more rows of padding
    vocab_size = {"llama": 128, "qwen3": 100, "gemma3_text": 140}[request.param]
    return save_draft_model(tmp_path_factory.mktemp(request.param), request.param, vocab_size)


@pytest.fixture(scope="module")
def plain(small_folder: str) -> LLM:
    return make(small_folder, None)


@torch.no_grad()
def test_the_logits_are_those_of_transformers(
    small_folder: str, draft_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the text without its first token, in which the prompts are chunks and some are cached."""
    hf = AutoModelForCausalLM.from_pretrained(draft_folder, dtype=torch.float32).eval()
    llm = make(small_folder, config_of(draft_folder), batch_max_tokens=9)
    recorder = Recorder(llm, monkeypatch)
    prompts = prompts_of(2, seed=3)
    prompts.append([*prompts[0][: len(prompts[0]) // 2], 3, 4, 8])

    for prompt in prompts:
        recorder.drafted.clear()
        (generation,) = llm.generate([prompt], params_of(LIKELY, GREEDY, {"max_new_tokens": 8}))
        text, compared = prompt + generation.token_ids, 0
        for _, position, drafts, logits in recorder.drafted:
            if len(prompt) < position + 2 <= len(text):
                ids = [*text[1 : position + 2], *drafts]
                expected = hf(torch.tensor([ids])).logits[0, position:-1]
                for ours, theirs in zip(logits, expected, strict=True):
                    size = min(len(ours), len(theirs))
                    torch.testing.assert_close(ours[:size], theirs[:size], rtol=2e-4, atol=2e-4)
                    compared += 1
        assert compared >= NUM_DRAFTS * 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_small_pool_and_steps_in_flight_change_nothing(
    small_folder: str, plain: LLM, tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_draft_model(tmp_path, "llama", 128)
    prompts, params = prompts_of(6, seed=3), params_of(GREEDY, LONG)
    expected = plain.generate(prompts, params)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)

    drafted = make(small_folder, config_of(folder), max_total_token_num=150).generate(prompts, params)

    assert_same(drafted, expected)


def counted(calls: Counter[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls[name] += 1
        return method(*args)

    return call


def test_nothing_is_drafted_for_steps_without_drafts(
    small_folder: str, plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If none is accepted, requests pause. The KV is there when they try again."""
    llm = make(small_folder, config_of(save_draft_model(tmp_path, "llama", 128)))
    object.__setattr__(llm._scheduler.only_group.limits, "weight_read_tokens", 30.0)
    assert isinstance(llm.worker, ModelWorker)
    head = llm.worker._drafts._head
    assert head is not None
    calls: Counter[str] = Counter()
    for name in ("draft", "_draft"):
        monkeypatch.setattr(head, name, counted(calls, name, getattr(head, name)))
    prompts, params = prompts_of(2, seed=4), params_of(GREEDY, {"ignore_eos": True, "max_new_tokens": 60})

    drafted = llm.generate(prompts, params)

    assert_same(drafted, plain.generate(prompts, params))
    assert 2 <= calls["_draft"] < 0.6 * calls["draft"]


def test_another_vocabulary_is_refused(small_folder: str, tmp_path: Path) -> None:
    folder = save_draft_model(tmp_path, "llama", 128)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["12"], vocab["ab"] = vocab["ab"], vocab["12"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(OptionError, match=r"the token '(ab|12)' has another id in the draft model .*; use a draft"):
        make(small_folder, config_of(folder))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(OptionError, match="has 128 tokens, and that of the model"):
        make(small_folder, config_of(folder))


def test_a_draft_model_of_shorter_texts_is_refused(small_folder: str, tmp_path: Path) -> None:
    folder = save_draft_model(tmp_path, "llama", 128)
    hf = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "gpt2", "n_positions": 100, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"n_embd": 48, "n_layer": 2, "max_position_embeddings": 100}))

    with pytest.raises(OptionError, match=r"it takes 100 tokens, and a request may have 128; lower"):
        make(small_folder, config_of(folder))


def test_a_draft_model_that_lacks_a_tensor_is_refused_by_its_name(small_folder: str, tmp_path: Path) -> None:
    folder = save_draft_model(tmp_path, "llama", 128)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(CheckpointError, match=r"the draft model of --speculative_config .*lacks .*layers\.1\.mlp\.up"):
        make(small_folder, config_of(folder))


def test_a_draft_model_with_recurrent_layers_is_refused(small_folder: str, tmp_path: Path) -> None:
    case, vocab_size = CASES["qwen3_next"], json.loads((Path(small_folder) / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(case.model_type, **{**case.fields, "vocab_size": vocab_size})
    config.architectures = ["Qwen3NextForCausalLM"]
    config.save_pretrained(tmp_path)

    with pytest.raises(OptionError, match="qwen3_next models cannot draft"):
        make(small_folder, config_of(str(tmp_path)), load_format="dummy")
