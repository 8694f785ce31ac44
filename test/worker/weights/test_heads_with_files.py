"""Updates of draft heads and draft models that have files of their own: they are like new ones, and no text changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightserve.common.basemodel import CheckpointTensor
from lightserve.messages.weights import CheckFolder, FinishLoad, LoadFolder, WeightSelector, WorkerWeightsReply
from lightserve.offline.llm import LLM
from test.models.reloading import places_of
from test.worker.dflash import save_drafter
from test.worker.test_draft_model import config_of as draft_model_config, save_draft_model
from test.worker.test_eagle3 import LIKELY, TARGET_HIDDEN, VOCAB, accepted, new_head
from test.worker.test_mtp import MTP, save_model as save_mtp_model
from test.worker.test_ngram import GREEDY, SEEDED, assert_same, make, params_of, prompts_of
from test.worker.weights.test_updater import Drafting, tensors_of

DRAFT = WeightSelector.DRAFT
OTHER_IDS = [5, 9, 13, 41]  # that the new head drafts


def eagle3(folder: Path) -> tuple[str, str]:
    head = new_head(folder)
    return head, json.dumps({"method": "eagle3", "model": head})


def dflash(folder: Path) -> tuple[str, str]:
    """With an embedding and a vocabulary of its own."""
    head = save_drafter(folder / "head", VOCAB, TARGET_HIDDEN, [5, 9, 12, 40])
    return head, json.dumps({"method": "dflash", "model": head, "num_speculative_tokens": 3})


def smaller_model(folder: Path) -> tuple[str, str]:
    model = save_draft_model(folder / "head", "qwen3", 128)
    return model, draft_model_config(model)


class Heads(NamedTuple):
    config: str  # of the first one
    first: Path
    second: Path

    def tensors(self) -> list[CheckpointTensor]:
        """Of the second one."""
        tensors = load_file(self.second / "model.safetensors")
        return [CheckpointTensor(name, tensor, "update") for name, tensor in tensors.items()]


@pytest.fixture(scope="module", params=[eagle3, dflash, smaller_model], ids=lambda save: save.__name__)
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    save: Callable[[Path], tuple[str, str]] = request.param
    head, config = save(tmp_path_factory.mktemp("heads"))
    second = Path(head).parent / "second"
    shutil.copytree(head, second)
    torch.manual_seed(11)
    tensors = {name: other(name, tensor) for name, tensor in load_file(second / "model.safetensors").items()}
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    return Heads(config, Path(head), second)


def other(name: str, tensor: Tensor) -> Tensor:
    if name == "d2t":
        return torch.tensor(OTHER_IDS) - torch.arange(len(OTHER_IDS))
    if not tensor.is_floating_point():
        return tensor
    scale = 0.2 if tensor.ndim == 1 else float(tensor.shape[-1]) ** -0.5
    noise: Tensor = torch.randn(tensor.shape) * scale + (tensor.ndim == 1)
    return noise


def logits_of_drafts(llm: LLM) -> Tensor:
    """Of all drafts of a request."""
    head: Any = llm.worker._head
    computed: list[Tensor] = []
    sample: Callable[..., Tensor] = head.sample

    def record(normed: Tensor, *at: Any) -> Tensor:
        computed.append(head.logits(normed))
        return sample(normed, *at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "sample", record)
        llm.generate([prompts_of(1, seed=4)[0]], max_new_tokens=6, temperature=0.0, ignore_eos=True)
    return torch.cat(computed)


def assert_drafts_as_new(drafting: Drafting, heads: Heads, small_folder: str) -> None:
    fresh = make(small_folder, heads.config.replace(str(heads.first), str(heads.second)))
    torch.testing.assert_close(logits_of_drafts(drafting.llm), logits_of_drafts(fresh), rtol=0, atol=0)


def finished(drafting: Drafting) -> WorkerWeightsReply:
    reply = drafting.updater.handle(FinishLoad())
    drafting.llm._scheduler.clear_cache()  # as the router does
    return reply


def test_a_trainer_replaces_the_weights_of_drafts_and_no_text_changes(heads: Heads, small_folder: str) -> None:
    drafting, plain = Drafting.of(Path(small_folder), heads.config), make(small_folder, None)
    head: Any = drafting.llm.worker._head
    before, places, tensors = logits_of_drafts(drafting.llm), places_of(head), heads.tensors()

    assert (drafting.send(tensors[:4], selector=DRAFT).missing or 0) > 0
    assert drafting.send(tensors[4:], selector=DRAFT).missing == 0
    assert finished(drafting) == WorkerWeightsReply(has_drafts=True)

    assert places_of(head) == places
    assert not torch.equal(logits_of_drafts(drafting.llm)[0], before[0])
    assert_drafts_as_new(drafting, heads, small_folder)
    for sampling in (GREEDY, SEEDED):
        params, prompts = params_of(sampling, LIKELY, {"max_new_tokens": 16}), prompts_of(3)
        drafted = drafting.llm.generate(prompts, params)
        assert_same(drafted, plain.generate(prompts, params))
        assert sampling is GREEDY or accepted(drafted) > 0


@pytest.mark.slow
def test_a_folder_replaces_the_weights_of_drafts(heads: Heads, small_folder: str) -> None:
    drafting = Drafting.of(Path(small_folder), heads.config)

    for command in (CheckFolder(str(heads.second), DRAFT), LoadFolder(str(heads.second), DRAFT)):
        reply = drafting.updater.handle(command)
        assert not reply.error, reply

    assert (reply.has_model, reply.has_drafts) == (False, True)
    assert_drafts_as_new(drafting, heads, small_folder)


def test_tensors_that_do_not_fit_are_refused(heads: Heads, small_folder: str) -> None:
    drafting, tensors = Drafting.of(Path(small_folder), heads.config), heads.tensors()
    linear = next(index for index, tensor in enumerate(tensors) if tensor.tensor.ndim == 2)
    wrong = tensors[linear]._replace(tensor=tensors[linear].tensor[:-1])
    unknown = tensors[linear]._replace(name="fc.wieght")

    assert "has shape" in drafting.send([wrong], selector=DRAFT).error
    assert "no place for 1 tensors: fc.wieght" in drafting.send([unknown], selector=DRAFT).error
    assert drafting.updater._load is None


def test_a_folder_that_does_not_fit_is_refused(heads: Heads, small_folder: str, tmp_path: Path) -> None:
    drafting = Drafting.of(Path(small_folder), heads.config)
    config = json.loads((heads.second / "config.json").read_text())
    tensors = load_file(heads.second / "model.safetensors")
    layer = config.get("transformer_layer_config", config)

    def refused(change: dict[str, Any], without: str = "") -> str:
        layer.update(change)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({name: one for name, one in tensors.items() if name != without}, tmp_path / "model.safetensors")
        return drafting.updater.handle(CheckFolder(str(tmp_path), DRAFT)).error

    assert refused({}) == ""
    assert "lacks 1 tensors" in refused({}, without="norm.weight" if "norm.weight" in tensors else "model.norm.weight")
    theta = {"rope_theta": 77.0, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    assert "in rope" in refused(theta)


def test_a_map_to_tokens_that_the_model_lacks_is_refused(small_folder: str, tmp_path: Path) -> None:
    head, config = eagle3(tmp_path)
    drafting = Drafting.of(Path(small_folder), config)
    tensors = load_file(Path(head) / "model.safetensors")
    wrong = tensors | {"d2t": tensors["d2t"] + VOCAB}
    save_file(wrong, Path(head) / "model.safetensors")
    message = f"d2t of the draft head maps to the tokens {VOCAB + 5} to {VOCAB + 40}, and the model has {VOCAB}"

    assert message in drafting.updater.handle(CheckFolder(head, DRAFT)).error
    reply = drafting.send([CheckpointTensor(name, tensor, "update") for name, tensor in wrong.items()], selector=DRAFT)
    assert reply.missing == 0
    assert message in drafting.updater.handle(FinishLoad()).error
    with pytest.raises(Exception, match="d2t of the draft head maps"):
        make(small_folder, config)


def test_weights_of_drafts_need_the_selector_and_something_that_drafts(small_folder: str, tmp_path: Path) -> None:
    head, config = eagle3(tmp_path)
    tensors = [
        CheckpointTensor(name, tensor, "update")
        for name, tensor in load_file(Path(head) / "model.safetensors").items()
        if name.startswith("midlayer.")
    ]

    with_all = Drafting.of(Path(small_folder), config).send(tensors)
    without_head = Drafting.of(Path(small_folder), None).send(tensors, selector=DRAFT)

    assert "no place for" in with_all.error
    assert "midlayer." in with_all.error
    assert "selector: this server has no draft head" in without_head.error
    assert with_all.is_client_error
    assert without_head.is_client_error


@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_a_copy_of_the_embedding_is_updated_with_the_model_and_not_with_the_head(
    method: str, small_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage of a pipeline has one."""
    for module in ("vocabulary", "mtp"):
        monkeypatch.setattr(f"lightserve.worker.speculation.heads.{module}.lacks_embedding", lambda model: True)
    folder, config = Path(small_folder), MTP
    if method == "mtp":
        save_mtp_model(folder := tmp_path, "glm4_moe")
    else:
        head = save_drafter(tmp_path / "head", VOCAB, TARGET_HIDDEN, None)
        config = json.dumps({"method": "dflash", "model": head, "num_speculative_tokens": 3})
    drafting = Drafting.of(folder, config)
    (piece,) = cast(Any, drafting.llm.worker._head).weights.embedding.pieces()
    old = piece.into.clone()
    of_model, of_mtp = tensors_of(folder)
    new = [tensor._replace(tensor=tensor.tensor + 1) for tensor in of_model]

    assert drafting.send(new).missing == 0
    assert drafting.updater.handle(FinishLoad()) == WorkerWeightsReply(has_model=True)
    torch.testing.assert_close(piece.into, old + 1)
    of_drafts = of_mtp or [
        CheckpointTensor(name, tensor, "update")
        for name, tensor in load_file(tmp_path / "head" / "model.safetensors").items()
    ]
    assert drafting.send(of_drafts, selector=DRAFT).missing == 0
    assert drafting.updater.handle(FinishLoad()) == WorkerWeightsReply(has_drafts=True)
