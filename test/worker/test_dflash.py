"""DFlash drafters: they compute what their format says, and never change a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightserve.common import ops
from lightserve.errors import CheckpointError, OptionError
from lightserve.offline.llm import LLM
from lightserve.worker.speculation.heads.proposer import RowsOfStep
from lightserve.worker.step_runner import StepOut
from lightserve.worker.worker import ModelWorker
from test.worker.dflash import TARGET_LAYERS, TorchDFlash, save_drafter
from test.worker.test_ngram import GREEDY, SEEDED, assert_same, make, num_accepted, params_of, prompts_of

VOCAB, TARGET_HIDDEN, DRAFTED_IDS = 131, 64, [5, 9, 12, 40]
NUM_DRAFTS = 3  # of blocks of four tokens
LIKELY = {"allowed_token_ids": tuple(DRAFTED_IDS)}
FORMATS = {"original": None, "speculators": DRAFTED_IDS}


def config_of(folder: str, **fields: Any) -> str:
    return json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": NUM_DRAFTS, **fields})


@pytest.fixture(scope="module", params=FORMATS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_drafter(tmp_path_factory.mktemp("drafter"), VOCAB, TARGET_HIDDEN, FORMATS[request.param])


@pytest.fixture(scope="module")
def speculators(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_drafter(tmp_path_factory.mktemp("drafter"), VOCAB, TARGET_HIDDEN, DRAFTED_IDS)


@pytest.fixture(scope="module")
def plain(small_folder: str) -> LLM:
    return make(small_folder, None)


class Recorder:
    """What is drafted after each step: the last position of a request, its drafts and their logits."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafted: list[tuple[int, list[int], Tensor]] = []
        self._logits: Tensor | None = None
        proposer = llm.worker._drafts._head
        assert proposer is not None
        sample, draft = ops.sample, proposer.draft

        def record_logits(logits: Tensor, *at: Any) -> Tensor:
            self._logits = logits
            return sample(logits, *at)

        def record(out: StepOut, rows: RowsOfStep | None, known_after: Tensor | None, num_drafts: int) -> None:
            self._logits = None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ops, "sample", record_logits)
                draft(out, rows, known_after, num_drafts)
            if self._logits is None:
                return
            assert out.for_head is not None
            step = out.for_head.step
            last = step.attn.b_start_loc + step.attn.b_seq_len - step.attn.b_ready_cache_len - 1
            places = last.long() if rows is None else rows.tokens[rows.last]
            of_reqs = self._logits.view(len(places), num_drafts, -1)
            for index, row in enumerate(out.columns.reqs["row"].tolist()):
                drafts = proposer._table[row, :num_drafts].tolist()
                self.drafted.append((int(step.position_ids[places[index]]), drafts, of_reqs[index]))

        monkeypatch.setattr(proposer, "draft", record)


def hidden_states(model: Any, text: list[int]) -> Tensor:
    """After the target layers, joined."""
    states: list[Tensor] = []
    hooks = [
        model.model.layers[layer].register_forward_hook(lambda *call: states.append(call[2].view(len(text), -1)))
        for layer in TARGET_LAYERS
    ]
    with torch.no_grad():
        model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return torch.cat(states, dim=-1)


def test_the_logits_are_those_of_the_definition(
    small_folder: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(small_folder, config_of(drafter), batch_max_tokens=9)  # prompts are computed in chunks
    recorder = Recorder(llm, monkeypatch)
    prompts = prompts_of(2, seed=3)
    prompts.append([*prompts[0][: len(prompts[0]) // 2], 3, 4, 8])
    definition = TorchDFlash(drafter, load_file(Path(small_folder) / "model.safetensors"))
    hf = AutoModelForCausalLM.from_pretrained(small_folder, dtype=torch.float32).eval()

    for prompt in prompts:
        recorder.drafted.clear()
        (generation,) = llm.generate([prompt], params_of(LIKELY, GREEDY, {"max_new_tokens": 12}))
        text, compared = prompt + generation.token_ids, 0
        for position, drafts, logits in recorder.drafted:
            if not len(prompt) < position + 2 <= len(text):
                continue
            expected = definition.logits(hidden_states(hf, text[: position + 1]), text[position + 1], NUM_DRAFTS)
            drafted = slice(None) if expected.shape[1] == VOCAB else DRAFTED_IDS
            torch.testing.assert_close(logits[:, drafted], expected[: len(drafts)], rtol=1e-4, atol=1e-4)
            compared += 1
        assert compared >= 3


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED | {"temperature": 1.0}], ids=["greedy", "seeded"])
def test_drafts_are_accepted_and_change_no_text(
    small_folder: str, speculators: str, plain: LLM, sampling: dict[str, Any]
) -> None:
    prompts, params = prompts_of(6), params_of(sampling, LIKELY)

    drafted = make(small_folder, config_of(speculators)).generate(prompts, params)

    assert_same(drafted, plain.generate(prompts, params))
    assert num_accepted(drafted) > 10


@pytest.mark.parametrize("depth", [1, 2])
def test_small_pools_and_steps_in_flight_change_no_text(
    small_folder: str, speculators: str, plain: LLM, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    llm = make(
        small_folder,
        config_of(speculators),
        max_total_token_num=160,
        running_max_req_size=8,
        batch_max_tokens=16,
        kv_dtype="none" if depth == 1 else "int8",
    )
    prompts = prompts_of(8, seed=5)
    prompts += [[*prompt[:-2], 7, 7] for prompt in prompts]
    expected = plain if depth == 1 else make(small_folder, None, kv_dtype="int8")

    for _ in range(2):
        drafted = llm.generate(prompts, params_of(LIKELY, SEEDED))
        assert_same(drafted, expected.generate(prompts, params_of(LIKELY, SEEDED)))
        assert num_accepted(drafted) > 0


def test_drafts_at_the_end_of_the_longest_text_are_left_out(small_folder: str, speculators: str, plain: LLM) -> None:
    llm = make(small_folder, config_of(speculators), max_req_total_len=40)
    prompts, params = [[5, 9, 12, 40] * 5], params_of(LIKELY, GREEDY, {"max_new_tokens": 20, "ignore_eos": True})

    assert_same(llm.generate(prompts, params), plain.generate(prompts, params))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "not of DFlash"),
        ({"hidden_size": 32}, "for a model with hidden_size 32, and the model has 64"),
        ({"other_vocab": 200}, "its vocabulary has 200 tokens, the vocabulary of the model 131"),
        ({"dflash_config": {"mask_token_id": 131, "target_layer_ids": [0]}}, "mask_token_id is 131, wanted a number"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 9]}}, r"layers \[1, 9\], and the model has 2"),
        ({"block_size": None}, "block_size is None"),
        ({"layer_types": ["sliding_attention"] * 3}, "a sliding window are not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor is not supported"),
        ({"model_type": "gpt2"}, "model_type 'gpt2', wanted llama or qwen3"),
    ],
    ids=str,
)
def test_a_drafter_that_does_not_fit_is_refused(
    small_folder: str, tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    vocab_size = fields.get("other_vocab", VOCAB)
    drafter = save_drafter(tmp_path, vocab_size, TARGET_HIDDEN, None, **fields)

    with pytest.raises(OptionError, match=problem):
        make(small_folder, config_of(drafter))


def test_a_drafter_that_lacks_a_tensor_is_refused_by_its_name(small_folder: str, tmp_path: Path) -> None:
    folder = Path(save_drafter(tmp_path, VOCAB, TARGET_HIDDEN, None))
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: layers\.1\.self_attn\.k_norm\.weight"):
        make(small_folder, config_of(str(folder)))
