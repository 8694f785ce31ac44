"""What the modules of transformers compute, but this server cannot serve, is refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightserve.config import WorkerConfig
from lightserve.errors import LightserveError, ModelFilesError, OptionError
from lightserve.model_files.source import resolve
from lightserve.models.served_config import read_served_config
from lightserve.models.transformers_backend.attention import window_of
from test.models.architectures.case import SMALL, Case
from test.models.transformers_backend.tiny_models import CASES, load, save

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


def refusal(folder: Path, config: dict[str, Any], **flags: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LightserveError) as error:
        read_served_config(resolve(str(folder), needs_weights=False), WorkerConfig(**flags))
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "jamba", **SMALL}, "it has recurrent state"),
        ({"model_type": "codegen", "n_embd": 48}, "its attention does not go through transformers' AttentionInterface"),
        ({"model_type": "bart"}, "bart is an encoder and a decoder"),
        ({"model_type": "helium", **SMALL, "quantization_config": {"quant_method": "awq"}}, "is quantised"),
        ({"model_type": "vit"}, "transformers has no model class for vit"),
        ({"model_type": "helium", **SMALL, "num_hidden_layers": "two"}, "transformers cannot read the config"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_before_a_process_starts(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(tmp_path, config, model_impl="transformers")


def test_an_unknown_model_type_names_the_supported_ones_and_why_transformers_cannot_run_it(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"model_type": "jamba", **SMALL})

    assert "model_type 'jamba' is not supported; " in message
    assert message.endswith(
        "transformers cannot run jamba here: it has recurrent state; only attention is served this way"
    )


def test_model_impl_lightserve_refuses_what_has_no_class_here(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"model_type": "nanochat", **SMALL}, model_impl="lightserve")

    assert message.startswith("model_type 'nanochat' is not supported; ")


def test_code_of_the_folder_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    config = {"model_type": "my_own", "auto_map": {"AutoModelForCausalLM": "code.Model"}, **SMALL}
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")

    message = refusal(tmp_path, config)

    assert message.endswith("read it, then set --trust_remote_code to run it by transformers")


def test_model_type_excludes_model_impl_transformers() -> None:
    with pytest.raises(OptionError, match=r"transformers takes that of config\.json"):
        WorkerConfig(model_type="llama", model_impl="transformers")


def test_a_native_model_stays_native_unless_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6, **SMALL}))
    source = resolve(str(tmp_path), needs_weights=False)

    impls = [read_served_config(source, WorkerConfig(model_impl=impl)).is_of_transformers for impl in MODEL_IMPLS]

    assert impls == [False, False, True]


MODEL_IMPLS: Any = ("auto", "lightserve", "transformers")


def test_requests_are_as_long_as_one_rope_serves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "helium", **SMALL, "head_dim": 8, "rope_parameters": LONGROPE})
    )

    config = read_served_config(resolve(str(tmp_path), needs_weights=False), WorkerConfig(model_impl="transformers"))

    assert config.request_len(None) == 64
    with pytest.raises(ModelFilesError, match="max_req_total_len=65, but the model supports 64 tokens; lower it"):
        config.request_len(65)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("lfm2", {**SMALL, "layer_types": ["conv", "full_attention", "conv"]}), "it has state beside its KV"),
        (
            Case("llama4_text", {**SMALL, "head_dim": 8, "num_local_experts": 2, "no_rope_layers": [1, 1, 0]}),
            "layer 2 computes positions from the length of transformers' cache",
        ),
        (Case("diffllama", SMALL), "layer 0 computes more than one attention"),
        (Case("doge", {**SMALL, "keep_window_size": 8}), "its attention changes the mask of the model"),
        (Case("electra", {**SMALL, "embedding_size": 48}), "its attention mask is neither causal nor a sliding window"),
    ],
    ids=lambda value: value.model_type if isinstance(value, Case) else "",
)
def test_a_model_that_computes_something_else_is_refused_while_it_is_loaded(
    tmp_path: Path, case: Case, reason: str
) -> None:
    save(case, tmp_path)

    with pytest.raises(ModelFilesError) as error:
        load(tmp_path)

    assert reason in str(error.value)
    assert "cannot be run by transformers here: " in str(error.value)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save(CASES["helium"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})

    with pytest.raises(
        ModelFilesError, match=r"1 tensors of the model are missing \(model.layers.1.mlp.up_proj.weight"
    ):
        load(tmp_path)


def test_weights_in_pickles_are_never_read(tmp_path: Path) -> None:
    save(CASES["helium"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelFilesError, match="safetensors"):
        load(tmp_path)


def _chunks(size: int) -> Callable[..., Tensor]:
    return lambda _, __, query, key: (key <= query) & (key // size == query // size)


def _window(size: int) -> Callable[..., Tensor]:
    return lambda _, __, query, key: (key <= query) & (query - key < size)


@pytest.mark.parametrize(
    ("mask", "window"), [(_window(1), 1), (_window(700), 700), (_window(2000), None), (_chunks(2000), None)]
)
def test_the_window_of_a_mask_is_found(mask: Callable[..., Tensor], window: int | None) -> None:
    assert window_of(mask, 2000) == window


@pytest.mark.parametrize("mask", [_chunks(1999), _chunks(8), lambda _, __, query, key: key >= 0])
def test_other_masks_are_refused(mask: Callable[..., Tensor]) -> None:
    with pytest.raises(ModelFilesError, match="neither causal nor a sliding window"):
        window_of(mask, 2000)
