"""EAGLE-3 heads: they compute what their format says, and never change a text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightserve.errors import CheckpointError, OptionError
from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from lightserve.offline.results import Generation
from lightserve.worker.worker import ModelWorker
from test.worker.heads import AUX_LAYERS, Recorder, TorchHead, save_head
from test.worker.test_ngram import (
    ALWAYS,
    DRAFTED,
    GREEDY,
    SEEDED,
    SELDOM,
    TOKEN_BY_TOKEN,
    assert_same,
    params_of,
    prompts_of,
    without_costs,
)

VOCAB, TARGET_HIDDEN, DRAFTED_IDS = 131, 64, [5, 9, 12, 40]
NUM_DRAFTS = 3
LIKELY = {"allowed_token_ids": tuple(DRAFTED_IDS)}  # a head with random weights is right in one of four drafts


def make(folder: str, head: str | None, **options: Any) -> LLM:
    options = {"max_total_token_num": 3000, "running_max_req_size": 16} | options
    config = {"method": "eagle3", "model": head, "num_speculative_tokens": NUM_DRAFTS}
    options.setdefault("speculative_config", None if head is None else json.dumps(config))
    llm = LLM(folder, device="cpu", data_type="float32", **options)
    if llm.config.speculation is not None:
        without_costs(llm)
    return llm


def new_head(folder: Path, speculators: bool = False, **fields: Any) -> str:
    return save_head(folder / "head", VOCAB, TARGET_HIDDEN, DRAFTED_IDS, speculators, **fields)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def plain(small_folder: str) -> LLM:
    return make(small_folder, None)


@pytest.fixture(scope="module")
def drafting(small_folder: str, head: str) -> LLM:
    return make(small_folder, head)


def accepted(generations: list[Generation]) -> int:
    return sum(generation.drafts.accepted for generation in generations if generation.drafts)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in SELDOM)])
def test_no_option_of_a_request_changes_its_text(
    drafting: LLM, plain: LLM, name: str, sampling: dict[str, Any]
) -> None:
    fields = (DRAFTED | TOKEN_BY_TOKEN)[name]
    params = [params_of(sampling, fields), params_of(sampling, LIKELY)]
    prompts = prompts_of(2, seed=len(name))

    assert_same(drafting.generate(prompts, params), plain.generate(prompts, params))


def test_drafts_are_accepted(drafting: LLM, plain: LLM) -> None:
    prompts = prompts_of(6)

    for sampling in (GREEDY, SEEDED | {"temperature": 1.0}):
        drafted = drafting.generate(prompts, params_of(sampling, LIKELY))
        assert_same(drafted, plain.generate(prompts, params_of(sampling, LIKELY)))
        assert accepted(drafted) > 10


def test_a_prediction_is_drafted_from_before_the_head(drafting: LLM, plain: LLM) -> None:
    prompts, params = prompts_of(4), params_of(SEEDED)
    expected = plain.generate(prompts, params)
    wanted = [params, *(params.replace(prediction_ids=tuple(one.token_ids)) for one in expected[1:])]

    drafted = drafting.generate(prompts, wanted)

    assert_same(drafted, expected)
    assert accepted(drafted[1:]) > 0.5 * sum(len(one.token_ids) for one in expected[1:])
    assert accepted(drafted[1:]) > 2 * accepted(drafting.generate(prompts[1:], params))


def test_the_head_drafts_where_a_prediction_has_no_match(drafting: LLM, plain: LLM) -> None:
    prompts, params = prompts_of(4), params_of(GREEDY, LIKELY)
    wrong = params.replace(prediction_ids=tuple(range(60, 110)))

    drafted = drafting.generate(prompts, wrong)

    assert_same(drafted, plain.generate(prompts, params))
    assert accepted(drafted) > 5


def test_drafts_with_the_noise_of_the_request_are_accepted_more_often_than_without(drafting: LLM) -> None:
    """Of a request that samples almost at random, a quarter of greedy drafts would be right."""
    params = params_of(LIKELY, {"temperature": 50.0, "seed": 3})

    drafts = [generation.drafts for generation in drafting.generate(prompts_of(6), params)]

    total = sum(draft.accepted + draft.rejected for draft in drafts if draft)
    assert sum(draft.accepted for draft in drafts if draft) > 0.8 * total


def test_requests_that_are_preempted_and_share_prefixes_get_the_same_text(
    small_folder: str, head: str, plain: LLM
) -> None:
    llm = make(small_folder, head, max_total_token_num=160, running_max_req_size=8, batch_max_tokens=16)
    prompts = prompts_of(8, seed=5)
    prompts += [[*prompt[:-2], 7, 7] for prompt in prompts]
    params = params_of(LIKELY, SEEDED)

    for _ in range(2):
        assert_same(llm.generate(prompts, params), plain.generate(prompts, params))


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_flight_do_not_matter(
    small_folder: str, head: str, plain: LLM, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    llm = make(small_folder, head)
    prompts, params = prompts_of(6, seed=2), params_of(LIKELY, GREEDY)

    drafted = llm.generate(prompts, params)

    assert_same(drafted, plain.generate(prompts, params))
    assert accepted(drafted) > 0


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_quantised_kv_cache_holds_that_of_the_head_too(small_folder: str, head: str, kv_dtype: str) -> None:
    prompts, params = prompts_of(4), params_of(LIKELY, GREEDY)

    drafted = make(small_folder, head, kv_dtype=kv_dtype).generate(prompts, params)

    assert_same(drafted, make(small_folder, None, kv_dtype=kv_dtype).generate(prompts, params))
    assert accepted(drafted) > 0


def expected_logits(model: Any, head: TorchHead, text: list[int], drafts: list[int]) -> list[Tensor]:
    """Of the drafts that follow a text, whose last token is not computed yet: by definition, without a cache."""
    states: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[0].register_forward_pre_hook(lambda _, args: states.update({0: args[0][0]})),
        *(
            layer.register_forward_hook(lambda *call, count=count: states.update({count: call[2][0]}))
            for count, layer in enumerate(model.model.layers, 1)
        ),
    ]
    with torch.no_grad():
        model(torch.tensor([text[:-1]]))
        for hook in hooks:
            hook.remove()
        aux = torch.cat([states[count].view(len(text) - 1, -1) for count in AUX_LAYERS], dim=-1)
        hidden, next_ids, logits = head.fc(aux), text[1:], []
        for draft in drafts:
            summed = head.layer_out(hidden, torch.tensor(next_ids))
            logits.append(head.logits(summed[-1:])[0])
            hidden = torch.cat((hidden, head.recycled(summed[-1:])))
            next_ids = [*next_ids, draft]
    return logits


@pytest.mark.parametrize("speculators", [False, True], ids=["original", "speculators"])
@pytest.mark.parametrize(
    "fields", [{}, {"norm_before_residual": None}, {"norm_output": True}, {"norm_before_fc": True}], ids=str
)
def test_the_logits_are_those_of_the_definition(
    small_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculators: bool, fields: dict[str, Any]
) -> None:
    if "norm_before_residual" in fields:
        fields = {"norm_before_residual": not speculators}
    folder = new_head(tmp_path, speculators, **fields)
    llm = make(small_folder, folder, batch_max_tokens=9)  # prompts are computed in chunks
    recorder = Recorder(llm, monkeypatch)
    prompts = prompts_of(2, seed=3)
    prompts.append([*prompts[0][: len(prompts[0]) // 2], 3, 4, 8])
    torch_head = TorchHead(folder, load_file(Path(small_folder) / "model.safetensors")["model.embed_tokens.weight"])
    hf = AutoModelForCausalLM.from_pretrained(small_folder, dtype=torch.float32).eval()

    for prompt in prompts:
        recorder.drafted.clear()
        (generation,) = llm.generate([prompt], params_of(LIKELY, GREEDY, {"max_new_tokens": 12}))
        text = prompt + generation.token_ids
        compared = 0
        for _, position, drafts, logits in recorder.drafted:
            if position + 2 > len(text) or position + 2 <= len(prompt):
                continue
            for ours, expected in zip(
                logits, expected_logits(hf, torch_head, text[: position + 2], drafts), strict=True
            ):
                torch.testing.assert_close(ours[DRAFTED_IDS], expected, rtol=1e-4, atol=1e-4)
                compared += 1
        assert compared >= NUM_DRAFTS * 3


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"target_hidden_size": 32}, "for a model with hidden_size 32, and the model has 64"),
        ({"other_vocab": 200}, "its vocabulary has 200 tokens, the vocabulary of the model 131"),
        ({"architectures": ["LlamaForCausalLM"]}, "not of EAGLE-3"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, r"after \[2, 16, 29\] layers, and the model has 2"),
        ({"fc_norm": True}, "fc_norm is not supported"),
        ({"model_type": "gpt2"}, "model_type 'gpt2', wanted llama or qwen3"),
        ({"num_hidden_layers": 2}, "it has 2 layers"),
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_is_refused(
    small_folder: str, tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    if "other_vocab" in fields:
        head = save_head(tmp_path / "head", fields["other_vocab"], TARGET_HIDDEN, DRAFTED_IDS)
    else:
        head = new_head(tmp_path, **fields)

    with pytest.raises(OptionError, match=problem):
        make(small_folder, head)


def test_a_head_that_lacks_a_tensor_is_refused_by_its_name(small_folder: str, tmp_path: Path) -> None:
    folder = Path(new_head(tmp_path))
    tensors = load_file(folder / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"draft head.*lacks 1 tensors: midlayer\.hidden_norm\.weight"):
        make(small_folder, str(folder))


def test_without_weights_a_head_computes_with_random_ones(small_folder: str, tmp_path: Path) -> None:
    folder = Path(new_head(tmp_path))
    (folder / "model.safetensors").unlink()
    llm = make(small_folder, str(folder), load_format="dummy")

    (generation,) = llm.generate([[5, 6, 7]], GenerationParams.of(max_new_tokens=20, temperature=0.0, ignore_eos=True))

    assert len(generation.token_ids) == 20
    assert generation.drafts is not None


def test_a_schedule_accepts_the_drafts_of_a_head(small_folder: str, head: str) -> None:
    config = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    llm = make(small_folder, None, speculative_config=json.dumps(config | synthetic))

    (generation,) = llm.generate([[5, 6, 7]], params_of(GREEDY, {"max_new_tokens": 100, "ignore_eos": True}))

    assert llm.config.speculation is not None
    assert llm.config.speculation.summary.endswith("SYNTHETIC: 2.5 tokens a step, the texts are not real")
    assert generation.drafts is not None
    assert 50 <= generation.drafts.accepted <= 70


def test_random_requests_get_their_texts(drafting: LLM, plain: LLM) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown if it fails
    rng = random.Random(seed)
    options = [*DRAFTED.values(), *TOKEN_BY_TOKEN.values(), LIKELY, LIKELY, LIKELY]
    params = [
        params_of(rng.choice([GREEDY, SEEDED]), rng.choice(options), {"max_new_tokens": rng.randint(1, 40)})
        for _ in range(12)
    ]
    prompts = prompts_of(12, seed)

    assert_same(drafting.generate(prompts, params), plain.generate(prompts, params))
