"""Models with a KV cache in 8 bits: logits close to those of the unquantised cache, in any steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.parallel import RankGroup
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.messages.params import GenerationParams
from lightserve.model_files.config.kv_dtype import resolve_kv_dtype
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.models.registry import get_model_class
from lightserve.offline.llm import LLM
from test.models.architectures.case import Tensors, build
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.tiny import LLAMA, ONE_RANK, build_hf, build_with_kv, model_args
from test.small_text import small_backend

KV_DTYPES = ["fp8", "int8"]
# of the largest logit; random weights of this size make attention sharp, and rounded keys change which token wins
ERRORS = {"fp8": 0.12, "int8": 0.03}
PROMPTS = [[5, 17, 3, 99, 42, 8, 1, 64, 20, 7], [77, 2, 130]]
GREEDY = GenerationParams.of(max_new_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)


def logits_of(model: TpPartBaseModel, shared: int = 8) -> Tensor:
    """Of a prompt, a chunk beside a decode, a decode, and a request with a prefix of another."""
    session = Session(model)
    steps = [{0: PROMPTS[0][:6], 1: PROMPTS[1]}, {0: PROMPTS[0][6:], 1: [9]}, {0: [7], 1: [8]}]
    logits = [session.step(step) for step in steps]
    session.share_prefix(0, 2, shared)
    return torch.cat([*logits, session.step({2: [11, 12]})])


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "bloom-8-heads", "llama-tied-mha"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_close_to_those_of_the_unquantised_cache(name: str, kv_dtype: str) -> None:
    hf = build_hf(name)
    expected = logits_of(build_with_kv(hf, None))

    found = logits_of(build_with_kv(hf, kv_dtype))

    assert not found.isnan().any()
    assert 0 < (found - expected).abs().max() <= ERRORS[kv_dtype] * expected.abs().max()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_token_takes_one_byte_for_each_number_and_four_for_each_scale(kv_dtype: str) -> None:
    model = build_with_kv(build_hf("llama-gqa"), kv_dtype)

    heads, dim, layers = 2 * 2, 8, 2
    scale_bytes = {"fp8": 0, "int8": 4}[kv_dtype]
    assert model.kv_layout.bytes_per_token == layers * heads * (dim + scale_bytes)


# scales of checkpoints


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_fp8_takes_its_scales_from_the_checkpoint(names: tuple[str, str]) -> None:
    k_name, v_name = (f"model.layers.1.{name}" for name in names)
    scales = {k_name: torch.tensor(0.5), v_name: torch.tensor([0.25])}

    model = build_with_kv(build_hf("llama-gqa"), "fp8", scales=scales)

    found = [weight.kv_scales for weight in model.layer_weights]
    assert [scale.tolist() for scale in found if scale is not None] == [[1.0] * 4, [0.5, 0.5, 0.25, 0.25]]


def test_a_rank_takes_the_scales_of_its_own_heads() -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor([0.5, 0.25])}

    model = build_with_kv(build_hf("llama-gqa"), "fp8", RankGroup(1, 2), scales)

    scales_of_rank = model.layer_weights[0].kv_scales
    assert scales_of_rank is not None
    assert scales_of_rank.tolist() == [0.25, 1.0]


def test_one_scale_of_older_checkpoints_serves_keys_and_values() -> None:
    scales = {"model.layers.0.self_attn.kv_scale": torch.tensor(0.5), "model.layers.0.self_attn.q_scale": torch.ones(1)}

    model = build_with_kv(build_hf("llama-gqa"), "fp8", scales=scales)

    scales_of_layer = model.layer_weights[0].kv_scales
    assert scales_of_layer is not None
    assert scales_of_layer.tolist() == [0.5] * 4


def test_a_scale_keeps_large_values_that_fp8_could_not_store() -> None:
    hf = build_hf("llama-gqa")
    for layer in hf.model.layers:
        layer.self_attn.v_proj.weight.data *= 1e4
        layer.self_attn.o_proj.weight.data /= 1e4
    expected = logits_of(build_with_kv(hf, None))
    scales = {f"model.layers.{i}.self_attn.v_scale": torch.tensor(1e4) for i in range(2)}

    errors = [
        ((logits_of(build_with_kv(hf, "fp8", scales=given)) - expected).abs().max() / expected.abs().max()).item()
        for given in (scales, {})
    ]

    assert errors[0] <= ERRORS["fp8"] < errors[1]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_scales_that_another_kv_dtype_does_not_need_are_left_out(
    kv_dtype: str | None, log: pytest.LogCaptureFixture
) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}

    model = build_with_kv(build_hf("llama-gqa"), kv_dtype, scales=scales)

    assert model.layer_weights[0].kv_scales is None
    assert "not used" not in log.text


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"of shape \(3,\); a KV scale is one float, or one for each of 2 KV heads"),
        (torch.ones(1, dtype=torch.int8), "a KV scale is one float"),
        (torch.tensor(0.0), "a KV scale is above 0 and finite"),
        (torch.tensor(float("nan")), "a KV scale is above 0 and finite"),
    ],
)
def test_a_wrong_scale_is_refused_by_its_name(scale: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"layers.1.self_attn.k_scale.*{message}"):
        build_with_kv(build_hf("llama-gqa"), "fp8", scales={"model.layers.1.self_attn.k_scale": scale})


# what is chosen, and what is refused


def config_with(quantization: dict[str, Any] | None) -> ModelConfig:
    """Of a checkpoint with this quantization_config, whose weights nobody reads here."""
    config = ModelConfig.from_hf(LLAMA().to_dict())
    return replace(config, hf={**config.hf, "quantization_config": quantization})


@pytest.mark.parametrize(
    ("choice", "quantization", "expected"),
    [
        ("auto", None, None),
        ("auto", {"quant_method": "fp8"}, None),
        ("auto", {"kv_cache_scheme": None}, None),
        ("auto", {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8"),
        ("auto", {"kv_cache_quant_algo": "FP8"}, "fp8"),
        ("auto", {"kv_cache_quant_algo": None}, None),
        ("auto", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        ("none", {"kv_cache_quant_algo": "FP8"}, None),
        ("int8", {"kv_cache_quant_algo": "FP8"}, "int8"),
        ("fp8", None, "fp8"),
        ("none", {"kv_cache_quant_algo": "NVFP4"}, None),
    ],
)
def test_auto_is_what_the_checkpoint_was_quantised_for(
    choice: str, quantization: dict[str, Any] | None, expected: str | None
) -> None:
    assert resolve_kv_dtype(choice, config_with(quantization)) == expected


@pytest.mark.parametrize(
    "quantization",
    [
        {"kv_cache_scheme": {"num_bits": 4, "type": "int"}},
        {"kv_cache_scheme": "static"},
        {"kv_cache_quant_algo": "NVFP4"},
    ],
)
def test_a_kv_cache_that_a_checkpoint_declares_in_another_format_is_refused(quantization: dict[str, Any]) -> None:
    with pytest.raises(ModelFilesError, match=r"kv_cache_\w+ is .*, supported is .*; set --kv_dtype to"):
        resolve_kv_dtype("auto", config_with(quantization))


# models with latents


def model_with_latents(name: str, kv_dtype: str | None, tensors: Tensors | None = None) -> TpPartBaseModel:
    tiny = build(CASES[name])
    tiny = replace(tiny, tensors=tiny.tensors | (tensors or {}))
    args = model_args(tiny.config_json, tiny.checkpoint(), ONE_RANK)
    return get_model_class(args.config.model_type)(replace(args, kv_dtype=kv_dtype))


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear", "deepseek_v32"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_close_to_those_of_latents_that_are_not_quantised(name: str, kv_dtype: str) -> None:
    shared = 6  # the end of a chunk, where recurrent layers keep their states
    expected = logits_of(model_with_latents(name, None), shared)

    found = logits_of(model_with_latents(name, kv_dtype), shared)

    assert not found.isnan().any()
    assert 0 < (found - expected).abs().max() <= ERRORS[kv_dtype] * expected.abs().max()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_latent_has_one_scale_and_its_key_part_is_not_quantised(kv_dtype: str) -> None:
    model = model_with_latents("deepseek_v2", kv_dtype)

    layers = model.config.num_layers
    assert model.kv_layout.bytes_per_token == layers * (20 + 4 + 8 * 4)
    assert model.kv_layout.num_layers == layers


def test_fixed_scales_of_a_checkpoint_are_not_those_of_latents() -> None:
    scale = {"model.layers.1.self_attn.k_scale": torch.tensor(0.5)}

    model = model_with_latents("deepseek_v2", "fp8", scale)

    assert {weight.kv_scales for weight in model.layer_weights} == {None}


# as a worker runs it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    build_hf("llama-gqa").save_pretrained(path)
    small_backend().save(str(path / "tokenizer.json"))
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.v_scale": torch.tensor(0.5)}, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def folder_with_latents(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-deepseek")
    build(CASES["deepseek_v2"]).hf.save_pretrained(path)
    small_backend().save(str(path / "tokenizer.json"))
    return str(path)


def make(folder: str, kv_dtype: str, **options: Any) -> LLM:
    return LLM(folder, device="cpu", data_type="float32", max_total_token_num=600, kv_dtype=kv_dtype, **options)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("fixture", ["folder", "folder_with_latents"])
def test_deterministic_chunks_and_cached_prefixes_change_no_bit(
    request: pytest.FixtureRequest, fixture: str, kv_dtype: str
) -> None:
    folder = request.getfixturevalue(fixture)
    prompt = [(37 * i + i * i // 7) % 131 for i in range(90)]
    whole, in_chunks = (
        make(folder, kv_dtype, deterministic=True),
        make(folder, kv_dtype, deterministic=True, batch_max_tokens=16),
    )
    first = whole.generate([prompt], GREEDY)[0]

    cached = whole.generate([prompt], GREEDY)[0]
    chunked = in_chunks.generate([PROMPTS[0], prompt, PROMPTS[1]], GREEDY)[1]

    for again in (cached, chunked):
        assert (again.token_ids, again.logprobs, again.top_logprobs) == (
            first.token_ids,
            first.logprobs,
            first.top_logprobs,
        )


def test_the_operator_sees_how_kv_is_stored(folder: str) -> None:
    assert make(folder, "fp8").worker.dtype_and_device == "in float32 (KV in fp8) on cpu"
    assert make(folder, "auto").worker.dtype_and_device == "in float32 on cpu"
