"""What ``quantization_config`` says about each linear, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization import read_quant_config
from lightserve.model_files.quantization.bitsandbytes import Bnb4Scheme
from lightserve.model_files.quantization.grouped import AwqScheme, GptqScheme, GptqV2Scheme, PackQuantizedScheme
from lightserve.model_files.source import FolderSource

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
Q, HEAD = "model.layers.1.self_attn.q_proj", "lm_head"
DOWN, ROUTER = "model.layers.10.mlp.down_proj", "model.layers.1.mlp.gate"


def pack_quantized(format: str = "pack-quantized", input_activations: Any = None, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, **changes}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": input_activations}
    config = {"format": format, "ignore": ["lm_head"], "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", **config, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("table", [AWQ, GPTQ, AUTO_ROUND, BNB], ids=lambda table: table["quant_method"])
def test_heads_embeddings_and_routers_are_not_quantised(table: dict[str, Any]) -> None:
    config = read_quant_config(table)

    assert config.scheme_of(Q) == config.scheme_of(DOWN) is not None
    assert [config.scheme_of(HEAD), config.scheme_of("model.embed_tokens")] == [None, None]
    assert config.scheme_of_router(ROUTER) is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (AWQ, "awq, 4 bits, groups of 128"),
        ({**GPTQ, "desc_act": True}, "gptq, 4 bits, groups of 128, act-order"),
        ({**GPTQ, "bits": 8, "group_size": -1, "desc_act": True}, "gptq, 8 bits, one group per row"),
        (AUTO_ROUND, "auto-round, 4 bits, groups of 128"),
        ({**BNB, "bnb_4bit_use_double_quant": True}, "bitsandbytes, nf4 with quantised scales"),
    ],
)
def test_a_quantisation_is_described_in_a_few_words(table: dict[str, Any], words: str) -> None:
    assert str(read_quant_config(table)) == words


def test_the_names_of_older_awq_files_are_read() -> None:
    table = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}

    assert read_quant_config(table).scheme_of(Q) == AwqScheme(4, 64, False)


def test_modules_that_awq_did_not_convert_are_floats() -> None:
    config = read_quant_config({**AWQ, "modules_to_not_convert": ["self_attn"]})

    assert config.scheme_of(Q) is None
    assert config.scheme_of(DOWN) is not None


def test_the_first_dynamic_rule_that_matches_counts() -> None:
    rules = {r"-:model\.layers\.1\.": {}, r"+:.*\.q_proj": {"bits": 8}, r".*q_proj": {"sym": False}}
    config = read_quant_config({**GPTQ, "checkpoint_format": "gptq_v2", "dynamic": rules})

    assert config.scheme_of(Q) is None
    assert config.scheme_of("model.layers.2.self_attn.q_proj") == GptqV2Scheme(8, 128, True)
    assert config.scheme_of(DOWN) == GptqV2Scheme(4, 128, True)


@pytest.mark.parametrize("empty", [None, ""])
def test_an_empty_checkpoint_format_is_none(empty: str | None) -> None:
    both = {**GPTQ, "checkpoint_format": empty, "format": "gptq_v2"}

    assert read_quant_config({**GPTQ, "checkpoint_format": empty}).scheme_of(Q) == GptqScheme(4, 128, True)
    assert read_quant_config({**GPTQ, "format": empty}).scheme_of(Q) == GptqScheme(4, 128, True)
    assert read_quant_config(both).scheme_of(Q) == GptqV2Scheme(4, 128, True)


def test_gptq_may_quantise_the_head_and_only_some_modules() -> None:
    only = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]]
    config = read_quant_config({**GPTQ, "lm_head": True, "modules_in_block_to_quantize": only})

    assert config.scheme_of(HEAD) == config.scheme_of(Q) == GptqScheme(4, 128, True)
    assert config.scheme_of(DOWN) is None


def test_auto_round_has_other_rules_for_some_layers() -> None:
    extra = {
        Q: {"bits": 16, "data_type": "float"},
        HEAD: {"bits": 8, "group_size": -1},
        r".*\.down_proj": {"sym": False},
    }
    config = read_quant_config({**AUTO_ROUND, "extra_config": extra, "block_name_to_quantize": "model.layers"})

    assert config.scheme_of(Q) is None
    assert config.scheme_of(HEAD) == GptqScheme(8, None, True)
    assert config.scheme_of(DOWN) == GptqScheme(4, 128, False)
    assert config.scheme_of("visual.blocks.1.qkv") is None


def test_bitsandbytes_skips_whole_names_only() -> None:
    config = read_quant_config({**BNB, "llm_int8_skip_modules": ["layers.1", "o_proj"]})

    assert config.scheme_of(Q) is None
    assert config.scheme_of("model.layers.10.self_attn.o_proj") is None
    assert config.scheme_of(DOWN) == config.scheme_of(HEAD) == Bnb4Scheme("nf4", False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**AWQ, "version": "gemv"}, "version gemv is not supported; supported: gemm"),
    ({**AWQ, "version": "gemv_fast"}, "version gemv_fast"),
    ({**AWQ, "version": "marlin"}, "version marlin"),
    ({**AWQ, "backend": "llm-awq"}, "backend llm-awq"),
    ({**AWQ, "bits": 8}, "bits 8"),
    ({**AWQ, "zero_point": False}, "zero_point False"),
    ({**GPTQ, "bits": 2}, "bits 2.*supported: 4, 8"),
    ({**GPTQ, "bits": 3}, "bits 3"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin.*supported: gptq, gptq_v2"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True"),
    ({**GPTQ, "dynamic": {"+:a": {"bits": 3}}}, "bits 3"),
    ({**GPTQ, "sym": "yes"}, "sym yes"),
    ({**AUTO_ROUND, "packing_format": "auto_round:exllamav2"}, "packing_format auto_round:exllamav2"),
    ({**AUTO_ROUND, "act_bits": 8}, "act_bits 8"),
    ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type mx_fp"),
    ({**BNB, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type int4.*nf4, fp4"),
    ({**BNB, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage bfloat16"),
    ({**BNB, "load_in_4bit": False}, "load_in_4bit False"),
    (pack_quantized(format="nvfp4-pack-quantized"), "format nvfp4-pack-quantized.*mxfp4-pack-quantized"),
    (pack_quantized(num_bits=2), "num_bits 2.*supported: 4, 8"),
    (pack_quantized(strategy="block"), "strategy block.*supported: group, channel"),
    (pack_quantized(actorder="other"), "actorder other"),
    (pack_quantized(input_activations={"num_bits": 8}), "input_activations of pack-quantized"),
]
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({**AWQ, "group_size": 0}, "group_size 0 is not supported; supported: -1 and positive integers; correct it"),
    ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert lm_head .* a list of module names"),
    ({**GPTQ, "dynamic": {"+:(": {}}}, r"'\(' is not a regular expression"),
    (
        {**GPTQ, "modules_in_block_to_quantize": "q_proj"},
        "modules_in_block_to_quantize q_proj .* lists of module names",
    ),
    (pack_quantized(group_size=None), "group_size None"),
]


@pytest.mark.parametrize(("table", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_supported_is_named_with_a_remedy(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=f"{message}.*; use the unquantised checkpoint with --quantization"):
        read_quant_config(table)


@pytest.mark.parametrize(("table", "message"), DAMAGED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_damaged_value_is_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        read_quant_config(table)


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, PackQuantizedScheme(4, 128, True)),
        ({"symmetric": False, "actorder": "weight"}, PackQuantizedScheme(4, 128, False)),
        ({"actorder": "group"}, PackQuantizedScheme(4, 128, True, is_act_order=True)),
        ({"num_bits": 8, "strategy": "channel", "group_size": None}, PackQuantizedScheme(8, None, True)),
    ],
)
def test_compressed_tensors_has_packed_integers(changes: dict[str, Any], scheme: PackQuantizedScheme) -> None:
    config = read_quant_config(pack_quantized(**changes))

    assert config.scheme_of(Q) == scheme
    assert config.scheme_of(HEAD) is None


@pytest.mark.parametrize("fields", [{"linear_class": "autobitlinear", "quantization_mode": "online"}, {}])
def test_bitnet_is_refused_with_the_reason_and_the_file_that_works(fields: dict[str, str]) -> None:
    with pytest.raises(ModelFilesError, match=r"three values and inputs to 8 bits; .* has no quantization_config"):
        read_quant_config({"quant_method": "bitnet", **fields})


@pytest.mark.parametrize(
    ("file", "table", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": True}, "awq"),
    ],
)
def test_older_folders_have_the_quantisation_in_a_file_of_its_own(
    tmp_path: Path, file: str, table: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / file).write_text(json.dumps(table))

    found = FolderSource("name", tmp_path).hf_config()["quantization_config"]

    assert found == {"quant_method": method, **table}
    assert read_quant_config(found).scheme_of(Q) is not None
