"""``quantization_config`` of config.json: which linears are stored how, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization import EightBitScheme, read_quant_config

WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
Q_PROJ = "model.layers.3.self_attn.q_proj"


def compressed(group: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    entry = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS} | (group or {})
    table = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": entry}}
    return table | more


@pytest.mark.parametrize(
    ("table", "scheme"),
    [
        ({"quant_method": "fp8"}, EightBitScheme("fp8", "row", "token")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, EightBitScheme("fp8", "row", "static")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, EightBitScheme("fp8", "block", "group")),
        ({"quant_method": "fbgemm_fp8"}, EightBitScheme("fp8", "row", "token")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, EightBitScheme("fp8", "row", "static")),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, EightBitScheme("fp8", "block", "none")),
        (compressed(), EightBitScheme("int8", "row", "token")),
        (compressed(quantization_status="frozen"), EightBitScheme("int8", "row", "token")),
        (compressed({"input_activations": None}), EightBitScheme("int8", "row", "none")),
        (compressed({"input_activations": INPUTS | {"dynamic": False, "strategy": "tensor"}}),
         EightBitScheme("int8", "row", "static")),
        (compressed({"weights": WEIGHTS | {"strategy": "group", "group_size": 64}}),
         EightBitScheme("int8", "group", "token", group_size=64)),
    ],
)  # fmt: skip
def test_a_config_gives_the_scheme_of_a_linear(table: dict[str, Any], scheme: EightBitScheme) -> None:
    config = read_quant_config(table)

    assert config.scheme_of(Q_PROJ) == scheme
    assert config.scheme_of("model.embed_tokens") is None
    assert config.scheme_of_router("model.layers.3.mlp.gate") is None
    assert "int8" in str(config) or "fp8" in str(config)


@pytest.mark.parametrize(
    ("listed", "module", "is_ignored"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("model.layers.1", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1", "model.layers.10.mlp.down_proj", False),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*self_attn.*", Q_PROJ, True),
        ("re:self_attn.*", Q_PROJ, False),
        ("*self_attn*", Q_PROJ, True),
        ("model.language_model.layers.3.self_attn.q_proj", Q_PROJ, True),
        ("model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.qkv_proj", True),
    ],
)
def test_an_ignored_module_is_meant_by_its_name_parts_of_it_or_a_pattern(
    listed: str, module: str, is_ignored: bool
) -> None:
    for table in (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [listed]},
        compressed(ignore=[listed]),
    ):
        assert (read_quant_config(table).scheme_of(module) is None) == is_ignored


def test_the_closest_target_of_a_linear_counts() -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": WEIGHTS},
        "attention": {"targets": ["re:.*self_attn.*"], "weights": WEIGHTS | {"strategy": "group", "group_size": 64}},
        "one": {"targets": [Q_PROJ], "weights": WEIGHTS | {"strategy": "group", "group_size": 32}},
    }
    config = read_quant_config(compressed(config_groups=groups))

    assert config.scheme_of("model.layers.0.mlp.up_proj") == EightBitScheme("int8", "row", "none")
    assert config.scheme_of("model.layers.3.self_attn.k_proj") == EightBitScheme("int8", "group", "none", 64)
    assert config.scheme_of(Q_PROJ) == EightBitScheme("int8", "group", "none", 32)


def test_a_linear_that_no_group_targets_is_stored_as_floats() -> None:
    config = read_quant_config(compressed({"targets": ["re:.*mlp.*"]}))

    assert config.scheme_of(Q_PROJ) is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"quant_method": "quark"}, r"quant_method 'quark' is not supported \(supported are .*compressed-tensors, "),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e5m2 is not supported; supported: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\] .*: \[128, 128\]"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "scheme none is not .*: dynamic, static; use"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, ": dynamic;"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "lm_head is not .*: a list of module names"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo NVFP4 is not supported; supported: FP8, "),
        ({"quant_method": "modelopt"}, "quant_algo None is not supported"),
        (compressed(format="marlin-24"), "format marlin-24 is not supported; supported: .*int-quantized"),
        (compressed(format="dense"), "format dense is not supported"),
        (compressed(config_groups={}), "config_groups is empty"),
        (compressed({"weights": None}), "weights null is not supported"),
        (compressed({"weights": WEIGHTS | {"num_bits": 6}}), "num_bits 6 is not supported; supported: 8"),
        (compressed({"weights": WEIGHTS | {"strategy": "attn_head"}}), "strategy attn_head is not supported"),
        (compressed({"weights": WEIGHTS | {"actorder": "group"}}), "actorder group is not supported"),
        (compressed({"weights": WEIGHTS | {"strategy": "group", "group_size": None}}), "group_size None is not"),
        (compressed({"input_activations": INPUTS | {"dynamic": "local"}}), "dynamic local is not supported"),
        (compressed({"input_activations": INPUTS | {"num_bits": 4}}), "num_bits 4 is not supported"),
        (compressed({"output_activations": INPUTS}), "output_activations with a value is not"),
        (compressed({"targets": ["Embedding"]}), "targets Embedding is not supported; supported: Linear, names"),
        (compressed({"targets": ["re:("]}), r"'\(' is not a regular expression"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "format sparse-24-bitmask is not supported"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config with rotations is not"),
        (compressed(quantization_status="calibration"), "status calibration is not supported; .*: compressed, frozen"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_its_name(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        read_quant_config(table)
