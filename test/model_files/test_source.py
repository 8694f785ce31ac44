from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from lightserve.model_files.quantization import read_quant_config
from test.model_files.files import llama3_factors, save_as_gguf, tiny_model
from test.real_model import smollm2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def refusal(model_dir: Path | str) -> str:
    with pytest.raises(ModelFilesError) as caught:
        resolve(str(model_dir))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_a_model_of_that_name(folder: Path) -> None:
    source = resolve(str(folder))

    assert (source.name, source.path) == ("tiny", folder)
    assert source.hf_config() == json.loads((folder / "config.json").read_text())
    assert source.weight_files() == [folder / "model.safetensors"]


def test_quantisation_is_read_from_model_optimizers_own_file(folder: Path) -> None:
    quantization = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))

    found = read_quant_config(resolve(str(folder)).hf_config()["quantization_config"])

    assert str(found).startswith("modelopt FP8: fp8")
    assert found.scheme_of("lm_head") is None


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")

    files = resolve(str(tmp_path)).weight_files()

    assert len(files) > 1
    assert files == sorted(tmp_path.glob("model-*.safetensors"))


def test_a_bin_file_is_used_if_there_are_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, folder / "pytorch_model.bin")

    assert resolve(str(folder)).weight_files() == [folder / "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), (2, 5, (2, 5)), ([3, 2], [5, 2], (2, 3, 5)), (None, 5, (5,)), (None, None, ())],
)
def test_eos_ids_come_from_both_configs(
    folder: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    set_json(folder / "config.json", eos_token_id=config)
    set_json(folder / "generation_config.json", eos_token_id=generation)

    assert resolve(str(folder)).eos_token_ids() == expected


def test_a_missing_generation_config_adds_nothing(folder: Path) -> None:
    (folder / "generation_config.json").unlink()

    assert resolve(str(folder)).eos_token_ids() == (2,)


def test_the_chat_template_comes_from_its_own_file_before_the_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "in the config"}))
    source = resolve(str(folder))
    assert source.chat_templates() == {"default": "in the config"}

    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "in json"}))
    assert source.chat_templates() == {"default": "in json"}

    (folder / "chat_template.jinja").write_text("in its own file")
    assert source.chat_templates() == {"default": "in its own file"}


def test_several_chat_templates_have_names(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    expected = {"tool_use": "tools", "default": "plain"}
    assert resolve(str(folder)).chat_templates() == expected

    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    assert resolve(str(folder)).chat_templates() == expected | {"rag": "documents"}

    (folder / "chat_template.jinja").write_text("own file")
    assert resolve(str(folder)).chat_templates() == {"default": "own file", "rag": "documents"}


def test_a_gguf_can_have_several_chat_templates(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": "documents",
    }
    source = resolve(str(save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", metadata)))

    assert source.chat_templates() == {"default": "plain", "tool_use": "tools", "rag": "documents"}


def test_a_folder_without_a_chat_template_has_none(folder: Path) -> None:
    assert resolve(str(folder)).chat_templates() == {}


def test_a_name_is_found_in_the_hf_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(folder, repository / "snapshots" / "abc")
    (repository / "snapshots" / "old").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    source = resolve("org/tiny")

    assert (source.name, source.path) == ("org/tiny", repository / "snapshots" / "abc")


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)


def test_broken_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{broken")

    assert refusal(folder).startswith(f"{folder / 'config.json'}: not readable as JSON")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    assert "no weights" in refusal(folder)


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shard = next(tmp_path.glob("model-00002-*"))
    shard.unlink()

    assert f"names {shard.name}, which is missing" in refusal(tmp_path)


def test_an_index_that_names_a_file_elsewhere_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))

    assert "outside the folder" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_safetensors_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])

    assert refusal(folder).startswith(f"{file}: the safetensors file is truncated or damaged")


def test_a_folder_with_one_gguf_and_no_config_is_that_gguf(tmp_path: Path) -> None:
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf")

    assert resolve(str(tmp_path)).weight_files() == [path]


def test_a_folder_with_several_ggufs_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()

    assert "a.gguf, b.gguf" in refusal(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "bloom"])
