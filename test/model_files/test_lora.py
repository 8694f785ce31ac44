"""LoRA adapters: what is read from PEFT's folders, what is refused, and where they may be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightserve.errors import AdapterError
from lightserve.model_files.lora.adapter import LinearSize, check_base, check_rank, read_adapter
from lightserve.model_files.lora.paths import folder_below, parse_module, versions
from test.lora_files import save_adapter, write_adapter

SIZES = {f"model.layers.{layer}.self_attn.{name}": (32, 48) for layer in range(2) for name in ("q_proj", "v_proj")}
LINEARS = {name: LinearSize(*size) for name, size in SIZES.items()}
Q0 = "model.layers.0.self_attn.q_proj"


def test_modules_have_their_rank_and_scale(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path, SIZES, rank=4, lora_alpha=6))

    assert adapter.modules.keys() == SIZES.keys()
    assert {(module.rank, module.scale, module.size) for module in adapter.modules.values()} == {(4, 1.5, (32, 48))}
    check_rank(adapter, 4)
    check_base(adapter, LINEARS)


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path, SIZES, rank=4, lora_alpha=6, use_rslora=True))

    assert adapter.modules[Q0].scale == 3.0


def test_patterns_count_for_the_modules_whose_names_they_end(tmp_path: Path) -> None:
    tensors = {}
    for name, rank in ((Q0, 2), ("model.layers.1.self_attn.q_proj", 4), ("model.layers.1.self_attn.v_proj", 3)):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(rank, 48)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(32, rank)
    folder = save_adapter(
        tmp_path,
        tensors,
        r=4,
        lora_alpha=8,
        rank_pattern={"layers.0.self_attn.q_proj": 2, "v_proj": 3},
        alpha_pattern={r".*\.0\..*q_proj": 10},
        layers_to_transform=[0, 1],
    )

    modules = read_adapter(folder).modules

    assert {name: (module.rank, module.scale) for name, module in modules.items()} == {
        Q0: (2, 5.0),
        "model.layers.1.self_attn.q_proj": (4, 2.0),
        "model.layers.1.self_attn.v_proj": (3, 8 / 3),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; supported: LORA"),
        ({"use_dora": True}, "use_dora True: DoRA adapters are not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]: whole modules"),
        ({"bias": "all"}, "bias 'all': only adapters with bias \"none\""),
        ({"lora_bias": True}, "lora_bias True: adapters with a bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes the base model"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices \[1\]: this field is not supported"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens \[1\]: this field is not supported"),
        ({"r": 0}, "r 0: must be an integer of at least 1"),
        ({"r": "4"}, "r '4': must be an integer"),
        ({"lora_alpha": math.nan}, "lora_alpha nan: must be a number"),
        ({"use_rslora": "yes"}, "use_rslora 'yes': must be true or false"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: '\\(' is no regular expression"),
        ({"rank_pattern": [1]}, r"rank_pattern \[1\]: must be an object"),
        ({"r": 8}, "q_proj has rank 4, but adapter_config.json says 8"),
    ],
)
def test_a_config_that_would_give_other_results_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_adapter(tmp_path, SIZES, rank=4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))

    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", None])
def test_initialisations_that_leave_the_base_model_are_allowed(tmp_path: Path, init: Any) -> None:
    assert read_adapter(write_adapter(tmp_path, SIZES, init_lora_weights=init)).modules


A, B = f"base_model.model.{Q0}.lora_A.weight", f"base_model.model.{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({A: torch.ones(4, 48)}, "q_proj has only lora_A"),
        ({A: torch.ones(4, 48), B: torch.ones(32, 5)}, "lora_A of rank 4, but lora_B of rank 5"),
        ({A: torch.ones(4, 48, 1), B: torch.ones(32, 4)}, "must be a matrix"),
        ({A: torch.ones(4, 48, dtype=torch.int32), B: torch.ones(32, 4)}, "is I32; supported: F32, F16, BF16"),
        ({A: torch.ones(4, 48), B: torch.ones(32, 4), "x.weight": torch.ones(2, 2)}, "x.weight is not part of a LoRA"),
        ({f"{Q0}.lora_magnitude_vector": torch.ones(2, 2)}, "DoRA adapters are not supported"),
        ({A: torch.ones(4, 48), A.replace("A.weight", "A.default.weight"): torch.ones(4, 48)}, "are the same tensor"),
        ({}, "has no tensors"),
    ],
)
def test_a_file_with_other_tensors_is_refused(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    save_adapter(tmp_path, tensors)

    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path)


def test_a_rank_over_the_limit_is_refused_with_the_flag(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path, SIZES, rank=17))

    with pytest.raises(AdapterError, match=r"has rank 17; the limit is 16 \(--max_lora_rank\)"):
        check_rank(adapter, 16)


def test_a_module_of_another_size_is_refused(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path, {**SIZES, Q0: (32, 40)}))

    with pytest.raises(AdapterError, match="linear of 40 inputs and 32 outputs; the model's has 48 and 32"):
        check_base(adapter, LINEARS)


def test_a_module_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path, {**SIZES, "model.layers.2.self_attn.q_proj": (32, 48)}))

    with pytest.raises(AdapterError, match=r"model.layers.2.self_attn.q_proj is not in this model; the model has "):
        check_base(adapter, LINEARS)


def test_a_file_that_lacks_modules_which_the_config_targets_is_refused(tmp_path: Path) -> None:
    some = {name: size for name, size in SIZES.items() if name != Q0}
    whole_layers = read_adapter(write_adapter(tmp_path / "a", some))
    one_layer = read_adapter(write_adapter(tmp_path / "b", some, layers_to_transform=[1]))
    other_target = read_adapter(write_adapter(tmp_path / "c", SIZES, target_modules=["q_proj", "v_proj", "up_proj"]))
    linears = {**LINEARS, "model.layers.0.mlp.up_proj": LinearSize(32, 48)}

    check_base(one_layer, LINEARS)
    with pytest.raises(AdapterError, match=f"targets q_proj, but lacks {Q0}"):
        check_base(whole_layers, LINEARS)
    with pytest.raises(AdapterError, match=r"targets up_proj, but lacks model.layers.0.mlp.up_proj"):
        check_base(other_target, linears)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = write_adapter(tmp_path, SIZES) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(AdapterError, match="truncated or damaged"):
        read_adapter(tmp_path)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config.json: cannot be read .* name a folder that PEFT has saved"):
        read_adapter(tmp_path)


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SIZES)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")

    with pytest.raises(AdapterError, match=r"adapter_model.bin is not supported; save the adapter as safetensors"):
        read_adapter(tmp_path)


# where adapters may be


def test_a_folder_below_the_root_may_be_named_by_both_kinds_of_path(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "root" / "team" / "one", SIZES)

    assert folder_below(str(tmp_path / "root"), "team/one") == folder.resolve()
    assert folder_below(str(tmp_path / "root"), str(folder)) == folder.resolve()


def test_a_path_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write_adapter(tmp_path / "outside", SIZES)
    write_adapter(root / "linked_file", SIZES)
    (root / "linked_file" / "adapter_model.safetensors").unlink()
    (root / "linked_file" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (root / "linked").symlink_to(outside)

    given = ["../outside", str(outside), "/", ".", "", "linked", "linked_file", "a/../..", "x\0y"]
    for path in given:
        with pytest.raises(AdapterError, match=r"--lora_dir"):
            folder_below(str(root), path)


def test_a_link_within_the_root_is_allowed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "blobs" / "one", SIZES)
    (tmp_path / "latest").symlink_to(folder)

    assert folder_below(str(tmp_path), "latest") == folder.resolve()


def test_a_file_that_is_written_again_has_another_version(tmp_path: Path) -> None:
    before = versions(write_adapter(tmp_path, SIZES))

    (tmp_path / "adapter_config.json").write_text("{}")

    assert versions(tmp_path) != before


@pytest.mark.parametrize("text", ["", "name", "=path", "name=", " name=path", "a\nb=path"])
def test_a_module_is_a_name_and_a_path(text: str) -> None:
    with pytest.raises(AdapterError, match="must "):
        parse_module(text)
    assert parse_module("a:b=/x=y") == ("a:b", "/x=y")
