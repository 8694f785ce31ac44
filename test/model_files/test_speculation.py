"""What --speculative_config and a draft head as --model_dir become, before anything loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightserve.config import WorkerConfig
from lightserve.errors import OptionError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.dflash import DFlashConfig
from lightserve.model_files.draft_head import Eagle3Config
from lightserve.model_files.source import FolderSource
from lightserve.model_files.speculation import resolved_speculation, served_with_head
from test.worker.heads import layer_config

TARGET = ModelConfig.from_hf({**layer_config(131), "num_hidden_layers": 10})
METHODS = [{"proposal_type": "other", "speculative_tokens": 9}, {"proposal_type": "greedy", "speculative_tokens": 5}]


def save(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def save_speculators(folder: Path, kind: str = "eagle3", **speculators: Any) -> str:
    return save(
        folder,
        speculators_model_type=kind,
        transformer_layer_config=layer_config(131),
        speculators_config=speculators,
    )


@pytest.mark.parametrize(
    ("fields", "drafts"),
    [
        ({"proposal_methods": METHODS, "default_proposal_method": "greedy"}, 5),
        ({"proposal_methods": METHODS}, 9),
        ({"proposal_methods": [{"speculative_tokens": 100}]}, 32),
        ({}, 3),
    ],
)
def test_a_head_as_model_dir_is_served_with_the_model_that_it_names(
    tmp_path: Path, fields: dict[str, Any], drafts: int
) -> None:
    head = save_speculators(tmp_path, verifier={"name_or_path": "the/model"}, **fields)

    worker = served_with_head(WorkerConfig(model_dir=head))

    assert worker.model_dir == "the/model"
    assert worker.speculation is not None
    assert (worker.speculation.method, worker.speculation.model) == ("eagle3", head)
    assert worker.speculation.num_speculative_tokens == drafts


def test_a_drafter_as_model_dir_is_served_with_the_model_that_it_names(tmp_path: Path) -> None:
    drafter = save_speculators(tmp_path, "dflash", verifier={"name_or_path": "the/model"}, proposal_methods=METHODS)

    worker = served_with_head(WorkerConfig(model_dir=drafter))

    assert worker.speculation is not None
    assert (worker.speculation.method, worker.speculation.num_speculative_tokens) == ("dflash", 9)


@pytest.mark.parametrize(("wanted", "drafts"), [(None, 7), (20, 7), (3, 3)])
def test_a_step_has_no_more_drafts_than_a_block(tmp_path: Path, wanted: int | None, drafts: int) -> None:
    fields = {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 9], "block_size": 8}}
    save(tmp_path, architectures=["DFlashDraftModel"], **layer_config(131), **fields)
    config = {"method": "dflash", "model": str(tmp_path)} | ({"num_speculative_tokens": wanted} if wanted else {})
    worker = WorkerConfig(speculative_config=json.dumps(config), load_format="dummy")

    speculation = resolved_speculation(worker, None, TARGET).speculation  # type: ignore[arg-type]

    assert speculation is not None
    assert speculation.num_speculative_tokens == drafts
    assert DFlashConfig.read(tmp_path, TARGET).aux_layers == (2, 5, 10)


@pytest.mark.parametrize(("wanted", "fits"), [(7, False), (6, True), (None, False)])
def test_a_block_has_to_fit_into_a_request(tmp_path: Path, wanted: int | None, fits: bool) -> None:
    fields = {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 9], "block_size": 8}}
    save(tmp_path, architectures=["DFlashDraftModel"], **layer_config(131), **fields)
    config = {"method": "dflash", "model": str(tmp_path)} | ({"num_speculative_tokens": wanted} if wanted else {})
    worker = WorkerConfig(speculative_config=json.dumps(config), load_format="dummy", max_req_total_len=7)

    if fits:
        assert resolved_speculation(worker, None, TARGET).speculation is not None  # type: ignore[arg-type]
        return
    with pytest.raises(OptionError, match="a block has 8 tokens, and a request at most 7; raise --max_req_total_len"):
        resolved_speculation(worker, None, TARGET)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [{"tp": 2, "ep": 2, "enable_dp_attention": True}, {"model_impl": "transformers"}])
def test_auto_drafts_nothing_where_a_head_cannot_draft(tmp_path: Path, flags: dict[str, Any]) -> None:
    path = Path(save(tmp_path, **{**layer_config(131), "model_type": "glm4_moe"}, num_nextn_predict_layers=1))
    source, model = FolderSource("glm", path), ModelConfig.from_hf(json.loads((path / "config.json").read_text()))

    of_head = resolved_speculation(WorkerConfig(speculative_config="auto"), source, model)
    config = WorkerConfig(speculative_config="auto", **flags)
    model = replace(model, is_of_transformers=config.model_impl == "transformers")

    assert of_head.speculation is not None
    assert of_head.speculation.method == "mtp"
    assert resolved_speculation(config, source, model).speculation is None


def test_a_drafter_whose_layers_nobody_names_reads_some_from_the_second_to_the_last_but_two(tmp_path: Path) -> None:
    fields = {"block_size": 8, "dflash_config": {"mask_token_id": 5}}
    save(tmp_path, architectures=["DFlashDraftModel"], **{**layer_config(131), "num_hidden_layers": 3}, **fields)

    assert DFlashConfig.read(tmp_path, TARGET).aux_layers == (2, 5, 8)


def test_a_head_as_model_dir_excludes_another_method(tmp_path: Path) -> None:
    head = save_speculators(tmp_path, verifier={"name_or_path": "the/model"})

    with pytest.raises(OptionError, match=r"is a draft head.*speculative_config is set too; leave out one"):
        served_with_head(WorkerConfig(model_dir=head, speculative_config="auto"))


@pytest.mark.parametrize("verifier", [None, {}, {"name_or_path": None}, {"name_or_path": 3}])
def test_a_head_that_names_no_model_cannot_be_model_dir(tmp_path: Path, verifier: Any) -> None:
    with pytest.raises(OptionError, match="does not name the model"):
        served_with_head(WorkerConfig(model_dir=save_speculators(tmp_path, verifier=verifier)))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "DFlashDraftModel"])
def test_a_head_in_the_original_format_cannot_be_model_dir(tmp_path: Path, architecture: str) -> None:
    head = save(tmp_path, architectures=[architecture], **layer_config(131))

    with pytest.raises(OptionError, match=r"is a draft head.*does not name the model.*set --model_dir to the model"):
        served_with_head(WorkerConfig(model_dir=head))


def test_a_model_is_served_as_it_is(tmp_path: Path) -> None:
    worker = WorkerConfig(model_dir=save(tmp_path, **layer_config(131)))

    assert served_with_head(worker) is worker


def test_the_default_hidden_states_are_those_of_a_low_a_middle_and_a_high_layer(tmp_path: Path) -> None:
    save(tmp_path, architectures=["LlamaForCausalLMEagle3"], **layer_config(131))

    assert Eagle3Config.read(tmp_path, TARGET).aux_layers == (2, 5, 7)


def test_a_name_becomes_a_folder_and_other_fields_stay(tmp_path: Path) -> None:
    save(tmp_path, architectures=["LlamaForCausalLMEagle3"], **layer_config(131))
    fields = {
        "method": "eagle3",
        "model": str(tmp_path),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.0,
    }
    worker = WorkerConfig(speculative_config=json.dumps(fields), load_format="dummy")

    assert resolved_speculation(worker, None, TARGET).speculation == worker.speculation  # type: ignore[arg-type]