def test_a_ggufs_config_equals_the_models_config(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    path = save_as_gguf(model, tmp_path / "model.gguf")

    config = AutoConfig.for_model(**resolve(str(path)).hf_config()).to_dict()

    stated = {
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    }
    stated |= {"n_layer", "n_head", "intermediate_size", "rms_norm_eps", "layer_norm_epsilon", "hidden_act"}
    stated |= {"rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "apply_residual_connection"}
    wanted = {key: value for key, value in model.config.to_dict().items() if key in stated and value is not None}
    for key, value in wanted.items():
        assert config[key] == (pytest.approx(value) if isinstance(value, float) else value), key


def test_a_gguf_with_a_separate_head_is_not_tied(tmp_path: Path) -> None:
    tied = save_as_gguf(tiny_model("llama", tie_word_embeddings=True), tmp_path / "tied.gguf")
    untied = save_as_gguf(tiny_model("llama", tie_word_embeddings=False), tmp_path / "untied.gguf")

    assert resolve(str(tied)).hf_config()["tie_word_embeddings"] is True
    assert resolve(str(untied)).hf_config()["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_of_a_gguf_is_kept(kind: str, tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", metadata)

    scaling = resolve(str(path)).hf_config()["rope_scaling"]

    assert scaling["rope_type"] == kind
    assert scaling["factor"] == 4.0
    assert scaling.get("original_max_position_embeddings", 32) == 32


def test_llama3_scaling_is_reconstructed_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", {"rope_freqs.weight": rope_factors(scaling)})

    assert resolve(str(path)).hf_config()["rope_scaling"] == scaling


def test_factors_that_are_not_llama3s_are_refused(tmp_path: Path) -> None:
    odd = np.linspace(1, 4, 8, dtype=np.float32)
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", {"rope_freqs.weight": odd})

    assert "not Llama 3's scaling" in refusal(path)


def test_factors_of_one_mean_no_scaling(tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", {"rope_freqs.weight": ones})

    assert resolve(str(path)).hf_config()["rope_scaling"] is None


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "llama.rope.scaling.type is 'longrope'",
        ),
        ({"llama.expert_count": 8}, "metadata llama.expert_used_count is missing"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"split.count": 3}, "one of 3 files of a split GGUF"),
        ({"split.count": "3"}, "truncated or damaged"),
    ],
)
def test_an_unsupported_gguf_is_refused_with_the_reason(
    metadata: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", metadata)

    text = refusal(path)

    assert text.startswith(f"{path}: ")
    assert reason in text


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"))

    assert (
        "architecture 'mamba' is not supported; supported: afmoe, arcee, baichuan, bailingmoe, bailingmoe2, "
        in refusal(path)
    )


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")

    assert "not a GGUF file" in refusal(path)


@pytest.mark.parametrize("keep", [0, 6, 20, 200, 1000, -1])
def test_a_truncated_gguf_is_named(keep: int, tmp_path: Path) -> None:
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])

    text = refusal(path)

    assert text.startswith(f"{path}: ")
    assert "download it again" in text


def test_a_gguf_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x01\0\0\0" + bytes(64))

    assert "GGUF version 1" in refusal(path)


def test_the_default_models_config_equals_the_published_one() -> None:
    config = smollm2().hf_config()

    assert config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (30, 576, 1536)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["vocab_size"], config["max_position_embeddings"], config["rope_theta"]) == (49152, 8192, 1e5)
    assert config["tie_word_embeddings"] is True
    assert smollm2().eos_token_ids() == (0, 2)  # <|endoftext|>, <|im_end|>


def set_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))


def rope_factors(scaling: dict[str, object]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """What llama.cpp's converter writes, by transformers' own scaling."""
    rope = scaling | {"rope_theta": 10000.0}
    return llama3_factors(LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope))


def test_a_gguf_header_with_any_damaged_byte_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = save_as_gguf(tiny_model("llama"), tmp_path / "whole.gguf").read_bytes()
    first_tensor = whole.index(b"token_embd.weight")
    damaged = tmp_path / "damaged.gguf"

    for at in (*range(80), *range(first_tensor - 8, first_tensor + 60)):
        for byte in (0, 1, 0x7F, 0xFF):
            damaged.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            with contextlib.suppress(ModelFilesError):  # a byte of a name may be as good as another
                resolve(str(damaged))
